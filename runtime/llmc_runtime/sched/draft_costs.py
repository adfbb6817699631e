"""The measured cost of verifying drafts, and the number of drafts that yields the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, log

_WEIGHT = 0.05  # of a measurement in a running mean
_OUTLIER = 0.5  # largest relative distance of a measurement from the mean that counts
_OFTEN = 5  # measurements after which a number of drafts counts as measured
_SETTLED = 64  # further measurements after which the mean no longer depends on the first ones
_FEW = 2  # measurements after which a number of drafts is given up if it is far from the best
_TRIES = 8 * _OFTEN  # plans after which a number of drafts is given up if too few steps had it
_GAIN = 1.07  # minimum ratio of the tokens per second with drafts to those of plain decoding
BRIEF_GAIN = 1.03  # the same for a choice that is made anew after each verification
_FEWEST = 1e-6  # drafts per row of a step with the fewest drafts
_HOPE, _MARGIN = 0.95, 0.15  # optimistic acceptance: the rows' mean plus _MARGIN, at most _HOPE


class StepCosts:
    """The seconds of a step by its rows and drafts per row: running means, without outliers.

    A change of the duration without drafts, as by other programs on the machine, applies to all numbers of drafts,
    since those that are not chosen are not measured; not while that mean still depends on few steps. A step seems
    short if the end of the previous one was noticed late, so the shortest ones are not reliable.

    The seconds of a step with drafts of a model include drafting as many. Verifying a single draft may cost far more
    than none, since another program runs: a step with few drafts costs as much as the smallest that was measured.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[float, float]] = {}  # by rows, by drafts per row
        self._first: dict[tuple[int, float], list[float]] = {}  # the first _OFTEN measurements
        self._plain: dict[int, int] = {}  # by rows, the number of further measurements without drafts

    def add(self, rows: int, drafts: float, seconds: float) -> float:
        """Record a step of `rows` rows in which `drafts` drafts per row were verified, on average.

        Returns the factor by which all durations have changed, 1 if only this one has.
        """
        known, drafts = self._seconds.setdefault(size(rows), {}), share(drafts)
        first = self._first.setdefault((size(rows), drafts), [])
        if len(first) < _OFTEN:  # one of them may include the capture of a graph
            first.append(seconds)
            known[drafts] = sorted(first)[(len(first) - 1) // 3]
        else:
            limit, before = _OUTLIER * known[drafts], known[drafts]
            known[drafts] += _WEIGHT * max(-limit, min(limit, seconds - before))
            if not drafts:
                self._plain[size(rows)] = count = self._plain.get(size(rows), 0) + 1
                if count > _SETTLED:
                    self.scale(rows, known[0] / before)
                    return known[0] / before
        return 1.0

    def scale(self, rows: int, factor: float) -> None:
        """Multiply the durations of steps with drafts."""
        known = self._seconds.get(size(rows), {})
        for drafts in known:
            known[drafts] *= factor if drafts else 1.0

    def again(self, rows: int) -> None:
        """Let all steps of this many rows be measured again."""
        self._plain.pop(size(rows), None)
        for drafts in self._seconds.get(size(rows), ()):
            self._first.pop((size(rows), drafts), None)

    def measured(self, rows: int, drafts: int, times: int = _OFTEN) -> bool:
        """Whether steps of this size were measured often, or so many times."""
        return len(self._first.get((size(rows), drafts), ())) >= times

    def seconds(self, rows: int, drafts: float) -> float:
        """Return the seconds of a step, interpolated between those that were measured; 0 if none was."""
        known = self._seconds.get(size(rows), {})
        if drafts in known:
            return known[drafts]
        if not drafts or not known:
            return 0.0
        below = max((k for k in known if 0 < k <= drafts), default=0)
        above = min((k for k in known if k >= drafts), default=0)
        if not above:
            nearest = max(known)
            return known[nearest] * (1 + drafts) / (1 + nearest)
        if not below or below == above:
            return known[above]
        return known[below] + (drafts - below) / (above - below) * (known[above] - known[below])


def share(drafts: float) -> float:
    """Return a number of drafts per row for which costs are kept: whole, or a multiple of 1/8 below 1."""
    return ceil(drafts * 8) / 8 if drafts < 1 else round(drafts)


@dataclass(frozen=True, slots=True)
class Choice:
    """How many drafts per row pay.

    most: the maximum per row; 0: none. least: the acceptance probability that a row needs to have drafts. cost: the
    seconds that one more draft costs, as a share of those that a token costs. measures: made to measure its cost.
    """

    most: int
    least: float = 0.0
    cost: float = 0.0
    measures: bool = False

    def drafts(self, p: float) -> int:
        """Return the number of drafts of a row whose drafts are accepted with probability p each."""
        if p < self.least or p <= self.cost:
            return 0
        if not self.most or p >= 1.0 or self.cost <= 0.0:
            return self.most
        return min(self.most, int(log(self.cost) / log(p)))


class DraftCount:
    """Chooses the number of drafts per row for the number of rows that run.

    The numbers of a ladder up to `most` are measured once for each number of rows, as long as they may be the best.

    together: a draft model makes one draft of all rows in each of its passes, so that a step takes as long as the row
    with the most drafts needs. All rows have the same number then.
    """

    def __init__(self, most: int, together: bool) -> None:
        self.costs, self.together = StepCosts(), together
        self.drafting = StepCosts()  # what a step takes longer if it drafts, by the number of drafts per row
        self._ladder = [0, *(k for k in (1, 2, 3, 5, 8, 12, 16, 24) if k < most), most]
        self._tries: dict[tuple[int, int], int] = {}

    def choose(self, rates: Sequence[float], room: int, gain: float = _GAIN, measures: bool = True) -> Choice:
        """Return the number of drafts that gives the most tokens per second; `rates` are the rows' probabilities.

        gain: the minimum ratio of these tokens per second to those of plain decoding, above 1, because the highest
        estimates of acceptance are partly due to chance. measures: whether a number may be chosen to measure its cost.

        room: the maximum number of drafts of all rows together, at least 0. Drafts are made for all rows, for as many
        as fit, or for half, a quarter, an eighth and so on of these; rows whose drafts are most likely accepted come
        first. A draft model drafts for all rows or none.
        """
        rows, likely = len(rates), sorted(rates, reverse=True)
        hope = min(_HOPE, sum(rates) / rows + _MARGIN)
        best, top, lower, below = Choice(0), 0.0, 0, 0
        for drafts in self._ladder:
            key, limit = (size(rows), drafts), rows if not drafts else min(rows, room // drafts)
            if not limit or (self.together and limit < rows):
                break
            # A step in which only some rows have so many drafts was measured as one of fewer drafts of all rows.
            if limit == rows and not self.costs.measured(rows, drafts) and self._tries.get(key, 0) < _TRIES:
                least = self._least(rows, lower, below, drafts)
                if measures and rows * expected_tokens(round(hope, 2), drafts) >= top * least:
                    self._tries[key] = self._tries.get(key, 0) + 1
                    return Choice(drafts, measures=True)
                if self.costs.measured(rows, drafts, _FEW):
                    lower, below = below, drafts
                continue  # it would not be the best
            some, rate = self._best_part(likely, drafts, limit)
            if rate > top * (1 if best.most and some == rows else gain):
                # Between the last row with drafts and the first without, so that neither changes with each estimate.
                least = (likely[some - 1] + likely[some]) / 2 if some < rows else 0.0
                best, top = Choice(drafts, least, self._slope(rows, some, below, drafts) * rate), rate
            lower, below = below, drafts
        return best

    def _least(self, rows: int, lower: int, below: int, drafts: int) -> float:
        """Return a low estimate of the seconds of a step with this many drafts, which was not measured often.

        lower, below: the two numbers of drafts before it that were measured. Between two numbers of which one is 0,
        the difference includes that another program runs.
        """
        if self.costs.measured(rows, drafts, _FEW):
            return self.costs.seconds(rows, drafts)
        fewer = self.costs.seconds(rows, below)
        if not lower:
            return fewer
        slope = max(0.0, fewer - self.costs.seconds(rows, lower)) / (below - lower)
        return fewer + slope * (drafts - below)

    def again(self, rows: int) -> None:
        """Measure all numbers of drafts again, since costs change with the length of the sequences."""
        self.costs.again(rows)
        self.drafting.again(rows)
        self._tries = {key: count for key, count in self._tries.items() if key[0] != size(rows)}

    def learn(self, rows: int, verified: float, proposed: float, seconds: float, stops: bool) -> None:
        """Record the duration of a step of a draft model, by the drafts per row that it verified and proposed.

        Without `stops`, steps with different numbers do not count. Otherwise the time of drafting is known, and the
        duration is converted to that of a step with as many drafts as were verified.
        """
        if share(verified) == share(proposed):
            self.drafting.scale(rows, self.costs.add(rows, verified, seconds))
        elif stops and not verified:
            if plain := self.costs.seconds(rows, 0):
                self.drafting.add(rows, proposed, max(0.0, seconds - plain))
        elif stops and (same := self.drafting.seconds(rows, verified)):
            self.costs.add(rows, verified, seconds + same - self.drafting.seconds(rows, proposed))

    def steps(self, rows: int, verified: float, proposed: float) -> float:
        """Return the duration of a step that verifies and proposes so many drafts per row, relative to one without any.

        It is that of the running means, since a single step may take long for other reasons; 1 if it is not known.
        """
        plain, same = self.costs.seconds(rows, 0), self.costs.seconds(rows, verified)
        if not plain or not same:
            return 1.0
        if not (made := self.drafting.seconds(rows, 1)):  # drafting ends as often as it begins
            return (same + self.costs.seconds(rows, proposed)) / (2 * plain)
        made = self.drafting.seconds(rows, proposed) - self.drafting.seconds(rows, verified)
        return (same + made) / plain

    def slope(self, rows: int) -> float:
        """Return the duration of making and verifying one more draft of each row, relative to a step without drafts."""
        plain, most = self.costs.seconds(rows, 0), self._ladder[-1]
        if most < 2 or not plain:
            return 0.0
        return max(0.0, (self.costs.seconds(rows, most) - self.costs.seconds(rows, 1)) / (most - 1) / plain)

    def verification(self, rows: int, most: int) -> list[float]:
        """Return what verifying 0, 1, 2 up to `most` drafts of each row costs, relative to a step without drafts."""
        costs, drafting = self.costs, self.drafting
        plain = costs.seconds(rows, 0) or 1.0
        verified = [costs.seconds(rows, k) - drafting.seconds(rows, k) - plain for k in range(1, most + 1)]
        return [0.0, *(max(0.0, seconds / plain) for seconds in verified)]

    def _best_part(self, likely: Sequence[float], drafts: int, limit: int) -> tuple[int, float]:
        """Return how many of the rows, up to `limit`, should have this many drafts, and the tokens per second."""
        rows, some, best = len(likely), limit, (limit, 0.0)
        sums = [0.0, *accumulate(expected_tokens(round(p, 2), drafts) for p in likely)]
        while some:
            seconds = self.costs.seconds(rows, drafts * some / rows)
            rate = (sums[some] + rows - some) / seconds if seconds else 0.0
            if rate > best[1]:
                best = some, rate
            some = some // 2 if drafts and not self.together else 0
        return best

    def _slope(self, rows: int, some: int, below: int, drafts: int) -> float:
        """Return the seconds of one more draft of one row, if `some` of the rows have more than `below` drafts."""
        if self.together:
            return 0.0
        # A step with any drafts runs another program: that fixed cost is not part of the cost of one more draft.
        fewer = self.costs.seconds(rows, max(below * some / rows, _FEWEST))
        more = self.costs.seconds(rows, drafts * some / rows) - fewer
        return max(0.0, more / (some * (drafts - below))) if drafts > below else 0.0


@lru_cache(4096)
def expected_tokens(p: float, drafts: int) -> float:
    """Return the expected tokens of a step whose drafts are accepted with probability p each (arXiv 2211.17192)."""
    return (1 - p ** (drafts + 1)) / (1 - p) if p < 1 else drafts + 1.0


def size(rows: int) -> int:
    """Return the number of rows for which costs are kept: `rows` rounded up, to a relative error below a third."""
    step = 1 if rows <= 4 else 2 if rows <= 8 else 8 if rows <= 32 else 16 if rows <= 128 else 32
    return -(-rows // step) * step
