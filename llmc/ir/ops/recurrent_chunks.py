"""Linear recurrences of prompts in chunks of tokens (Yang et al. 2024, arXiv 2412.06464, section 3.3).

With G[i] the sum of the decays of a chunk up to token i, the values u that the chunk adds to the state S solve
(I + L) u = beta (v - exp(G) S^T k), where L[i, j] = beta[i] exp(G[i] - G[j]) (k[i] . k[j]) for j < i. `chunk_factors`
computes what does not depend on S, for all chunks at once; `chunk_recurrence` and `chunk_recurrence_draft` then need
only products for each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.contents import Content, Drawing, Shape
from llmc.ir.dim import Dim
from llmc.ir.opdef import op
from llmc.ir.ops.recurrent import HOLDS as STEP
from llmc.ir.ops.recurrent import recurrence, runs
from llmc.ir.types import Type


def _factors(d: Drawing, shape: Shape) -> Any:
    """Draw numbers whose sums over a chunk are about 1."""
    return d.rng.standard_normal(shape) / shape[-1] ** 0.5


HOLDS: Mapping[str, Content] = MappingProxyType({**STEP, "factors": _factors})
_SIZES: Mapping[str, Any] = MappingProxyType(
    {"t": 9, "g": 2, "h": 4, "d": 8, "e": 6, "p": 2, "c": 16, "m": 4, "r": 4, "least": 2}
)


def _types_of_factors(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    """Return the result types: one matrix per head without the delta rule, two with it."""
    return [Type("f32", (env["t"], env["h"], Dim.of(1 + ("beta" in env)), Dim.of(attrs["chunk"])))]


def _chunks(span: slice, size: int) -> list[slice]:
    """Return the chunks of a run's tokens."""
    return [np.s_[at : min(at + size, span.stop)] for at in range(span.start, span.stop, size)]


@op(
    "(q: f[t, g, d], k: q[t, g, d], decay: f32[t, h], rows: i32[r], starts: i32[r+1], beta?: f32[t, h])"
    " -> f32[t, h, p, c]",
    infer=_types_of_factors, flops="4*t*chunk*h*d", bytes="2*t*g*d*bytes_q + 8*t*h + 8*t*h*chunk", holds=HOLDS,
    example={**_SIZES, "chunk": 16},
)  # fmt: skip
def chunk_factors(
    q: Any, k: Any, decay: Any, rows: Any, starts: Any, beta: Any = None, *, chunk: int, least: int
) -> Any:
    """Compute the matrices of every chunk of `chunk` tokens of each run, as rows of its tokens.

    The row of token i has, in column j, the factor of token j of its chunk: exp(G[i] - G[j]) (q[i] . k[j]) for j <= i,
    else 0; and with beta, the rows of the inverse of I + L, whose columns are multiplied by beta. The result is zero
    for padding and for runs of fewer than `least` tokens.
    """
    (t, g, _), h = q.shape, decay.shape[1]
    out = np.zeros((t, h, 1 if beta is None else 2, chunk), decay.dtype)
    q, k = (np.repeat(x, h // g, 1) for x in (q, k))
    for _, span, _ in runs(rows, starts, np.zeros(t, np.int64)):
        for part in _chunks(span, chunk) if span.stop - span.start >= least else ():
            n, since = part.stop - part.start, np.cumsum(decay[part], 0).T
            between = np.tril(np.exp(np.tril(since[:, :, None] - since[:, None])))
            out[part, :, 0, :n] = (np.einsum("ihd,jhd->hij", q[part], k[part]) * between).transpose(1, 0, 2)
            if beta is not None:
                lower = np.tril(np.einsum("ihd,jhd,ih->hij", k[part], k[part], beta[part]) * between, -1)
                inverse = np.linalg.inv(np.eye(n) + lower) * beta[part].T[:, None]
                out[part, :, 1, :n] = inverse.transpose(1, 0, 2)
    return out


def _advance(q: Any, k: Any, v: Any, decay: Any, factors: Any, state: Any, span: slice) -> Any:
    """Update the state [h, d, e] in place by a run's tokens, in chunks -> [tokens, h, e]."""
    share = v.shape[1] // k.shape[1]
    q, k = (np.repeat(x, share, 1) for x in (q, k))
    out = []
    for part in _chunks(span, factors.shape[3]):
        n = part.stop - part.start
        since = np.cumsum(decay[part], 0)[:, :, None]
        u = v[part]
        if factors.shape[2] == 2:
            u = u - np.exp(since) * np.einsum("hde,ihd->ihe", state, k[part])
            u = np.einsum("ihj,jhe->ihe", factors[part, :, 1, :n], u)
        y = np.einsum("ihj,jhe->ihe", factors[part, :, 0, :n], u)
        out.append(y + np.exp(since) * np.einsum("hde,ihd->ihe", state, q[part]))
        state *= np.exp(since[-1])[:, :, None]
        state += np.einsum("ihd,ihe->hde", k[part] * np.exp(since[-1] - since), u)
    return np.concatenate(out)


@op(
    "(q: f[t, g, d], k: q[t, g, d], v: q[t, h, e], decay: f32[t, h], factors: f32[t, h, p, c],"
    " memory: state f32[m, h, d, e], rows: i32[r], starts: i32[r+1], positions: i32[t], beta?: f32[t, h])"
    " -> (y: q[t, h, e], s: state f32[m, h, d, e])",
    writes=("memory",), flops="6*t*h*d*e + 4*t*c*h*e",
    bytes="8*r*h*d*e + 2*t*g*d*bytes_q + 2*t*h*e*bytes_q + 8*t*h + 4*t*h*p*c", holds=HOLDS, example=_SIZES,
)  # fmt: skip
def chunk_recurrence(
    q: Any, k: Any, v: Any, decay: Any, factors: Any, memory: Any, rows: Any, starts: Any, positions: Any,
    beta: Any = None, *, least: int,
) -> Any:  # fmt: skip
    """row_recurrence, but runs of at least `least` tokens are computed in chunks with the results of chunk_factors."""
    advance = partial(_advance, q, k, v, decay, factors)
    return recurrence(q, k, v, decay, memory, rows, starts, positions, beta, None, advance, least)


@op(
    "(q: f[t, g, d], k: q[t, g, d], v: q[t, h, e], decay: f32[t, h], factors: f32[t, h, p, c],"
    " memory: state f32[m, h, d, e], base: state i32[m], log: state f32[m, n, g*d+h*e+2*h], rows: i32[r],"
    " starts: i32[r+1], positions: i32[t], beta?: f32[t, h]) -> (y: q[t, h, e], s: state f32[m, h, d, e])",
    writes=("memory",), flops="6*t*h*d*e + 4*t*c*h*e + 5*r*n*h*d*e",
    bytes="8*r*h*d*e + 4*r*n*(g*d + h*e + 2*h) + 2*t*g*d*bytes_q + 2*t*h*e*bytes_q + 8*t*h + 4*t*h*p*c", holds=HOLDS,
    example={**_SIZES, "n": 3},
)  # fmt: skip
def chunk_recurrence_draft(
    q: Any, k: Any, v: Any, decay: Any, factors: Any, memory: Any, base: Any, log: Any, rows: Any, starts: Any,
    positions: Any, beta: Any = None, *, least: int,
) -> Any:  # fmt: skip
    """row_recurrence_draft, whose runs of at least `least` tokens are computed in chunks, as chunk_recurrence does.

    The tokens of such a run that do not become part of the memory are computed one after another.
    """
    advance = partial(_advance, q, k, v, decay, factors)
    return recurrence(q, k, v, decay, memory, rows, starts, positions, beta, (base, log), advance, least)
