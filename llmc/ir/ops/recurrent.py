"""Recurrent layers: short convolutions along a sequence, and linear recurrences with decay (gated delta rule, Mamba-2).

`causal_conv` and `linear_recurrence` compute packed prompts. `row_conv`, `row_recurrence` and, for speculation,
`row_recurrence_draft` with `row_log` are their forms on device rows: the state of a row is one entry of a row state.
The entries of a step that name the same row are a run; a run that begins at position 0 starts from zeros, whatever the
state holds. Sources: Yang et al. 2024, Gated Delta Networks (arXiv 2412.06464); Dao and Gu 2024, Mamba-2 (arXiv
2405.21060).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Content, Drawing, Shape
from llmc.ir.opdef import op


def _decay(d: Drawing, shape: Shape) -> Any:
    """Draw logarithms of factors from 0.05 to 1."""
    return -d.rng.uniform(0, 3, shape)


def _unit(d: Drawing, shape: Shape) -> Any:
    """Draw vectors of length 1 along the last axis, with which the delta rule is stable."""
    x = d.rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _base(d: Drawing, shape: Shape) -> Any:
    """Draw positions before the next one of each row, by at most the tokens of the log."""
    return np.maximum(contents.length(d, shape) - d.rng.integers(0, d.shapes["log"][1] + 1, shape), 0)


def _log(d: Drawing, shape: Shape) -> Any:
    """Draw keys, values, decays and factors of the rows' last tokens."""
    (_, g, size), h, factors = d.shapes["k"], d.shapes["v"][1], d.shapes["decay"][1]
    out = d.rng.standard_normal(shape)
    out[..., : g * size] = _unit(d, (*shape[:2], g, size)).reshape(*shape[:2], -1)
    out[..., -factors - h : -h] = _decay(d, (*shape[:2], factors))
    out[..., -h:] = d.rng.random((*shape[:2], h))
    return out


# What the operands of recurrent ops hold, by operand name.
HOLDS: Mapping[str, Content] = MappingProxyType(
    {
        "pos": contents.positions, "positions": contents.positions, "rows": contents.rows, "starts": contents.starts,
        "k": _unit, "decay": _decay, "beta": contents.probability, "base": _base, "log": _log,
        "recent": contents.row_numbers, "memory": contents.row_numbers,
    }
)  # fmt: skip
_SIZES: Mapping[str, Any] = MappingProxyType({"t": 9, "g": 2, "h": 4, "d": 8, "e": 6, "c": 32})


def sequences(pos: Any) -> Iterator[slice]:
    """Yield the tokens of each sequence of packed prompts: one starts wherever a position is not one after the last."""
    at = np.flatnonzero(np.concatenate([[True], np.diff(pos) != 1, [True]]))
    yield from (np.s_[a:b] for a, b in pairwise(at))


def runs(rows: Any, starts: Any, positions: Any) -> Iterator[tuple[int, slice, int]]:
    """Yield (device row, tokens, position of the first token) of each run that has tokens."""
    i = 0
    while i < len(rows):
        end = i + 1
        while end < len(rows) and rows[end] == rows[i]:
            end += 1
        if rows[i] >= 0 and starts[i] < starts[end]:
            yield int(rows[i]), np.s_[int(starts[i]) : int(starts[end])], int(positions[starts[i]])
        i = end


def tokens_of(span: slice, *operands: Any) -> list[Any]:
    """Return the operands of some tokens; an operand that is None remains None."""
    return [None if x is None else x[span] for x in operands]


def _convolve(x: Any, before: Any, weight: Any, bias: Any) -> Any:
    """Return the convolution of x [t, c] along t, after the w - 1 rows `before`."""
    n, w = len(x), weight.shape[1]
    x = np.concatenate([before, x])
    y = sum((x[j : j + n] * weight[:, j] for j in range(w)), np.zeros_like(x[:n]))
    return y if bias is None else y + bias


def recur(state: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
    """Update the state [h, d, e] in place by the tokens of one sequence -> [t, h, e]."""
    share = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, share, 1) for x in (q, k))
    out = np.zeros_like(v)
    for t in range(len(v)):
        state *= np.exp(decay[t]).reshape(len(state), -1, 1)
        u = v[t]
        if beta is not None:
            u = beta[t][:, None] * (u - np.einsum("hde,hd->he", state, k[t]))
        state += k[t][:, :, None] * u[:, None]
        out[t] = np.einsum("hde,hd->he", state, q[t])
    return out


def recurrence(
    q: Any, k: Any, v: Any, decay: Any, memory: Any, rows: Any, starts: Any, positions: Any, beta: Any,
    past: tuple[Any, Any] | None = None, advance: Callable[[Any, slice], Any] | None = None, least: int = 0,
) -> Any:  # fmt: skip
    """Return the results [t, h, e] of row_recurrence and of its variants, and the next version of the memory.

    past: the base and the log of row_recurrence_draft. advance(state, tokens): updates the state of a run of `least`
    tokens or more by tokens that are not rejected, and returns their results; by default they are computed in turn.
    """
    out, memory = np.zeros_like(v), memory.copy()
    for row, span, first in runs(rows, starts, positions):
        state, cut = memory[row].copy() if first else np.zeros_like(memory[row]), span.stop
        if past:
            base, log = past[0][row] if first else 0, past[1][row]
            cut = span.start + kept_positions(first, span, len(log)) - first
            recur(state, *_unlogged(log[np.arange(base, first) % len(log)], k, v, beta is not None))
        certain, rejectable = np.s_[span.start : cut], np.s_[cut : span.stop]
        if advance and span.stop - span.start >= least:
            out[certain] = advance(state, certain)
        else:
            out[certain] = recur(state, *tokens_of(certain, q, k, v, decay, beta))
        memory[row] = state
        out[rejectable] = recur(state, *tokens_of(rejectable, q, k, v, decay, beta))
    return out, memory


@op(
    "(x: f[t, c], weight: x[c, w], pos: i[t], bias?: x[c]) -> x[t, c]", flops="2*t*c*w", holds=HOLDS,
    example={"t": 9, "c": 5, "w": 4, "layer": 0},
)  # fmt: skip
def causal_conv(x: Any, weight: Any, pos: Any, bias: Any = None, *, layer: int) -> Any:
    """Depthwise convolution over the last w tokens of each sequence of packed prompts, with zeros before its start.

    y[t] is the sum of weight[:, w - 1 - j] * x[t - j] over j, in f32, and the bias. Sequences begin as those of
    `attention` do.
    """
    out = np.zeros_like(x)
    before = np.zeros((weight.shape[1] - 1, x.shape[1]), x.dtype)
    for span in sequences(pos):
        out[span] = _convolve(x[span], before, weight, bias)
    return out


@op(
    "(q: f[t, g, d], k: q[t, g, d], v: q[t, h, e], decay: f32[t, c], pos: i[t], beta?: f32[t, h]) -> q[t, h, e]",
    flops="7*t*h*d*e", holds=HOLDS, example={**_SIZES, "layer": 0},
)  # fmt: skip
def linear_recurrence(q: Any, k: Any, v: Any, decay: Any, pos: Any, beta: Any = None, *, layer: int) -> Any:
    """A linear recurrence over packed prompts, whose sequences begin as those of `attention` do.

    h is a multiple of g: key head j serves the value heads from j * h / g. Each head has a state S [d, e] in f32, zero
    at first. For each token, S is multiplied by exp(decay); u = beta * (v - S^T k) with beta (the gated delta rule) or
    u = v without it; S += k u^T; the result is S^T q. `decay` has a factor for each head (c = h), or one for each
    channel of a key, that is, for each row of the state (c = h * d). Mamba-1 has such rates, with e = 1. The scale and
    norm of q and k are not part of the op.
    """
    out = np.zeros_like(v)
    for span in sequences(pos):
        state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), decay.dtype)
        out[span] = recur(state, *tokens_of(span, q, k, v, decay, beta))
    return out


@op(
    "(x: f[t, c], weight: x[c, w], recent: state x[m, n, c], rows: i32[r], starts: i32[r+1], positions: i32[t],"
    " bias?: x[c]) -> (y: x[t, c], ring: state x[m, n, c])",
    writes=("recent",), flops="2*t*c*w", bytes="2*t*c*bytes_x + 2*r*w*c*bytes_x + c*w*bytes_x", holds=HOLDS,
    example={"t": 9, "c": 5, "w": 4, "m": 4, "n": 5, "r": 4},
)  # fmt: skip
def row_conv(x: Any, weight: Any, recent: Any, rows: Any, starts: Any, positions: Any, bias: Any = None) -> Any:
    """causal_conv of each run, after the last tokens of its device row.

    `recent` is a ring of the row's inputs, that of position p at p mod n, with n >= w; the last n inputs of the run are
    stored. A later run may begin at any position from 1 after the run's first to the one after its last, if n is at
    least w - 1 and the number of tokens that it repeats. The result is zero for padding.
    """
    out, ring, w, n = np.zeros_like(x), recent.copy(), weight.shape[1], recent.shape[1]
    for row, span, first in runs(rows, starts, positions):
        earlier = np.arange(first - w + 1, first)
        before = np.where((earlier >= 0)[:, None], recent[row, earlier % n], 0).astype(x.dtype)
        out[span] = _convolve(x[span], before, weight, bias)
        last = np.arange(max(span.start, span.stop - n), span.stop)
        ring[row, (first + last - span.start) % n] = x[last]
    return out, ring


@op(
    "(q: f[t, g, d], k: q[t, g, d], v: q[t, h, e], decay: f32[t, c], memory: state f32[m, h, d, e], rows: i32[r],"
    " starts: i32[r+1], positions: i32[t], beta?: f32[t, h]) -> (y: q[t, h, e], s: state f32[m, h, d, e])",
    writes=("memory",), flops="7*t*h*d*e",
    bytes="8*r*h*d*e + 2*t*g*d*bytes_q + 2*t*h*e*bytes_q + 4*t*h + 4*t*c", holds=HOLDS,
    example={**_SIZES, "m": 4, "r": 4},
)  # fmt: skip
def row_recurrence(
    q: Any, k: Any, v: Any, decay: Any, memory: Any, rows: Any, starts: Any, positions: Any, beta: Any = None
) -> Any:
    """linear_recurrence of each run, from the state of its device row, which becomes that after the run's last token.

    The result is zero for padding. The cost assumes that every entry is a run.
    """
    return recurrence(q, k, v, decay, memory, rows, starts, positions, beta)


@op(
    "(q: f[t, g, d], k: q[t, g, d], v: q[t, h, e], decay: f32[t, c], memory: state f32[m, h, d, e],"
    " base: state i32[m], log: state f32[m, n, g*d+h*e+h+c], rows: i32[r], starts: i32[r+1], positions: i32[t],"
    " beta?: f32[t, h]) -> (y: q[t, h, e], s: state f32[m, h, d, e])",
    writes=("memory",), flops="7*t*h*d*e + 5*r*n*h*d*e",
    bytes="8*r*h*d*e + 4*r*n*(g*d + h*e + h + c) + 2*t*g*d*bytes_q + 2*t*h*e*bytes_q + 4*t*h + 4*t*c", holds=HOLDS,
    example={**_SIZES, "m": 4, "n": 3, "r": 4},
)  # fmt: skip
def row_recurrence_draft(
    q: Any, k: Any, v: Any, decay: Any, memory: Any, base: Any, log: Any, rows: Any, starts: Any, positions: Any,
    beta: Any = None,
) -> Any:  # fmt: skip
    """row_recurrence, after which up to n of a run's last tokens may be rejected. `row_log` follows it.

    `memory` is the state after the positions below `base` of its row, and `log` a ring of the tokens from there on,
    that of position p at p mod n: k, v, decay and beta (0 without beta). A run that begins at position `first`, with
    first - n <= base <= first, replays the positions base .. first - 1 from the log, then computes its own tokens. Of
    the positions below its end, those below max(first + 1, end - n) become part of the memory. The next run of the row
    begins after `first`, at `end` or earlier.
    """
    return recurrence(q, k, v, decay, memory, rows, starts, positions, beta, (base, log))


@op(
    "(k: f[t, g, d], v: k[t, h, e], decay: f32[t, c], base: state i32[m], log: state f32[m, n, g*d+h*e+h+c],"
    " rows: i32[r], starts: i32[r+1], positions: i32[t], beta?: f32[t, h])"
    " -> (b: state i32[m], ring: state f32[m, n, g*d+h*e+h+c])",
    writes=("base", "log"), bytes="r*n*(g*d + h*e)*(4 + bytes_k) + 8*r*n*(h + c)", holds=HOLDS,
    example={**_SIZES, "m": 4, "n": 3, "r": 4},
)  # fmt: skip
def row_log(
    k: Any, v: Any, decay: Any, base: Any, log: Any, rows: Any, starts: Any, positions: Any, beta: Any = None
) -> Any:
    """Log the tokens of each run that are not in the memory that row_recurrence_draft wrote, and set its `base`.

    It is an op of its own because all heads of row_recurrence_draft read the base and the log of a row.
    """
    base, log = base.copy(), log.copy()
    n = log.shape[1]
    factor = np.zeros(v.shape[:2], decay.dtype) if beta is None else beta
    tokens = np.concatenate([k.reshape(len(k), -1), v.reshape(len(v), -1), decay, factor], 1)
    for row, span, first in runs(rows, starts, positions):
        base[row] = first_kept = kept_positions(first, span, n)
        log[row, np.arange(first_kept, first + span.stop - span.start) % n] = tokens[span][first_kept - first :]
    return base, log


def kept_positions(first: int, span: slice, n: int) -> int:
    """Return the number of positions of a row whose tokens can no longer be rejected, of up to n that may be."""
    return max(first + 1, first + span.stop - span.start - n)


def _unlogged(log: Any, k: Any, v: Any, delta: bool) -> tuple[Any, ...]:
    """Return q (zeros), k, v, decay and beta (None without the delta rule) of the logged tokens [i, width]."""
    (_, g, d), (_, h, e) = k.shape, v.shape
    keys, values, decay, beta = np.split(log, [g * d, g * d + h * e, log.shape[1] - h], 1)
    keys = keys.reshape(-1, g, d)
    return np.zeros_like(keys), keys, values.reshape(-1, h, e), decay, beta if delta else None


# Ops that `page-attention` replaces by their forms on device rows.
PROMPT_OPS = (causal_conv.name, linear_recurrence.name)
