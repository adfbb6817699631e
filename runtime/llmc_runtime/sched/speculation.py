"""Speculative decoding in the scheduler: how many drafted tokens a step verifies, by measured costs and acceptance.

Invariant: drafts only change how many tokens a step gives, never which ones, so every number of drafts is correct.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from llmc_runtime.metrics import Counters
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import StepOutput, Work

PROBE = 48  # of the steps in which drafting seems not to pay, one in so many verifies a draft of a row nevertheless
_MEMORY = 0.8  # weight of a row's past acceptance at each verification
_RISE, _FALL = 0.01, 0.3  # how fast a running quantile rises, relatively, and falls towards a smaller value
_OFTEN = 12  # measurements of a size after which its running quantile is used
_REFRESH = 16  # plans after which the threshold is computed anew
_PRIOR = 1.0  # verifications that the acceptance of all rows counts for in that of a row
_SLOPE = 0.25  # cost of a further entry, as a share of that of a step, until steps of two sizes were measured


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Prompt lookup: drafts of up to `num_tokens` tokens, found by suffixes of min_ngram to max_ngram tokens."""

    num_tokens: int
    min_ngram: int
    max_ngram: int

    @property
    def drafting(self) -> tuple[int, int, int]:
        """The columns of a device row (see RowParams)."""
        return self.num_tokens, self.min_ngram, self.max_ngram


class StepCosts:
    """The seconds of a step by its number of entries: running low quantiles, which a busy machine hardly changes."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by number of entries
        self._samples: dict[int, int] = {}

    def add(self, entries: int, seconds: float) -> None:
        """Record a step."""
        low = self._seconds.get(entries, seconds)
        self._seconds[entries] = min(seconds, low * (1 + _RISE)) if seconds > low else low + _FALL * (seconds - low)
        self._samples[entries] = self._samples.get(entries, 0) + 1

    def share(self, entries: int, largest: int) -> float:
        """Return the cost of one more entry as a share of the cost of a step with `entries`, 0 to 1.

        It is the slope of a line through the costs of steps with up to `largest` entries that were measured often.
        """
        often = [n for n in range(entries, largest + 1) if self._samples.get(n, 0) >= _OFTEN]
        points = [(n - entries, self._seconds[n]) for n in often]
        mean = sum(n for n, _ in points) / max(1, len(points))
        spread = sum((n - mean) ** 2 for n, _ in points)
        if not spread:
            return min(1.0, _SLOPE / entries)
        slope = sum((n - mean) * y for n, y in points) / spread
        base = sum(y for _, y in points) / len(points) - slope * mean
        return min(1.0, max(0.0, slope / base)) if base > 0 else 1.0


class Speculation:
    """Decides how many drafts to verify. Constructed for each scheduler that drafts."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config, self.costs = config, StepCosts()
        self._acceptance = 0.5  # of the drafts verified lately, over all rows
        self._planned: deque[float] = deque()  # when the steps in flight were planned
        self._ended = 0.0  # when the last step ended
        self._plans = self._rows = 0  # plans so far, and running requests of the last one
        self._threshold = 0.0  # a draft that is accepted with a smaller probability costs more than it saves

    def begin(self, rows: int) -> None:
        """Begin a plan in which `rows` requests run."""
        self._plans += 1
        if rows and (rows != self._rows or self._plans % _REFRESH == 0):
            # One more entry of acceptance p pays if it adds a larger share of tokens than of time: p / rows > share.
            self._rows = rows
            self._threshold = rows * self.costs.share(rows, rows * (1 + self.config.num_tokens))

    def drafts(self, request: Request, room: int) -> int:
        """Return how many of the drafts of the request's row to verify, up to `room`."""
        room = min(room, request.num_drafts)
        if room <= 0:
            return 0
        weight, accepted = request.draft_trials
        p = (accepted + _PRIOR * self._acceptance) / (weight + _PRIOR)
        worth = room  # the largest number whose last draft, accepted with p ** number, pays
        if p < 1.0 and self._threshold > 0.0:
            worth = int(log(self._threshold) / log(p)) if p > self._threshold else 0
        if worth > 0:
            return min(room, worth)
        request.idle_drafts += 1
        if request.idle_drafts < PROBE:
            return 0
        request.idle_drafts = 0
        return 1

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
        entries = 0
        for item in work:
            if item.num_tokens > 1 + item.drafts:
                break  # a prompt
            entries += item.num_tokens
        else:
            self.costs.add(entries, now - (began if began > self._ended else self._ended))
        self._ended = now
        if output.accepted:
            for index, more in output.accepted.items():
                self._count(requests[index], work[index].drafts, len(more))
                counters.drafted(work[index].drafts, len(more))
        for request, proposed in zip(requests, output.proposed):
            request.num_drafts = proposed

    def _count(self, request: Request, drafts: int, accepted: int) -> None:
        """Record that the first `accepted` of a number of drafts were accepted."""
        trials = accepted + (accepted < drafts)
        weight, past = request.draft_trials
        request.draft_trials = (_MEMORY * weight + trials, _MEMORY * past + accepted)
        self._acceptance += 0.02 * (accepted - trials * self._acceptance)
