"""Speculative decoding in the scheduler: how many drafted tokens a step verifies, by measured costs and acceptance.

Invariant: drafts only change how many tokens a step gives, never which ones, so every number of drafts is correct.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_costs import DraftCount
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import StepOutput, Work

PROBE = 48  # of the steps in which drafting seems not to pay, one in so many verifies a draft of a row nevertheless
MODEL_PROBE = 128  # the same for drafts of a model, of which one row's are verified
_MEMORY = 0.8  # weight of a row's past acceptance at each verification
_REFRESH = 16  # plans after which the number of drafts is chosen anew
_PRIOR = 1.0  # verifications that the acceptance of all rows counts for in that of a row


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Drafts of up to `num_tokens` tokens per row, by prompt lookup or by a draft model.

    min_ngram, max_ngram: tokens of the suffixes that prompt lookup searches for. max_rows: maximum number of rows for
    which a step of the draft model drafts; 0: prompt lookup.
    """

    num_tokens: int
    min_ngram: int = 0
    max_ngram: int = 0
    max_rows: int = 0

    @property
    def drafting(self) -> tuple[int, int, int]:
        """The columns of a device row (see RowParams)."""
        return (0, 0, 0) if self.max_rows else (self.num_tokens, self.min_ngram, self.max_ngram)


class Speculation:
    """Decides how many drafts to make and to verify. Constructed for each scheduler that drafts."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config, self.count = config, DraftCount(config.num_tokens)
        self._acceptance = 0.5  # of the drafts verified lately, over all rows
        self._planned: deque[float] = deque()  # when the steps in flight were planned
        self._ended = 0.0  # when the last step ended
        self._plans = self._rows = self._idle = 0  # plans so far, running requests of the last one, plans since a probe
        self._chosen, self._measuring = 0, True

    def begin(self, running: Sequence[Request]) -> None:
        """Begin a plan in which these requests run."""
        self._plans += 1
        self._idle += 1
        rows = len(running)
        if rows and (self._measuring or rows != self._rows or self._plans % _REFRESH == 0):
            self._rows = rows
            self._chosen, self._measuring = self.count.choose(rows, [self._rate(r) for r in running])

    def proposals(self, request: Request) -> int:
        """Return how many tokens the draft model drafts for a request."""
        return self.choose(request, self.config.num_tokens)

    def drafts(self, request: Request, room: int) -> int:
        """Return how many of the drafts of the request's row to verify, up to `room`."""
        room = max(0, min(room, request.num_drafts))
        return room if self.config.max_rows or not room else self.choose(request, room)

    def choose(self, request: Request, room: int) -> int:
        """Return the number of drafts that pays for a request, up to `room`."""
        p, worth = self._rate(request), self._chosen
        if worth and not self._measuring and p < 1.0 and self.count.worth > 0.0:
            worth = min(worth, int(log(self.count.worth) / log(p)) if p > self.count.worth else 0)
        return min(room, worth) if worth else self._probe(request)

    def _probe(self, request: Request) -> int:
        """Return 1 now and then, to learn whether drafts would be accepted."""
        if self.config.max_rows:
            if self._idle < MODEL_PROBE:
                return 0
            self._idle = 0
            return 1
        request.idle_drafts += 1
        if request.idle_drafts < PROBE:
            return 0
        request.idle_drafts = 0
        return 1

    def _rate(self, request: Request) -> float:
        """The estimated probability that a draft of the request is accepted."""
        weight, accepted = request.draft_trials
        return (accepted + _PRIOR * self._acceptance) / (weight + _PRIOR)

    def planned(self, now: float) -> None:
        """Record that a step was planned."""
        self._planned.append(now)

    def forget(self) -> None:
        """Drop the steps in flight."""
        self._planned.clear()

    def learn(
        self, work: Sequence[Work], requests: Sequence[Request], output: StepOutput, now: float, counters: Counters
    ) -> None:
        """Take the duration of the oldest step in flight and its drafts, before it is committed."""
        began = self._planned.popleft()
        self._measure(work, now - max(began, self._ended))
        self._ended = now
        if output.accepted:
            for index, more in output.accepted.items():
                self._count(requests[index], work[index].drafts, len(more))
                counters.drafted(work[index].drafts, len(more))
        for request, proposed in zip(requests, output.proposed):
            request.num_drafts = proposed

    def _measure(self, work: Sequence[Work], seconds: float) -> None:
        """Record the duration of a step, unless it has a prompt, or drafts another number than it verifies."""
        verified = proposed = 0
        for item in work:
            if item.num_tokens > 1 + item.drafts or item.fill:
                return
            verified += item.drafts
            proposed += item.propose
        drafts = round(verified / len(work))
        if not self.config.max_rows or drafts == round(proposed / len(work)):
            self.count.costs.add(len(work), drafts, seconds)

    def _count(self, request: Request, drafts: int, accepted: int) -> None:
        """Record that the first `accepted` of a number of drafts were accepted."""
        trials = accepted + (accepted < drafts)
        weight, past = request.draft_trials
        request.draft_trials = (_MEMORY * weight + trials, _MEMORY * past + accepted)
        self._acceptance += 0.02 * (accepted - trials * self._acceptance)
