"""The measured cost of verifying drafts, and the number of drafts that yields the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, log

_MEAN_WEIGHT = 0.05  # weight of a measurement in a running mean
_CORRECTION_WEIGHT = 0.5  # weight of a median of several measurements in a running mean
_MAX_DEVIATION = 0.5  # largest relative distance of a measurement from the mean that counts
_MEASUREMENTS = 5  # measurements after which a number of drafts counts as measured
_SETTLED = 64  # further measurements after which the mean no longer depends on the first ones
_FEWEST_MEASUREMENTS = 2  # measurements after which a number of drafts is given up if it is far from the best
_MAX_TRIES = 8 * _MEASUREMENTS  # plans after which a number of drafts is given up if too few steps had it
_MIN_GAIN = 1.07  # minimum ratio of the tokens per second with drafts to those of plain decoding
MIN_SINGLE_GAIN = 1.03  # minimum gain of a choice that is made anew after each verification
_MAX_ENTRIES = 0.25  # largest time of a head's entries that counts, relative to a step; a longer one was interrupted
_SMALLEST_SHARE = 1e-6  # drafts per row of a step with the fewest drafts
_MAX_HOPE, _HOPE_MARGIN = 0.95, 0.15  # optimistic acceptance rate: the rows' mean + _HOPE_MARGIN, at most _MAX_HOPE


class StepCosts:
    """The seconds of a step by its rows and drafts per row: running means, without outliers.

    A change of the duration without drafts, as by other programs on the machine, applies to all numbers of drafts,
    since those that are not chosen are not measured; not while that mean still depends on few steps. A step seems
    short if the end of the previous one was noticed late, so the shortest ones are not reliable.

    The seconds of a step with drafts of a model include drafting as many. Verifying a single draft may cost far more
    than none, since another program runs: a step with few drafts costs as much as the smallest that was measured.
    """

    def __init__(self) -> None:
        self._means: dict[int, dict[float, float]] = {}  # seconds by rows, by drafts per row
        self._first: dict[tuple[int, float], list[float]] = {}  # the first _MEASUREMENTS measurements
        self._plain_steps: dict[int, int] = {}  # rows -> number of further measurements without drafts

    def record(self, rows: int, drafts: float, seconds: float) -> float:
        """Record a step of `rows` rows in which `drafts` drafts per row were verified, on average.

        Returns the factor by which all durations have changed, 1 if only this one has.
        """
        size, drafts = rounded_rows(rows), rounded_drafts(drafts)
        means = self._means.setdefault(size, {})
        first = self._first.setdefault((size, drafts), [])
        if len(first) < _MEASUREMENTS:  # one of them may include the capture of a graph
            first.append(seconds)
            means[drafts] = sorted(first)[(len(first) - 1) // 3]
        else:
            mean = means[drafts]
            limit = _MAX_DEVIATION * mean
            means[drafts] += _MEAN_WEIGHT * max(-limit, min(limit, seconds - mean))
            if not drafts:
                self._plain_steps[size] = plain_steps = self._plain_steps.get(size, 0) + 1
                if plain_steps > _SETTLED:
                    self.scale(rows, means[0] / mean)
                    return means[0] / mean
        return 1.0

    def correct_plain(self, rows: int, seconds: float) -> None:
        """Move the duration without drafts towards `seconds`, measured while steps with drafts are measured as well."""
        means = self._means.get(rounded_rows(rows), {})
        if 0 in means:
            means[0] += _CORRECTION_WEIGHT * (seconds - means[0])

    def scale(self, rows: int, factor: float) -> None:
        """Multiply the durations of steps with drafts."""
        means = self._means.get(rounded_rows(rows), {})
        for drafts in means:
            means[drafts] *= factor if drafts else 1.0

    def measure_again(self, rows: int) -> None:
        """Let all steps of this many rows be measured again."""
        size = rounded_rows(rows)
        self._plain_steps.pop(size, None)
        for drafts in self._means.get(size, ()):
            self._first.pop((size, drafts), None)

    def is_measured(self, rows: int, drafts: int, times: int = _MEASUREMENTS) -> bool:
        """Whether steps of this size were measured at least `times` times."""
        return len(self._first.get((rounded_rows(rows), drafts), ())) >= times

    def settled_plain(self, rows: int) -> float:
        """Return the seconds of a step without drafts; 0 while the mean still depends on few steps."""
        return self.seconds(rows, 0) if self._plain_steps.get(rounded_rows(rows), 0) > _SETTLED else 0.0

    def seconds(self, rows: int, drafts: float) -> float:
        """Return the seconds of a step, interpolated between those that were measured; 0 if none was."""
        means = self._means.get(rounded_rows(rows), {})
        if drafts in means:
            return means[drafts]
        if not drafts or not means:
            return 0.0
        fewer = max((measured for measured in means if 0 < measured <= drafts), default=0)
        more = min((measured for measured in means if measured >= drafts), default=0)
        if not more:
            largest = max(means)
            return means[largest] * (1 + drafts) / (1 + largest)
        if not fewer or fewer == more:
            return means[more]
        return means[fewer] + (drafts - fewer) / (more - fewer) * (means[more] - means[fewer])


def rounded_drafts(drafts: float) -> float:
    """Return the number of drafts per row for which costs are kept: whole, or a multiple of 1/8 below 1."""
    return ceil(drafts * 8) / 8 if drafts < 1 else round(drafts)


def rounded_rows(rows: int) -> int:
    """Return the number of rows for which costs are kept: `rows` rounded up, to a relative error below a third."""
    if rows <= 4:
        return rows
    if rows <= 8:
        step = 2
    elif rows <= 32:
        step = 8
    elif rows <= 128:
        step = 16
    else:
        step = 32
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True)
class Choice:
    """How many drafts per row pay.

    max_drafts: per row; 0: none. min_rate: the acceptance probability that a row needs to have drafts. cost: the
    seconds that one more draft costs, as a share of those that a token costs. measures: made to measure its cost.
    """

    max_drafts: int
    min_rate: float = 0.0
    cost: float = 0.0
    measures: bool = False

    def drafts(self, rate: float) -> int:
        """Return the number of drafts of a row whose drafts are accepted with this probability each."""
        if rate < self.min_rate or rate <= self.cost:
            return 0
        if not self.max_drafts or rate >= 1.0 or self.cost <= 0.0:
            return self.max_drafts
        return min(self.max_drafts, int(log(self.cost) / log(rate)))


class DraftCount:
    """Chooses the number of drafts per row for the number of rows that run.

    Candidates, up to `max_drafts`, are measured once for each number of rows, as long as they may be the best.

    together: a draft model makes one draft of all rows in each of its passes, so that a step takes as long as the row
    with the most drafts needs. All rows have the same number then.
    """

    def __init__(self, max_drafts: int, together: bool) -> None:
        self.costs, self.together = StepCosts(), together
        self.drafting = StepCosts()  # costs of a step that drafts, by the number of drafts per row
        self.entries = StepCosts()  # costs of a step in which a head computes its entries but makes no draft
        self._candidates = [0, *(drafts for drafts in (1, 2, 3, 5, 8, 12, 16, 24) if drafts < max_drafts), max_drafts]
        self._tries: dict[tuple[int, int], int] = {}  # plans that were made to measure, by rows and drafts

    def choose(self, rates: Sequence[float], room: int, gain: float = _MIN_GAIN, may_measure: bool = True) -> Choice:
        """Return the number of drafts that gives the most tokens per second; `rates` are the rows' probabilities.

        gain: the minimum ratio of these tokens per second to those of plain decoding, above 1, because the highest
        estimates of acceptance are partly due to chance. may_measure: whether a number may be chosen to measure its
        cost.

        room: the maximum number of drafts of all rows together, at least 0. Drafts are made for all rows, for as many
        as fit, or for half, a quarter, an eighth and so on of these; rows whose drafts are most likely accepted come
        first. A draft model drafts for all rows or none.
        """
        rows, sorted_rates = len(rates), sorted(rates, reverse=True)
        optimistic_rate = round(min(_MAX_HOPE, sum(rates) / rows + _HOPE_MARGIN), 2)
        best, best_speed = Choice(0), 0.0  # speeds in tokens per second
        last_but_one = last = 0  # the last two candidates that were measured
        for drafts in self._candidates:
            max_rows = min(rows, room // drafts) if drafts else rows
            if not max_rows or (self.together and max_rows < rows):
                break
            # A step in which only some rows have so many drafts was measured as one of fewer drafts of all rows.
            if max_rows == rows and self._is_unknown(rows, drafts):
                seconds = self._min_seconds(rows, last_but_one, last, drafts)
                if may_measure and rows * expected_tokens(optimistic_rate, drafts) >= best_speed * seconds:
                    return self._try(rows, drafts)
                if self.costs.is_measured(rows, drafts, _FEWEST_MEASUREMENTS):
                    last_but_one, last = last, drafts
                continue  # it would not be the best
            count, speed = self._best_rows(sorted_rates, drafts, max_rows)
            if speed > best_speed * (1 if best.max_drafts and count == rows else gain):
                # Between the last row with drafts and the first without, so that neither changes with each estimate.
                min_rate = (sorted_rates[count - 1] + sorted_rates[count]) / 2 if count < rows else 0.0
                best = Choice(drafts, min_rate, self._seconds_per_draft(rows, count, last, drafts) * speed)
                best_speed = speed
            last_but_one, last = last, drafts
        return best

    def _is_unknown(self, rows: int, drafts: int) -> bool:
        """Whether a number of drafts was measured too seldom, and not tried too often."""
        tries = self._tries.get((rounded_rows(rows), drafts), 0)
        return tries < _MAX_TRIES and not self.costs.is_measured(rows, drafts)

    def _try(self, rows: int, drafts: int) -> Choice:
        """Return the choice of a number of drafts that is made to measure its cost."""
        key = rounded_rows(rows), drafts
        self._tries[key] = self._tries.get(key, 0) + 1
        return Choice(drafts, measures=True)

    def _min_seconds(self, rows: int, last_but_one: int, last: int, drafts: int) -> float:
        """Return a low estimate of the seconds of a step with this many drafts, which was not measured often.

        last_but_one, last: the two numbers of drafts before it that were measured. Between two numbers of which one is
        0, the difference includes that another program runs.
        """
        if self.costs.is_measured(rows, drafts, _FEWEST_MEASUREMENTS):
            return self.costs.seconds(rows, drafts)
        fewer = self.costs.seconds(rows, last)
        if not last_but_one:
            return fewer
        per_draft = max(0.0, fewer - self.costs.seconds(rows, last_but_one)) / (last - last_but_one)
        return fewer + per_draft * (drafts - last)

    def measure_again(self, rows: int) -> None:
        """Measure all numbers of drafts again, since costs change with the length of the sequences."""
        self.costs.measure_again(rows)
        self.drafting.measure_again(rows)
        self.entries.measure_again(rows)
        self._tries = {key: tries for key, tries in self._tries.items() if key[0] != rounded_rows(rows)}

    def learn(self, rows: int, verified: float, proposed: float, seconds: float, stops: bool) -> None:
        """Record the duration of a step of a draft model, by the drafts per row that it verified and proposed.

        Without `stops`, steps with different numbers do not count. Otherwise the time of drafting is known, and the
        duration is converted to that of a step with as many drafts as were verified. A result below the duration
        without drafts does not count: drafting was measured too rarely, as when its first pass loaded weights.
        """
        if rounded_drafts(verified) == rounded_drafts(proposed):
            self.drafting.scale(rows, self.costs.record(rows, verified, seconds))
        elif stops and not verified:
            if plain := self.costs.seconds(rows, 0):
                self.drafting.record(rows, proposed, max(0.0, seconds - plain))
        elif stops and (drafting_verified := self.drafting.seconds(rows, verified)):
            converted = seconds + drafting_verified - self.drafting.seconds(rows, proposed)
            if converted >= self.costs.seconds(rows, 0):
                self.costs.record(rows, verified, converted)

    def relative_duration(self, rows: int, verified: float, proposed: float) -> float:
        """Return the duration of a step that verifies and proposes these drafts per row, relative to one without any.

        It is that of the running means, since a single step may take long for other reasons; 1 if it is not known.
        """
        plain, with_verified = self.costs.seconds(rows, 0), self.costs.seconds(rows, verified)
        if not plain or not with_verified:
            return 1.0
        if not self.drafting.seconds(rows, 1):  # drafting ends as often as it begins
            return (with_verified + self.costs.seconds(rows, proposed)) / (2 * plain)
        more_drafting = self.drafting.seconds(rows, proposed) - self.drafting.seconds(rows, verified)
        return (with_verified + more_drafting) / plain

    def gross_duration(self, rows: int, verified: float, proposed: float, seconds: float | None, fills: bool) -> float:
        """Return the duration of a step that took `seconds`, relative to one without drafts; 1 if that is unknown.

        seconds: None if the step had a prompt, too; then the expected duration is returned. fills: the step computed KV
        that a draft model lacked, so its duration is not limited. The duration of other steps is limited to
        _MAX_DEVIATION from the expected one, as for the running means.
        """
        plain, expected = self.costs.seconds(rows, 0), self.relative_duration(rows, verified, proposed)
        if not plain or seconds is None:
            return expected
        relative = seconds / plain
        if fills:
            return relative
        return max((1 - _MAX_DEVIATION) * expected, min((1 + _MAX_DEVIATION) * expected, relative))

    def cost_of_entries(self, rows: int) -> float:
        """Return the time in which a head computes its entries, relative to a step without; 0 if it is unknown."""
        plain = self.costs.seconds(rows, 0)
        if not plain or not self.entries.is_measured(rows, 0):
            return 0.0
        return max(0.0, min(_MAX_ENTRIES, self.entries.seconds(rows, 0) / plain - 1.0))

    def cost_of_draft(self, rows: int) -> float:
        """Return the duration of making and verifying one more draft of each row, relative to a step without drafts."""
        plain, max_drafts = self.costs.seconds(rows, 0), self._candidates[-1]
        if max_drafts < 2 or not plain:
            return 0.0
        added = self.costs.seconds(rows, max_drafts) - self.costs.seconds(rows, 1)
        return max(0.0, added / (max_drafts - 1) / plain)

    def verification_costs(self, rows: int, max_drafts: int) -> list[float]:
        """Return what verifying 0 to `max_drafts` drafts of each row costs, relative to a step without drafts."""
        costs, drafting = self.costs, self.drafting
        plain = costs.seconds(rows, 0) or 1.0
        added = [costs.seconds(rows, k) - drafting.seconds(rows, k) - plain for k in range(1, max_drafts + 1)]
        return [0.0, *(max(0.0, seconds / plain) for seconds in added)]

    def _best_rows(self, sorted_rates: Sequence[float], drafts: int, max_rows: int) -> tuple[int, float]:
        """Return how many of the rows, up to `max_rows`, should have this many drafts, and the tokens per second."""
        rows, count = len(sorted_rates), max_rows
        best_count, best_speed = max_rows, 0.0
        # The expected tokens of the first n rows, by n.
        tokens_of_first = [0.0, *accumulate(expected_tokens(round(rate, 2), drafts) for rate in sorted_rates)]
        while count:
            seconds = self.costs.seconds(rows, drafts * count / rows)
            speed = (tokens_of_first[count] + rows - count) / seconds if seconds else 0.0
            if speed > best_speed:
                best_count, best_speed = count, speed
            count = count // 2 if drafts and not self.together else 0
        return best_count, best_speed

    def _seconds_per_draft(self, rows: int, count: int, fewer_drafts: int, drafts: int) -> float:
        """Return the seconds of one more draft of one row, if `count` of the rows have more than `fewer_drafts`."""
        if self.together:
            return 0.0
        # A step with any drafts runs another program: that fixed cost is not part of the cost of one more draft.
        fewer = self.costs.seconds(rows, max(fewer_drafts * count / rows, _SMALLEST_SHARE))
        added = self.costs.seconds(rows, drafts * count / rows) - fewer
        return max(0.0, added / (count * (drafts - fewer_drafts))) if drafts > fewer_drafts else 0.0


@lru_cache(4096)
def expected_tokens(rate: float, drafts: int) -> float:
    """Return the expected tokens of a step whose drafts are accepted with this probability each (arXiv 2211.17192)."""
    return (1 - rate ** (drafts + 1)) / (1 - rate) if rate < 1 else drafts + 1.0
