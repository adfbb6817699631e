"""Statistics of `llmc eval`, in memory that does not grow with the number of tokens."""

from __future__ import annotations

import math

import numpy as np

_BLOCK = 1 << 17  # logits that are compared at once, so that they stay in a core's cache
_LEAST, _RATIO = 1e-9, 1.01  # bins of a Distribution: lowest edge (smaller values count as 0), and ratio of edges
_BINS = 3500  # up to 1e-9 * 1.01 ** 3500, about 1e6


class Mean:
    """The mean of a stream of numbers and its standard error."""

    def __init__(self) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        """Add numbers, f64[n]."""
        self.count += values.size
        self._sum += float(values.sum())
        self._squares += float(np.square(values).sum())

    @property
    def mean(self) -> float:
        """The mean of all numbers."""
        return self._sum / self.count

    @property
    def stderr(self) -> float:
        """The standard error of the mean; 0 for a single number."""
        variance = max(0.0, self._squares / self.count - self.mean**2)
        return math.sqrt(variance / (self.count - 1)) if self.count > 1 else 0.0


class Distribution(Mean):
    """The mean and maximum of non-negative numbers, and their percentiles within 1 % of the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maximum = 0.0
        self._bins = np.zeros(_BINS + 1, np.int64)  # bin 0: below _LEAST

    def add(self, values: np.ndarray) -> None:
        """Add numbers, f64[n]."""
        super().add(values)
        self.maximum = max(self.maximum, float(values.max(initial=0.0)))
        index = np.log(np.maximum(values, _LEAST) / _LEAST) / math.log(_RATIO)
        bins = np.where(values < _LEAST, 0, 1 + np.minimum(index, _BINS - 1).astype(np.int64))
        self._bins += np.bincount(bins, minlength=_BINS + 1)

    def percentile(self, percent: float) -> float:
        """Return the smallest value that at least `percent` per cent of the numbers do not exceed."""
        at = int(np.searchsorted(np.cumsum(self._bins), math.ceil(self.count * percent / 100)))
        return min(self.maximum, _LEAST * _RATIO ** (at - 0.5)) if at else 0.0


def kl_divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Return KL(softmax(reference) || softmax(logits)) of every row in nats, f64[n], for logits f32[n, vocabulary]."""
    rows = max(1, _BLOCK // logits.shape[1])
    blocks = [slice(i, i + rows) for i in range(0, len(logits), rows)]
    return np.concatenate([_kl_divergence(reference[block], logits[block]) for block in blocks])


def _kl_divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    x = reference - reference.max(-1, keepdims=True)
    y = logits - logits.max(-1, keepdims=True)
    weights = np.exp(x)
    total = weights.sum(-1, dtype=np.float64)
    difference = np.subtract(x, y, where=weights > 0, out=np.zeros_like(x))  # -inf - -inf has no weight
    expected = (weights * difference).sum(-1, dtype=np.float64) / total
    divergence = expected - np.log(total) + np.log(np.exp(y).sum(-1, dtype=np.float64))
    return np.where(divergence < 0, 0.0, divergence)  # below 0 by rounding only; NaN is kept
