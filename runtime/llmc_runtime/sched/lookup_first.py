"""Prompt lookup before a head: if it finds drafts that are likely to be accepted, the head makes none.

Looking up the sequence's last tokens in its history takes almost no time, and where a text repeats itself, the tokens
that followed are accepted more often than those of a head. The device does both in one step: the model's program looks
up drafts, and the head then drafts only if none were found (see exec.draft_steps). That is why the host must know what
was found before the head begins, so the device's calls must return after completion. Used for a single running request;
several would have to wait for the one whose head drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.sched.draft_costs import expected_tokens
from llmc_runtime.sched.draft_stops import Stop, worth_verifying
from llmc_runtime.sched.draft_trials import Trials, kind_of
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import StepOutput

_MEMORY = 0.9  # weight of a request's past acceptance at each verification
_KIND_MEMORY = 0.98  # weight of a kind's past acceptance at each verification
_PRIOR_WEIGHT = 2.0  # weight of the acceptance of the kind in the estimate of one request, in drafts
_INITIAL_RATE = 0.8  # acceptance of the first draft of a kind: a text that repeats three tokens often goes on as before
# Plans after which a draft is verified although it does not pay, to measure acceptance: at first, and at most. They are
# doubled each time until a draft is accepted.
_FIRST_WAIT, _LAST_WAIT = 64, 512
NEVER = 1 << 62  # a number of plans that does not end


class LookupFirst:
    """How many of the drafts that prompt lookup finds are verified, by how many were accepted lately."""

    def __init__(self) -> None:
        # kind of request -> (drafts compared lately, of these accepted)
        self._kinds: dict[int, tuple[float, float]] = {}
        self._wait = self._next_probe = _FIRST_WAIT  # plans between probes, and the plan from which on one is made

    def rate(self, request: Request) -> float:
        """The estimated probability that a draft of the request is accepted."""
        compared, accepted = request.lookup_trials
        kind_compared, kind_accepted = self._kinds.get(kind_of(request), (0.0, 0.0))
        kind_rate = (kind_accepted + _INITIAL_RATE) / (kind_compared + 1)
        return (accepted + _PRIOR_WEIGHT * kind_rate) / (compared + _PRIOR_WEIGHT)

    def speed(self, request: Request, costs: Sequence[float]) -> float:
        """Return the expected tokens of a step that verifies all drafts, in the time of one without drafts.

        costs: see worth_verifying.
        """
        return expected_tokens(self.rate(request), len(costs) - 1) / (1.0 + costs[-1])

    def probes(self, plan: int) -> bool:
        """Whether drafts are to be verified in plan number `plan` to measure their acceptance."""
        return plan >= self._next_probe

    def num_to_verify(self, request: Request, num_drafts: int, costs: Sequence[float], plan: int) -> int:
        """Return how many of the drafts of a request to verify, in plan number `plan`.

        costs: see worth_verifying.
        """
        count = worth_verifying(Stop((self.rate(request),), 0.0), [0.0] * num_drafts, costs)
        if self.probes(plan):
            self._wait = min(2 * self._wait, _LAST_WAIT)
            count, self._next_probe = max(count, 1), plan + self._wait
        return count

    def take_found(
        self, requests: Sequence[Request], output: StepOutput, trials: Trials | None, costs: Sequence[float], plan: int
    ) -> int:
        """Take what a step of these requests has found.

        trials: of the kind of the only request, whose credit pays for the drafts; None: there are several requests,
        for which no drafts are taken. costs: see worth_verifying.

        Returns the plan before which no drafts will be taken, whatever is found, unless some are verified or `costs`
        change.
        """
        wait = NEVER if trials is None else trials.wait_for_lookup(plan)
        until = plan + wait
        for index, (request, found) in enumerate(zip(requests, output.proposed)):
            num_drafts = 0 if wait or index in output.likely else found
            self.take(request, num_drafts, costs, plan)
            if num_drafts == len(costs) - 1 and not request.num_drafts:
                until = self._next_probe  # as many as can be found do not pay
        return until

    def take(self, request: Request, num_drafts: int, costs: Sequence[float], plan: int) -> None:
        """Take the drafts that prompt lookup has found for a request whose head has not drafted after it, if any."""
        request.from_lookup = request.verifies_lookup = False
        if num_drafts:
            request.num_drafts = self.num_to_verify(request, num_drafts, costs, plan)
            request.from_lookup, request.likely = request.num_drafts > 0, []

    def record(self, request: Request, drafts: int, accepted: int) -> None:
        """Record that the first `accepted` of a number of drafts were accepted."""
        if accepted:
            self._wait = _FIRST_WAIT
        compared, kind = accepted + (accepted < drafts), kind_of(request)
        past_compared, past_accepted = request.lookup_trials
        request.lookup_trials = (_MEMORY * past_compared + compared, _MEMORY * past_accepted + accepted)
        past_compared, past_accepted = self._kinds.get(kind, (0.0, 0.0))
        self._kinds[kind] = (_KIND_MEMORY * past_compared + compared, _KIND_MEMORY * past_accepted + accepted)
