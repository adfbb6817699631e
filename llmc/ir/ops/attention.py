"""Attention over packed prompts (`attention`) or over the pages of a KV pool (`paged_attention`).

Paged attention can be split along the keys and combined afterwards (`paged_attention_split`, `attention_combine`), and
rows with a single token can be computed by a separate op (`paged_attention_single`).

The logits of the `alibi` forms have a bias by distance. The bias of a key is its head's slope times (position of the
key - position of the query): 0 for the query's own token, and the lower the earlier the key is. It replaces positions
in the embedding (Press et al. 2021, arXiv 2108.12409).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Content
from llmc.ir.opdef import op


def attend(q: Any, k: Any, v: Any, mask: Any, scale: float, softcap: float, sinks: Any, bias: Any = 0) -> Any:
    """Softmax attention: q [t, h, d], k [n, g, d], v [n, g, e], mask [t, n] (True: visible) -> [t, h, e].

    `sinks` [h] adds one logit per head to the softmax's denominator; it contributes no value. `bias` [h, t, n] is added
    to the logits.
    """
    s = _scores(q, k, scale, softcap) + bias
    v = np.repeat(v, q.shape[1] // v.shape[1], 1)
    s = np.where(mask[None], s, -np.inf)
    top = np.max(s, -1, keepdims=True, initial=-1e30)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.einsum("htn,nhe->the", p / np.maximum(total, 1e-30), v)


def _scores(q: Any, k: Any, scale: float, softcap: float) -> Any:
    """Return the logits [h, t, n] of queries [t, h, d] over keys [n, g, d]."""
    s = np.einsum("thd,nhd->htn", q, np.repeat(k, q.shape[1] // k.shape[1], 1)) * scale
    return np.tanh(s / softcap) * softcap if softcap else s


def visible(q_pos: Any, k_pos: Any, causal: bool, window: int) -> Any:
    """Return the mask [t, n] of keys visible to each query, under causality and a sliding window (0: none)."""
    mask = np.ones((len(q_pos), len(k_pos)), bool)
    if causal:
        mask &= k_pos[None] <= q_pos[:, None]
    if window:
        mask &= k_pos[None] > q_pos[:, None] - window
    return mask


def visible_in_sequence(pos: Any, causal: bool = True, window: int = 0) -> Any:
    """Return the mask [t, t] of keys visible to each query of packed prompts (see `attention`)."""
    sequence = np.cumsum(np.concatenate([[True], np.diff(pos) != 1]))
    return visible(pos, pos, causal, window) & (sequence[:, None] == sequence[None])


@op(
    "(q: f[t, h, d], k: q[t, g, d], v: q[t, g, e], pos: i[t], sinks?: f[h]) -> q[t, h, e]",
    flops="2*t*t*h*d + 2*t*t*h*e", holds={"pos": contents.positions},
    example={"t": 9, "h": 4, "g": 2, "d": 8, "e": 8, "layer": 0, "scale": 0.35, "window": 3, "softcap": 2.0},
)  # fmt: skip
def attention(
    q: Any, k: Any, v: Any, pos: Any, sinks: Any = None, *, layer: int, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """Grouped-query attention over packed prompts; h is a multiple of g.

    A sequence starts wherever a position is not its predecessor plus one, and tokens attend only within their sequence.
    A window counts the query's own position. Logits are q @ k times `scale`; a `softcap` c > 0 bounds them to
    c * tanh(logit / c). A sink is one more logit of its head, which takes part in the softmax but has no value.
    """
    return attend(q, k, v, visible_in_sequence(pos, causal, window), scale, softcap, sinks)


# What the operands of attention over pages hold, by operand name.
PAGED: Mapping[str, Content] = MappingProxyType(
    {
        "kv": contents.kv_pool, "pool": contents.kv_pool, "pages": contents.page_table, "rows": contents.rows,
        "starts": contents.starts, "positions": contents.positions, "scales": contents.positive,
    }
)  # fmt: skip
# Attributes of `attention` that the ops over pages share. Passes that replace one of these ops by another keep them.
SHARED_ATTRIBUTES = ("scale", "window", "softcap")
_SIZES: Mapping[str, Any] = MappingProxyType(
    {"t": 7, "h": 4, "d": 8, "p": 6, "g": 2, "page": 4, "rows_max": 3, "m": 3, "r": 3}
)


@op(
    "(q: f[t, h, d], kv: state f[p, 2, g, page, d], pages: state i32[rows_max, m], rows: i32[r], starts: i32[r+1],"
    " positions: i32[t], scales?kv: f32[2*g], sinks?: f[h]) -> q[t, h, d]",
    flops="4*t*h*d*p*page", bytes="2*p*page*g*d*bytes_kv + 2*t*h*d*bytes_q", holds=PAGED,
    example={**_SIZES, "scale": 0.35, "window": 6, "softcap": 3.0},
)  # fmt: skip
def paged_attention(
    q: Any, kv: Any, pages: Any, rows: Any, starts: Any, positions: Any, sinks: Any = None, scales: Any = None, *,
    scale: float, window: int = 0, softcap: float = 0.0, least: int = 1,
) -> Any:  # fmt: skip
    """Causal attention of each row's tokens starts[i] .. starts[i+1] over the KV pages of its device row.

    A token at position p attends to positions 0 .. p, or p - window + 1 .. p with a window. Its own key and value must
    have been appended already. The result is zero for padding (rows of -1, tokens at position -1) and for rows with
    fewer than `least` tokens. Scale, softcap and sinks are those of `attention`. A pool of 8-bit floats is multiplied
    by `scales` (see `kv_append`). The cost assumes that every page of the pool is in use.
    """
    selected, kv = np.diff(starts) >= least, unscaled(kv, scales)
    return _over_pages(np.zeros_like(q), selected, q, kv, pages, rows, starts, positions, sinks, scale, window, softcap)


def unscaled(kv: Any, scales: Any) -> Any:
    """Return the keys and values of a pool: its numbers times the scale of their head, if it has scales."""
    return kv if scales is None else kv * scales.reshape(2, -1, 1, 1)


def _over_pages(
    out: Any, selected: Any, q: Any, kv: Any, pages: Any, rows: Any, starts: Any, positions: Any, sinks: Any,
    scale: float, window: int, softcap: float,
) -> Any:  # fmt: skip
    """Write the attention of the rows selected by `selected` into `out`, and return it."""
    for span, pos, k, v in row_spans(kv, pages, np.where(selected, rows, -1), starts, positions):
        out[span] = attend(q[span], k, v, visible(pos, np.arange(len(k)), True, window), scale, softcap, sinks)
        out[span][pos < 0] = 0
    return out


def row_spans(kv: Any, pages: Any, rows: Any, starts: Any, positions: Any) -> Iterator[tuple[slice, Any, Any, Any]]:
    """Yield (tokens, their positions, keys [n, g, d], values [n, g, d]) of each entry whose row is not -1.

    The keys and values are those of positions 0 to the largest of the entry, from the pages of its row.
    """
    page = kv.shape[3]
    for i, row in enumerate(rows):
        span = np.s_[starts[i] : starts[i + 1]]
        pos = positions[span]
        if row < 0 or not len(pos):
            continue
        n = int(pos.max()) + 1
        cached = kv[pages[row, : -(-n // page)]]  # [pages, 2, g, page, d]
        k, v = (cached[:, j].transpose(0, 2, 1, 3).reshape(-1, kv.shape[2], kv.shape[4])[:n] for j in (0, 1))
        yield span, pos, k, v


@op(
    "(q: f[t, h, d], kv: state f[p, 2, g, page, d], pages: state i32[rows_max, m], rows: i32[r], starts: i32[r+1],"
    " positions: i32[t], y: q[t, h, d], scales?kv: f32[2*g], sinks?: f[h]) -> q[t, h, d]",
    flops="4*r*h*d*p*page", bytes="2*p*page*g*d*bytes_kv + 2*r*h*d*bytes_q", holds=PAGED,
    example={**_SIZES, "scale": 0.35, "window": 6, "softcap": 3.0},
)  # fmt: skip
def paged_attention_single(
    q: Any, kv: Any, pages: Any, rows: Any, starts: Any, positions: Any, y: Any, sinks: Any = None, scales: Any = None,
    *, scale: float, window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """Copy y, and overwrite the tokens of rows that have exactly one token with their attention.

    This completes paged_attention with least=2: decoding rows in a batch with prompts need no tiles of many queries.
    """
    selected, kv = np.diff(starts) == 1, unscaled(kv, scales)
    return _over_pages(y.copy(), selected, q, kv, pages, rows, starts, positions, sinks, scale, window, softcap)


@op(
    "(q: f[t, h, d], kv: state f[p, 2, g, page, d], pages: state i32[rows_max, m], rows: i32[t], positions: i32[t],"
    " scales?kv: f32[2*g]) -> (partial: f32[t, h, splits, d], lse: f32[t, h, splits])",
    flops="4*t*h*d*p*page", bytes="2*p*page*g*d*bytes_kv + t*h*d*bytes_q + 4*t*h*splits*d + 4*t*h*splits",
    holds=PAGED, example={**_SIZES, "t": 3, "scale": 0.35, "splits": 2, "window": 7, "softcap": 3.0},
)  # fmt: skip
def paged_attention_split(
    q: Any, kv: Any, pages: Any, rows: Any, positions: Any, scales: Any = None, *, scale: float, splits: int,
    window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """paged_attention of one token per row, with each row's visible pages divided among `splits` parts.

    Of n pages, each part takes ceil(n / splits) consecutive ones. Each part has its own softmax; lse is the natural
    logarithm of its sum of exponentials. Parts without pages, and all parts of padding rows, are zero with an lse of
    -inf.
    """
    (t, h, d), page, kv = q.shape, kv.shape[3], unscaled(kv, scales)
    partial = np.zeros((t, h, splits, d), q.dtype)
    lse = np.full((t, h, splits), -np.inf, q.dtype)
    for i, (row, pos) in enumerate(zip(rows, positions, strict=True)):
        if row < 0 or pos < 0:
            continue
        low = max(0, pos + 1 - window) if window else 0
        per = -(-(pos // page + 1 - low // page) // splits)
        for z, first in enumerate(range(low // page, pos // page + 1, per)):
            at = np.arange(max(low, first * page), min(pos + 1, (first + per) * page))
            partial[i, :, z], lse[i, :, z] = _part(q[i : i + 1], kv, pages[row], at, scale, softcap)
    return partial, lse


def _part(q: Any, kv: Any, pages: Any, at: Any, scale: float, softcap: float) -> tuple[Any, Any]:
    """Return the attention [h, d] of one token over the tokens `at` of a row, and the logarithm [h] of its sum."""
    page = kv.shape[3]
    k, v = (kv[pages[at // page], j, :, at % page] for j in (0, 1))
    s = _scores(q, k, scale, softcap)
    top = s.max(-1)
    lse = (top + np.log(np.exp(s - top[..., None]).sum(-1)))[:, 0]
    return attend(q, k, v, np.ones((1, len(at)), bool), scale, softcap, None)[0], lse


@op(
    "(q: f[t, h, d], kv: state f[p, 2, g, page, d], pages: state i32[rows_max, m], rows: i32[t], positions: i32[t],"
    " scales?kv: f32[2*g]) -> (partial: f32[t, h, splits, d], lse: f32[t, h, splits])",
    flops="4*t*h*d*p*page", bytes="2*p*page*g*d*bytes_kv + t*h*d*bytes_q + 4*t*h*splits*d + 4*t*h*splits",
    holds=PAGED,
    example={**_SIZES, "t": 3, "page": 16, "scale": 0.35, "splits": 3, "part": 16, "window": 20, "softcap": 3.0},
)  # fmt: skip
def paged_attention_parts(
    q: Any, kv: Any, pages: Any, rows: Any, positions: Any, scales: Any = None, *, scale: float, splits: int,
    part: int, window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """paged_attention_split whose parts begin at multiples of `part` tokens, wherever a row ends.

    A token at a position of splits * part or more is not supported.
    """
    (t, h, d), kv = q.shape, unscaled(kv, scales)
    partial = np.zeros((t, h, splits, d), q.dtype)
    lse = np.full((t, h, splits), -np.inf, q.dtype)
    for i, (row, pos) in enumerate(zip(rows, positions, strict=True)):
        low = max(0, pos + 1 - window) if window else 0
        for z in range(low // part, pos // part + 1 if row >= 0 else 0):
            at = np.arange(max(low, z * part), min(pos + 1, (z + 1) * part))
            partial[i, :, z], lse[i, :, z] = _part(q[i : i + 1], kv, pages[row], at, scale, softcap)
    return partial, lse


@op(
    "(partial: f32[t, h, s, d], lse: f32[t, h, s], sinks?: f[h]) -> dtype[t, h, d]", flops="2*t*h*s*d",
    holds={"lse": contents.logits}, example={"t": 3, "h": 4, "s": 5, "d": 8, "dtype": "f32"},
)  # fmt: skip
def attention_combine(partial: Any, lse: Any, sinks: Any = None, *, dtype: str) -> Any:
    """Combine the parts of paged_attention_split or paged_attention_parts into one softmax, each weighted by exp(lse).

    A sink adds one weight per head without a value. The result is zero if all weights are zero.
    """
    top = np.max(lse, -1, initial=-1e30)
    if sinks is not None:
        top = np.maximum(top, sinks)
    weight = np.exp(lse - top[..., None])
    total = weight.sum(-1)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    return np.einsum("ths,thsd->thd", weight, partial) / np.maximum(total, 1e-30)[..., None]


HOLDS: Mapping[str, contents.Content] = MappingProxyType({**PAGED, "slopes": contents.positive})


def _bias(slopes: Any, q_pos: Any, k_pos: Any) -> Any:
    """Return the biases [h, t, n] of keys at positions [n] for queries at positions [t]."""
    return slopes[:, None, None] * (k_pos[None] - q_pos[:, None])


@op(
    "(q: f[t, h, d], k: q[t, g, d], v: q[t, g, e], pos: i[t], slopes: f32[h]) -> q[t, h, e]",
    flops="2*t*t*h*d + 2*t*t*h*e", holds={"pos": contents.positions, "slopes": contents.positive},
    example={"t": 9, "h": 4, "g": 2, "d": 8, "e": 8, "layer": 0, "scale": 0.35},
)  # fmt: skip
def alibi_attention(q: Any, k: Any, v: Any, pos: Any, slopes: Any, *, layer: int, scale: float) -> Any:
    """Causal attention over packed prompts with a bias by distance; h is a multiple of g.

    Sequences begin as those of `attention` do. Logits are q @ k times `scale`, plus the slope of the head times the
    position of the key minus that of the query.
    """
    return attend(q, k, v, visible_in_sequence(pos), scale, 0.0, None, _bias(slopes, pos, pos))


@op(
    "(q: f[t, h, d], kv: state f[p, 2, g, page, d], pages: state i32[rows_max, m], rows: i32[r], starts: i32[r+1],"
    " positions: i32[t], scales?kv: f32[2*g], slopes: f32[h]) -> q[t, h, d]",
    flops="4*t*h*d*p*page", bytes="2*p*page*g*d*bytes_kv + 2*t*h*d*bytes_q", holds=HOLDS,
    example={"t": 7, "h": 4, "d": 8, "p": 6, "g": 2, "page": 4, "rows_max": 3, "m": 3, "r": 3, "scale": 0.35},
)  # fmt: skip
def paged_alibi_attention(
    q: Any, kv: Any, pages: Any, rows: Any, starts: Any, positions: Any, slopes: Any, scales: Any = None, *,
    scale: float,
) -> Any:  # fmt: skip
    """alibi_attention of each row's tokens starts[i] .. starts[i+1] over the KV pages of its device row.

    A token at position p attends to positions 0 .. p; its own key and value must have been appended already. The result
    is zero for padding (rows of -1, tokens at position -1). A pool of 8-bit floats is multiplied by `scales` (see
    `kv_append`).
    """
    out, kv = np.zeros_like(q), unscaled(kv, scales)
    for span, pos, k, v in row_spans(kv, pages, rows, starts, positions):
        keys = np.arange(len(k))
        out[span] = attend(q[span], k, v, visible(pos, keys, True, 0), scale, 0.0, None, _bias(slopes, pos, keys))
        out[span][pos < 0] = 0
    return out
