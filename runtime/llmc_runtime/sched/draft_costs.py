"""The measured cost of verifying drafts, and the number of drafts that yields the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

_RISE, _FALL = 0.01, 0.3  # how fast a running quantile rises, relatively, and falls towards a smaller value
_OFTEN = 4  # measurements after which a number of drafts counts as measured
_TRIES = 3 * _OFTEN  # plans after which a number of drafts is given up that too few steps had
_PROMISING = 0.95  # more drafts are measured if those so far yield this share of the best rate


class StepCosts:
    """The seconds of a step by its rows and drafts per row: running low quantiles, which a busy machine hardly changes.

    The seconds of a step with drafts of a model include drafting as many.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}  # by rows, by drafts per row
        self._samples: dict[tuple[int, int], int] = {}

    def add(self, rows: int, drafts: int, seconds: float) -> None:
        """Record a step of `rows` rows in which `drafts` drafts per row were verified, on average."""
        known = self._seconds.setdefault(_size(rows), {})
        low = known.get(drafts, seconds)
        known[drafts] = min(seconds, low * (1 + _RISE)) if seconds > low else low + _FALL * (seconds - low)
        key = _size(rows), drafts
        self._samples[key] = self._samples.get(key, 0) + 1

    def measured(self, rows: int, drafts: int) -> bool:
        """Whether steps of this size were measured often."""
        return self._samples.get((_size(rows), drafts), 0) >= _OFTEN

    def seconds(self, rows: int, drafts: int) -> float:
        """Return the seconds of a step, interpolated between those that were measured; 0 if none was."""
        known = self._seconds.get(_size(rows), {})
        below, above = (max((k for k in known if k <= drafts), default=-1), min((k for k in known if k >= drafts), default=-1))
        if below < 0 or above < 0:
            nearest = max(below, above)
            return known[nearest] * (1 + drafts) / (1 + nearest) if nearest >= 0 else 0.0
        share = (drafts - below) / (above - below) if above > below else 0.0
        return known[below] + share * (known[above] - known[below])


class DraftCount:
    """Chooses the number of drafts per row for the number of rows that run.

    All numbers of a ladder up to `most` are measured once for each number of rows, as long as they are promising.
    `worth` is the acceptance probability below which a draft costs more than it saves.
    """

    def __init__(self, most: int) -> None:
        self.costs, self.worth = StepCosts(), 0.0
        self._ladder = [0, *(k for k in (1, 2, 3, 5, 8, 12, 16, 24) if k < most), most]
        self._tries: dict[tuple[int, int], int] = {}

    def choose(self, rows: int, rates: Sequence[float]) -> tuple[int, bool]:
        """Return the number of drafts per row, and whether it is only to be measured.

        rates: the acceptance probabilities of the rows' drafts.
        """
        best, most = 0, 0.0
        self.worth = 0.0
        for drafts in self._ladder:
            key = _size(rows), drafts
            if not self.costs.measured(rows, drafts) and self._tries.get(key, 0) < _TRIES:
                self._tries[key] = self._tries.get(key, 0) + 1
                return drafts, True
            tokens = sum(expected_tokens(p, drafts) for p in rates)
            seconds = self.costs.seconds(rows, drafts)
            rate = tokens / seconds if seconds else 0.0
            if rate > most:
                best, most = drafts, rate
            elif rate < _PROMISING * most:
                break
        if best:
            more = self.costs.seconds(rows, best) - self.costs.seconds(rows, 0)
            self.worth = more / (len(rates) * best) * most
        return best, False


def expected_tokens(p: float, drafts: int) -> float:
    """Return the expected tokens of a step whose drafts are accepted with probability p each (arXiv 2211.17192)."""
    return (1 - p ** (drafts + 1)) / (1 - p) if p < 1 else drafts + 1.0


def _size(rows: int) -> int:
    """Return the number of rows for which costs are kept: exact if it is small, else rounded up."""
    return rows if rows <= 8 else -(-rows // 8) * 8
