"""Recurrent ops on device rows compute what the prompt ops do, in whatever steps, and with tokens that are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draw import generator

from llmc.ir.ops import OPS

LENGTHS = {2: 13, 0: 7}  # tokens of each device row
T, G, H, D, E, C, W = 20, 2, 4, 5, 3, 6, 4


def _tokens(rng: np.random.Generator, delta: bool, factors: int = H) -> dict[str, Any]:
    k = rng.standard_normal((T, G, D))
    x = {
        "q": rng.standard_normal((T, G, D)), "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((T, H, E)), "decay": -rng.random((T, factors)), "x": rng.standard_normal((T, C)),
    }  # fmt: skip
    return x | ({"beta": rng.random((T, H))} if delta else {})


POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS.values()])
OFFSETS = dict(zip(LENGTHS, (0, 13), strict=True))


def _step(parts: list[tuple[int, int, int]]) -> tuple[Any, dict[str, Any]]:
    """Return the flat tokens of the parts (row, first, end), and the operands that describe the step, with padding."""
    at = np.concatenate([np.arange(OFFSETS[r] + a, OFFSETS[r] + b) for r, a, b in parts])
    rows = np.array([*(r for r, _, _ in parts), -1], np.int32)
    sizes = [b - a for _, a, b in parts]
    starts = np.concatenate([[0], np.cumsum(sizes), [sum(sizes)]])
    return at, {"rows": rows, "starts": starts, "positions": POSITIONS[at]}


STEPS = [[(2, 0, 5)], [(2, 5, 6), (0, 0, 3)], [(0, 3, 4), (2, 6, 8), (2, 8, 9)], [(2, 9, 13), (0, 4, 7)]]


WAYS = ((False, H), (False, H * D), (True, H))  # whether in chunks, and the decays of a token


def _recur(op: str, chunks: bool, **x: Any) -> Any:
    """Compute a step by a recurrence of rows; with `chunks`, runs of 3 tokens and more in chunks of 4, as on GPUs."""
    if not chunks:
        return OPS[f"row_{op}"].ref(**x)
    names = ("q", "k", "decay", "rows", "starts", "beta")
    factors = OPS["chunk_factors"].ref(**{name: v for name, v in x.items() if name in names}, chunk=4, least=3)
    return OPS[f"chunk_{op}"].ref(**x, factors=factors, least=3)


@pytest.mark.parametrize(("chunks", "factors"), WAYS)
@pytest.mark.parametrize("delta", [False, True])
def test_rows_compute_what_prompts_do(delta: bool, chunks: bool, factors: int) -> None:
    x = _tokens(rng := generator(), delta, factors)
    beta = [x["beta"]] if delta else []
    want = OPS["linear_recurrence"].ref(x["q"], x["k"], x["v"], x["decay"], POSITIONS, *beta, layer=0)
    memory, got = rng.standard_normal((3, H, D, E)), np.zeros_like(want)
    for parts in STEPS:
        at, step = _step(parts)
        of_step = {k: v[at] for k, v in x.items() if k != "x"}
        got[at], memory = _recur("recurrence", chunks, **of_step, memory=memory, **step)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_convolutions_of_rows_are_those_of_prompts() -> None:
    x = _tokens(rng := generator(), False)["x"]
    weight, bias = rng.standard_normal((C, W)), rng.standard_normal(C)
    want = OPS["causal_conv"].ref(x, weight, POSITIONS, bias, layer=0)
    kernel = rng.standard_normal((2, C, W))
    padded = np.concatenate([np.zeros((W - 1, C)), x[:13]])
    plain = np.stack([np.sum(padded[t : t + W] * weight.T, 0) for t in range(13)]) + bias
    np.testing.assert_allclose(want[:13], plain, rtol=1e-9, atol=1e-12)
    recent, got = np.resize(kernel, (3, W, C)), np.zeros_like(want)
    for parts in STEPS:
        at, step = _step(parts)
        got[at], recent = OPS["row_conv"].ref(x[at], weight, recent, bias=bias, **step)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("delta", [False, True])
def test_channels_with_one_rate_are_heads(delta: bool) -> None:
    x = _tokens(generator(), delta)
    beta = [x["beta"]] if delta else []
    found = [
        OPS["linear_recurrence"].ref(x["q"], x["k"], x["v"], decay, POSITIONS, *beta, layer=0)
        for decay in (x["decay"], np.repeat(x["decay"], D, 1))
    ]
    np.testing.assert_allclose(*found, rtol=1e-12)


@pytest.mark.parametrize(("chunks", "factors"), WAYS)
@pytest.mark.parametrize("delta", [False, True])
def test_rejected_tokens_leave_no_trace(delta: bool, chunks: bool, factors: int) -> None:
    """Each step of one row ends with tokens that the next step computes again, from other inputs."""
    x, n = _tokens(rng := generator(), delta, factors), 3
    beta = [x["beta"]] if delta else []
    want = OPS["linear_recurrence"].ref(x["q"], x["k"], x["v"], x["decay"], POSITIONS, *beta, layer=0)
    memory, base = rng.standard_normal((3, H, D, E)), np.array([9, 9, 9], np.int32)
    log = rng.standard_normal((3, n, G * D + H * E + factors + H))
    weight, recent = rng.standard_normal((C, W)), rng.standard_normal((3, W - 1 + n, C))
    conv = OPS["causal_conv"].ref(x["x"], weight, POSITIONS, layer=0)
    steps = [(0, 1, 1), (1, 5, 2), (2, 6, 6), (6, 10, 7), (7, 11, 8), (8, 9, 9), (9, 13, 12), (12, 13, 13)]
    for first, end, valid in steps:
        at, step = _step([(2, first, end)])
        wrong = at >= valid
        drafts = {k: np.where(wrong.reshape(-1, *[1] * (v.ndim - 1)), 0.5 * v[at] - 0.1, v[at]) for k, v in x.items()}
        inputs = drafts.pop("x")
        y, memory = _recur("recurrence_draft", chunks, **drafts, memory=memory, base=base, log=log, **step)
        drafts.pop("q")
        base, log = OPS["row_log"].ref(**drafts, base=base, log=log, **step)
        z, recent = OPS["row_conv"].ref(inputs, weight, recent, **step)
        np.testing.assert_allclose(y[: valid - first], want[first:valid], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(z[: valid - first], conv[first:valid], rtol=1e-9, atol=1e-12)
    assert base[2] == 13
