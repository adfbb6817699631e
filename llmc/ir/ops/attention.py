"""Attention is one op with attributes, over a prompt (`attention`) or over pages of a KV pool (`paged_attention`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..opdef import OpDef, op


def attend(q: Any, k: Any, v: Any, mask: Any, scale: float, softcap: float, sinks: Any) -> Any:
    """One query block: q [t, h, d], k [n, g, d], v [n, g, e], mask [t, n] (True: visible) -> [t, h, e].

    A sink is one more logit per head that takes part in the softmax and has no value."""
    h, g = q.shape[1], k.shape[1]
    k, v = np.repeat(k, h // g, 1), np.repeat(v, h // g, 1)
    s = np.einsum("thd,nhd->htn", q, k) * scale
    if softcap:
        s = np.tanh(s / softcap) * softcap
    s = np.where(mask[None], s, -np.inf)
    top = np.max(s, -1, keepdims=True, initial=-1e30)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.einsum("htn,nhe->the", p / np.maximum(total, 1e-30), v)


def visible(q_pos: Any, k_pos: Any, causal: bool, window: int) -> Any:
    """[t, n] mask: keys not after the query when causal, and after query - window when there is a window."""
    mask = np.ones((len(q_pos), len(k_pos)), bool)
    if causal:
        mask &= k_pos[None] <= q_pos[:, None]
    if window:
        mask &= k_pos[None] > q_pos[:, None] - window
    return mask


def _prompt_example(rng: Any) -> Any:
    q, k, v = (rng.standard_normal((9, n, 8)).astype(np.float32) for n in (4, 2, 2))
    return [q, k, v, np.array([0, 1, 2, 3, 0, 1, 2, 3, 4]), rng.standard_normal(4).astype(np.float32)], {
        "layer": 0, "scale": 0.35, "window": 3, "softcap": 2.0,
    }  # fmt: skip


@op(
    "(q: f[t, h, d], k: q[t, g, d], v: q[t, g, e], pos: i[t], sinks?: f[h]) -> q[t, h, e]",
    flops="2*t*t*h*d + 2*t*t*h*e", example=_prompt_example,
)  # fmt: skip
def attention(
    q: Any, k: Any, v: Any, pos: Any, sinks: Any = None, *, layer: int, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """Attention over packed prompts: a sequence starts wherever a position does not follow its predecessor by one, and
    tokens see only their own sequence. h is a multiple of g (grouped queries); a window counts the query's position."""
    starts = np.concatenate([[True], np.diff(pos) != 1])
    segment = np.cumsum(starts)
    mask = visible(pos, pos, causal, window) & (segment[:, None] == segment[None])
    return attend(q, k, v, mask, scale, softcap, sinks)


def _paged_example(rng: Any) -> Any:
    f32 = np.float32
    q = rng.standard_normal((7, 4, 8)).astype(f32)
    kv = rng.standard_normal((6, 2, 2, 4, 8)).astype(f32)
    pages = np.array([[1, 2, 0], [3, 4, 5], [0, 0, 0]], np.int32)
    rows, starts = np.array([1, 0, -1], np.int32), np.array([0, 5, 6, 7], np.int32)
    positions = np.array([4, 5, 6, 7, 8, 3, -1], np.int32)
    return [q, kv, pages, rows, starts, positions, rng.standard_normal(4).astype(f32)], {
        "scale": 0.35, "window": 6, "softcap": 3.0,
    }  # fmt: skip


@op(
    "(q: f[t, h, d], kv: state f[p, 2, g, page, d], pages: state i32[rows_max, m], rows: i32[r], starts: i32[r+1],"
    " positions: i32[t], sinks?: f[h]) -> q[t, h, d]",
    flops="4*t*h*d*p*page", bytes="2*p*page*g*d*bytes_kv + 2*t*h*d*bytes_q", example=_paged_example,
)  # fmt: skip
def paged_attention(
    q: Any, kv: Any, pages: Any, rows: Any, starts: Any, positions: Any, sinks: Any = None, *, scale: float,
    window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """Causal attention of row i's tokens starts[i] .. starts[i+1] over the pages of its device row. A token at position
    p sees positions 0 .. p (p - window + 1 .. p with a window), its own included: append first. Rows of -1 and tokens
    at position -1 are padding; their result is zero. The cost takes every page of the pool to be in use."""
    page = kv.shape[3]
    out = np.zeros_like(q)
    for i, row in enumerate(rows):
        span = np.s_[starts[i] : starts[i + 1]]
        pos = positions[span]
        if row < 0 or not len(pos):
            continue
        n = int(pos.max()) + 1
        held = kv[pages[row, : -(-n // page)]]  # [pages, 2, g, page, d]
        k, v = (held[:, j].transpose(0, 2, 1, 3).reshape(-1, kv.shape[2], kv.shape[4])[:n] for j in (0, 1))
        out[span] = attend(q[span], k, v, visible(pos, np.arange(n), True, window), scale, softcap, sinks)
        out[span][pos < 0] = 0
    return out


OPS = tuple(v for v in globals().values() if isinstance(v, OpDef))
