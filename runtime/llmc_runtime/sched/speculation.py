"""Speculative decoding in the scheduler: how many drafted tokens a step verifies, by measured costs and acceptance.

Invariant: drafts only change how many tokens a step gives, never which ones, so every number of drafts is correct.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_costs import BRIEF_GAIN, Choice, DraftCount, expected_tokens
from llmc_runtime.sched.draft_stops import Stop, worth_verifying
from llmc_runtime.sched.draft_trials import Trials, TrialsByKind, kind_of
from llmc_runtime.sched.lookup_first import LookupFirst
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work

PROBE = 64  # while drafting does not pay, one plan in so many verifies a draft of some rows, to measure acceptance
MODEL_PROBE = 512  # the same for a draft model, which must first compute the KV that it lacks; one row each time
SOON, LATE = 4, 128  # the same if a head has a single row: at first, and at most. Doubled after each probe
MODEL_SOON = 32  # the same if a draft model has a single row: at first
PROBED = 16  # one row in so many is probed, other rows each time
WARM = 8  # plans before a probe in which a head computes its entries, which it needs to draft as well as before
DEPTH = 2  # plans in a row that try drafts of the host, since at the first one a step may be in flight
_MEMORY = 0.9  # weight of a row's past acceptance at each verification
_HEAD_MEMORY = 0.7  # the same for a head: its drafts are accepted where the text is easy, many in a row
_BRIEF_MEMORY = 0.5  # the same if drafting stops after unlikely drafts, so that a wrong estimate costs little
_UNVERIFIED = 0.5  # weight of a draft that was not verified, as unlikely, in a row's past acceptance
_RARE = 0.01  # lowest rate of acceptance for which a limit is computed
_REFRESH = 16  # plans after which the number of drafts is chosen anew
_AGAIN = 4096  # plans after which costs are measured again
_SELDOM = 4  # one plan in so many is measured if it has no drafts and its cost is known
_IDLE = 16  # the same if nothing is to be decided
_PRIOR = 2.0  # weight of the acceptance of all rows in the estimate of one row, in verifications


class Speculation:
    """Decides how many drafts to make and to verify. Constructed for each scheduler that drafts."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config, self.count = config, DraftCount(config.num_tokens, config.max_rows > 0)
        self.plans = self._rows = 0  # plans so far, and running requests of the last one
        self._choice = Choice(0)
        self._probes = 0  # rows of which this plan verifies a draft to measure acceptance
        self._looks_up = config.looks_up
        self._idle = self._looks_up  # nothing is to be decided for this plan (see begin_idle)
        self._found = False  # prompt lookup has found drafts for a row of the last step
        self._again = _AGAIN  # the plan at which costs are measured again
        self._model, self._memory = config.max_rows > 0, _MEMORY
        if config.stops:
            self._memory = _BRIEF_MEMORY
        elif config.head:
            self._memory = _HEAD_MEMORY
        self._single: dict[float, Choice] = {}  # choices of this period for a single row, by its rounded acceptance
        self._slope, self._verification = 0.0, list[float]()  # costs of drafts in this period; empty: not computed yet
        self._request, self._known = "", (0.0, 0.0)  # the id of the single row's request, and its last draft_trials
        self._soon, self._late = (SOON, LATE) if config.head else (MODEL_SOON, MODEL_PROBE)
        self._trials = TrialsByKind(lambda: self._soon)
        self._batch = Trials(0)  # what drafting has gained and cost where the number is chosen for all rows
        self._kind = self._trials[0]  # that of the single row
        self._probe = 0  # the plan of the next probe of a draft model
        self._wake = 0  # the plan before which nothing is to be decided for the single row, which does not draft
        self._lookup = LookupFirst() if config.looks_first else None
        self._alone = False  # a single request runs in this plan

    def begin_idle(self, running: Sequence[Request]) -> bool:
        """Begin a plan for which nothing is to be decided; otherwise return False, and leave it to `begin`.

        Nothing is if prompt lookup has found no drafts, or if the single row waits for its next trial of a model's.
        """
        plan = self.plans + 1
        if self._looks_up:
            self._idle = not self._found
        else:
            self._idle = plan < self._wake and len(running) == 1 and running[0].id == self._request
        if self._idle:
            self.plans = plan
        return self._idle

    def begin(self, running: Sequence[Request], room: int) -> None:
        """Begin a plan in which these requests run, and whose step can verify up to `room` drafts in all."""
        self.plans += 1
        self._alone = len(running) == 1
        self._measure_again_in_time(len(running))
        self._probes = self._wake = 0
        if self.plans % _REFRESH == 0 or len(running) != self._rows:
            self._slope, self._verification = 0.0, []
        if self._looks_up:
            self._idle = not any(request.num_drafts for request in running)
            if self._idle:
                return
        if len(running) == 1 and self._model:
            self._choose_single(running[0], room)
        else:
            self._choose_for_all(running, room)

    def _measure_again_in_time(self, rows: int) -> None:
        """Let the costs of steps be measured again, every _AGAIN plans."""
        if self.plans >= self._again:
            self.count.again(rows)
            self._again = self.plans + _AGAIN

    def _choose_for_all(self, running: Sequence[Request], room: int) -> None:
        """Choose the number of drafts by the rates of all rows; if drafting does not pay, choose rows to probe."""
        rows, trials = len(running), self._batch
        if rows and (self._choice.measures or rows != self._rows or self.plans % _REFRESH == 0):
            if self._rows == 1 and self._model:
                trials.began(self.plans)
            self._rows = rows
            pays = not trials.affords(self.plans)
            self._choice = self.count.choose([self._rate(request) for request in running], room, measures=pays)
        if trials.credit < 0:
            self._choice = Choice(0)
        if self._choice.most:
            if not self._choice.measures:
                self._next_probe(MODEL_PROBE)
        elif self._model:
            if self.plans >= self._probe:
                self._probes = 1
                self._next_probe(MODEL_PROBE)
        elif self.plans % PROBE < (DEPTH if self.config.host else 1):
            self._probes = max(1, rows // PROBED)

    def _next_probe(self, wait: int) -> None:
        """Let this many plans pass before the next probe of a draft model."""
        self._probe = self.plans + wait

    def _choose_single(self, request: Request, room: int) -> None:
        """Choose the number of drafts of a draft model's only row, or whether to try them."""
        if self._rows != 1 or request.id != self._request:
            if self._rows == 1:
                self._kind.ran(self.plans)
            self._rows, self._request, self._choice = 1, request.id, Choice(0, measures=True)
            self._kind = self._trials[kind_of(request)]
            self._kind.began(self.plans)
            if self.config.head:
                self._wait_for_probe(max(self._soon, self._kind.wait // 16))  # it may differ from those before it
        self._choose_rate(request, room)
        if self._choice.most and not self._choice.measures:
            self._wait_for_probe(self._soon)
        if self._choice.most or self._choice.measures:
            return
        if self.plans >= self._probe:
            if not (missing := self._kind.affords(self.plans)):
                self._probes = 1
                self._wait_for_probe(min(2 * self._kind.wait, self._late))
                return
            self._next_probe(missing + WARM)
        self._wake = self._probe - (WARM if self.config.head else 0)

    def _wait_for_probe(self, wait: int) -> None:
        self._kind.wait = wait
        self._next_probe(wait)

    def _choose_rate(self, request: Request, room: int) -> None:
        """Choose the number of drafts of the only row: with a head in every plan, as its acceptance changes fast."""
        trials, refreshes = request.draft_trials, self.plans % _REFRESH == 0
        if (trials is self._known or not self.config.head) and not refreshes and not self._choice.measures:
            return  # nothing was learned since the last plan
        self._known = trials
        if self._kind.credit < 0 and self._kind.affords(self.plans):
            self._choice = Choice(0)
            return
        if refreshes:
            self._single.clear()
        rate = round(self._rate(request), 2)
        choice = self._single.get(rate)
        if choice is None:
            choice = self.count.choose([rate], room, BRIEF_GAIN)
            if not choice.measures:
                self._single[rate] = choice
        self._choice = choice

    @property
    def wants(self) -> bool:
        """Whether drafts of some rows pay, or are to be tried, in this plan."""
        return not self._idle and (self._choice.most > 0 or self._probes > 0)

    @property
    def verifies(self) -> bool:
        """Whether this plan may verify drafts; those of a model were wanted when they were made."""
        return self._model or self.wants

    def plain(self, work: Sequence[Work]) -> bool:
        """Whether the draft model does nothing after the step planned now, and a head's entries are hardly of use."""
        for item in work:
            if item.propose or item.num_tokens > 1 or item.fill:
                return False
        return not self.config.head or self._probe - self.plans > WARM

    def proposals(self, request: Request) -> int:
        """Return how many tokens the draft model drafts for a request."""
        most = self.choose(request, self.config.num_tokens)
        return self.config.num_tokens if most and self._stops else most

    def prefers_lookup(self, request: Request) -> bool:
        """Whether the head makes no drafts for a request if prompt lookup finds some."""
        lookup = self._lookup
        if lookup is None or not self._alone or self._choice.measures:
            return False
        if lookup.due(self.plans):
            return True
        drafts = max(1, self._choice.most)
        of_head = expected_tokens(self._rate(request), drafts) / self.count.steps(1, drafts, drafts)
        return lookup.speed(request, self._costs()) >= of_head

    def drafts(self, request: Request, room: int) -> int:
        """Return how many of the drafts of the request's row to verify, up to `room`."""
        room = max(0, min(room, request.num_drafts))
        request.verifies_lookup = request.from_lookup
        if request.from_lookup:
            return room
        if room and self.config.looks_up:
            return self.choose(request, room)
        if request.likely and room:
            room = self._likely_ones(request, room)
        request.verified = request.likely[:room]
        return room

    def stop(self, request: Request) -> Stop | None:
        """Return when the draft model stops drafting for a request; None: when it has drafted what was planned."""
        if not self._stops:
            return None
        if not self._slope:
            self._slope = self.count.slope(max(1, self._rows))
        rate, cost = self._rate(request), self._slope
        return Stop(self._kind_of(request).chances.of(rate), cost / max(rate, cost, _RARE))

    @property
    def _stops(self) -> bool:
        """Whether drafting stops after unlikely drafts, whose number is not chosen to learn something."""
        return self.config.stops and self._choice.most > 0 and not self._choice.measures

    def _kind_of(self, request: Request) -> Trials:
        return self._kind if request.id == self._request else self._trials[kind_of(request)]

    def _likely_ones(self, request: Request, room: int) -> int:
        """Return how many of the drafts of a request to verify, by the probabilities that the draft model gives."""
        if not self._stops:
            return room  # to learn whether they are accepted, or what verification costs
        stop = Stop(self._kind_of(request).chances.of(self._rate(request)), 0.0)
        count = worth_verifying(stop, request.likely[:room], self._costs())
        if not count:
            weight, accepted = request.draft_trials
            chance = stop.chance(request.likely[0])
            request.draft_trials = (
                self._memory * weight + _UNVERIFIED, self._memory * accepted + _UNVERIFIED * chance,
            )  # fmt: skip
        return count

    def _costs(self) -> list[float]:
        """What verifying 0, 1, 2 and so on drafts of each row costs in this period (see DraftCount.verification)."""
        if not self._verification:
            self._verification = self.count.verification(max(1, self._rows), self.config.num_tokens)
        return self._verification

    def looks(self, request: Request, room: int) -> int:
        """Return the number of drafts, up to `room`, whose following masks the next plan needs, of a guided request."""
        if request.from_lookup:
            return room
        if self._choice.most:
            return min(room, self._choice.drafts(self._rate(request)))
        return min(room, 1) if (self.plans + 1) % PROBE < DEPTH else 0

    def refused(self, request: Request) -> None:
        """Record that the guide of a request excludes its first draft."""
        if self._lookup is not None and request.from_lookup:
            self._lookup.count(request, 1, 0)
        else:
            self._count(request, 1, 0)

    def choose(self, request: Request, room: int) -> int:
        """Return the number of drafts that pays for a request, up to `room`."""
        if self._choice.most:
            return min(room, self._choice.drafts(self._rate(request)))
        if not self._probes or self.plans - request.last_probe < self._apart:
            return 0
        self._probes -= 1
        request.last_probe = self.plans
        return min(room, 1)

    @property
    def _apart(self) -> int:
        """The minimum number of plans between two probes of a row."""
        return 0 if self.config.head and self._rows == 1 else PROBE * min(PROBED, self._rows)

    def _rate(self, request: Request) -> float:
        """The estimated probability that a draft of the request is accepted."""
        weight, accepted = request.draft_trials
        return (accepted + _PRIOR * self._kind_of(request).acceptance) / (weight + _PRIOR)

    def learn(
        self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput, seconds: float, counters: Counters
    ) -> None:
        """Take the duration of the oldest step in flight and its drafts, before it is committed."""
        if self._looks_up:
            self._take_proposed(requests, output.proposed)
        if self._idle and self.plans % _IDLE and not output.accepted and not self._drafted(work, requests, output):
            return
        for index, likely in output.likely.items():
            requests[index].likely, requests[index].num_drafts = likely, len(likely)
        wait = _IDLE if self._idle else 1 if self._choice.measures else _SELDOM
        if output.accepted or output.likely or self.plans % wait == 0:
            self._measure(work, requests, output, seconds)
        for index, more in output.accepted.items():
            request, drafts = requests[index], work[index].drafts
            if self._lookup is not None and request.verifies_lookup:
                self._lookup.count(request, drafts, len(more))
            else:
                self._calibrate(request, drafts, len(more))
                self._count(request, drafts, len(more))
            counters.drafted(drafts, len(more))
        if self._lookup is not None:
            for index, (request, found) in enumerate(zip(requests, output.proposed)):
                count = found if self._alone and index not in output.likely else 0
                self._lookup.take(request, count, self._costs(), self.plans)

    def _drafted(self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput) -> bool:
        """Whether the draft model or head of a single row has worked, or prompt lookup before it has found drafts."""
        if self._looks_up:
            return False
        item = work[0]
        return item.propose > 0 or item.fill > 0 or requests[0].from_lookup or any(output.proposed)

    def _take_proposed(self, requests: Sequence[Request], proposed: Sequence[int]) -> None:
        """Take how many drafts prompt lookup has found for each row."""
        self._found = False
        for request, count in zip(requests, proposed):
            request.num_drafts = count
            if count:
                self._found = True

    def _measure(self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput, seconds: float) -> None:
        """Record the duration of a step, unless it has a prompt."""
        verified = proposed = fill = 0
        for index, item in enumerate(work):
            if item.num_tokens > 1 + item.drafts:
                return
            verified += item.drafts
            proposed += len(output.likely.get(index, ())) if self.config.stops else item.propose
            fill += item.fill
        rows = len(work)
        if not self._model:
            self.count.costs.add(rows, verified / rows, seconds)
            proposed = verified  # they cost nothing apart
        elif not fill:
            self.count.learn(rows, verified / rows, proposed / rows, seconds, self.config.stops)
        if not (verified or proposed or fill):
            return
        steps = self.count.steps(rows, verified / rows, proposed / rows)
        if fill and (plain := self.count.costs.seconds(rows, 0)):
            steps = seconds / plain
        tokens = 1 + sum(map(len, output.accepted.values())) / rows
        if rows > 1 or not self._model:
            self._batch.gained(tokens, steps)
        elif not (requests[0].verifies_lookup or self._choice.measures):
            self._kind.gained(tokens, steps)

    def _calibrate(self, request: Request, drafts: int, accepted: int) -> None:
        """Record which drafts were accepted, by the probabilities that the draft model gave them."""
        chances, rate = self._kind_of(request).chances, self._rate(request)
        for index, probability in enumerate(request.verified[: min(drafts, accepted + 1)]):
            chances.add(rate, probability, index < accepted)

    def _count(self, request: Request, drafts: int, accepted: int) -> None:
        """Record that the first `accepted` of a number of drafts were accepted."""
        trials = accepted + (accepted < drafts)
        weight, past = request.draft_trials
        request.draft_trials = (self._memory * weight + trials, self._memory * past + accepted)
        self._kind_of(request).count(trials, accepted)
        self._wake = 0  # a trial may have succeeded
