"""The test of rounding errors that `tests/gpu/test_models.py` applies (gpu.error_ratio), on a toy model."""

from __future__ import annotations

from math import comb

import ml_dtypes
import numpy as np
import pytest
from draw import generator
from gpu.error_ratio import FALSE_ALARM, FEWEST, LIMIT, critical_count, excess

PROMPTS, TOKENS, WIDTH, HIDDEN, VOCABULARY = 100, 8, 64, 96, 80


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def product(x: np.ndarray, w: np.ndarray, splits: int) -> np.ndarray:
    """Return x @ w.T with sums of `splits` parts of the columns, each rounded to bfloat16; 0: exactly."""
    if not splits:
        return x @ w.T
    parts = np.split(np.arange(x.shape[-1]), splits)
    total = rounded(x[..., parts[0]] @ w[:, parts[0]].T)
    for part in parts[1:]:
        total = rounded(total + x[..., part] @ w[:, part].T)
    return total


def logprobs(x: np.ndarray, weights: tuple[np.ndarray, np.ndarray], splits: int) -> np.ndarray:
    """Return the log-probabilities [PROMPTS, TOKENS, VOCABULARY] of a gated layer and a projection."""
    up, down = weights
    h = product(x, up, splits)
    logits = 3 * product(rounded(np.tanh(h)) if splits else np.tanh(h), down, splits).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def errors(kind: str, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the errors of a device with the planted error `kind`, and those of a device without one."""
    x = rounded(rng.standard_normal((PROMPTS, TOKENS, WIDTH)).astype(np.float32))
    up = rounded((rng.standard_normal((HIDDEN, WIDTH)) / WIDTH**0.5).astype(np.float32))
    down = rounded((rng.standard_normal((VOCABULARY, HIDDEN)) / HIDDEN**0.5).astype(np.float32))
    wrong_up, wrong_down = up.copy(), down.copy()
    if kind == "scaled weight":
        wrong_down *= 1.05
    if kind == "dropped row":
        wrong_up[int(rng.integers(HIDDEN))] = 0
    exact = logprobs(x, (up, down), 0)
    found = [
        np.abs(logprobs(x, weights, splits) - exact)[..., :5]
        for weights, splits in (((wrong_up, wrong_down), 4), ((up, down), 2))
    ]
    return list(found[0]), list(found[1])


@pytest.mark.parametrize("kind", ["scaled weight", "dropped row"])
def test_planted_error_is_found(kind: str) -> None:
    assert "of 100 prompts" in excess(*errors(kind, generator()))


def test_other_order_of_summation_passes() -> None:
    rng = generator()
    assert not any(excess(*errors("", rng)) for _ in range(5))


@pytest.mark.parametrize("n", [FEWEST, 36, 100])
def test_false_alarms_are_bounded(n: int) -> None:
    """If every ratio exceeds LIMIT with a probability of 1/2, the tail from the critical count on is the rate."""
    k = critical_count(n)
    assert sum(comb(n, i) for i in range(k, n + 1)) < FALSE_ALARM * 2**n
    assert sum(comb(n, i) for i in range(k - 1, n + 1)) >= FALSE_ALARM * 2**n


def test_rejects_from_the_critical_count_on() -> None:
    k = critical_count(100)
    reference = [np.ones(3)] * 100
    for above in (k - 1, k):
        found = [np.full(3, 2 * LIMIT)] * above + [np.full(3, LIMIT)] * (100 - above)
        assert bool(excess(found, reference)) == (above == k)


def test_too_few_prompts() -> None:
    with pytest.raises(ValueError, match=f"at least {FEWEST}"):
        excess([np.ones(1)] * (FEWEST - 1), [np.ones(1)] * (FEWEST - 1))
