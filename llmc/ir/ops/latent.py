"""Latent attention (MLA) in absorbed form: one key per token is shared by all heads, and its first part is the value.

The key of a token is a latent, from which all heads' keys and values would be computed, followed by a rotated part.
Queries are multiplied by the keys' part of the up-projection and results by the values' part (`head_matmul`), so that a
pool stores the latent instead of the keys and values. See DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.opdef import op
from llmc.ir.ops.attention import PAGED, attend, visible, visible_in_sequence

_SIZES: Mapping[str, Any] = MappingProxyType(
    {"t": 7, "h": 4, "l": 8, "c": 4, "p": 6, "page": 4, "rows_max": 3, "m": 3, "r": 3}
)


@op("(x: f[t, h, k], w: f[h, k, n]) -> x[t, h, n]", flops="2*t*h*k*n", example={"t": 3, "h": 4, "k": 5, "n": 7})
def head_matmul(x: Any, w: Any) -> Any:
    """A product for each head: y[t, h] = x[t, h] @ w[h]."""
    return np.einsum("thk,hkn->thn", x, w)


@op(
    "(q: f[t, h, l], rotary: q[t, h, c], k: q[t, l+c], pos: i[t]) -> q[t, h, l]", flops="4*t*t*h*l + 2*t*t*h*c",
    holds={"pos": contents.positions}, example={"t": 9, "h": 4, "l": 8, "c": 4, "layer": 0, "scale": 0.35},
)  # fmt: skip
def latent_attention(q: Any, rotary: Any, k: Any, pos: Any, *, layer: int, scale: float) -> Any:
    """Causal attention over packed prompts, whose sequences begin as those of `attention` do.

    A query is q followed by its rotated part `rotary`; the value of a token is the first l columns of its key.
    """
    return _attend(q, rotary, k, visible_in_sequence(pos), scale)


def _attend(q: Any, rotary: Any, k: Any, mask: Any, scale: float) -> Any:
    """Attention of queries over the keys [n, l + c] that `mask` [t, n] selects -> [t, h, l]."""
    value = k[:, None, : q.shape[2]]
    return attend(np.concatenate([q, rotary], 2), k[:, None], value, mask, scale, 0.0, None)


@op(
    "(q: f[t, h, l], rotary: q[t, h, c], pool: state f[p, page, l+c], pages: state i32[rows_max, m], rows: i32[r],"
    " starts: i32[r+1], positions: i32[t]) -> q[t, h, l]",
    flops="4*t*h*l*p*page + 2*t*h*c*p*page", bytes="p*page*(l+c)*bytes_pool + 2*t*h*l*bytes_q + t*h*c*bytes_q",
    holds=PAGED, example={**_SIZES, "scale": 0.35},
)  # fmt: skip
def paged_latent_attention(
    q: Any, rotary: Any, pool: Any, pages: Any, rows: Any, starts: Any, positions: Any, *, scale: float
) -> Any:
    """latent_attention of each row's tokens starts[i] .. starts[i+1] over the pages of its device row.

    A token at position p attends to positions 0 .. p; its own key has been stored already (`page_put`). The result is
    zero for padding (rows of -1, tokens at position -1).
    """
    out, page = np.zeros_like(q), pool.shape[1]
    for i, row in enumerate(rows):
        span = np.s_[starts[i] : starts[i + 1]]
        pos = positions[span]
        if row < 0 or not len(pos):
            continue
        n = int(pos.max()) + 1
        k = pool[pages[row, : -(-n // page)]].reshape(-1, pool.shape[2])[:n]
        out[span] = _attend(q[span], rotary[span], k, visible(pos, np.arange(n), True, 0), scale)
        out[span][pos < 0] = 0
    return out


@op(
    "(q: f[t, h, l], rotary: q[t, h, c], pool: state f[p, page, l+c], pages: state i32[rows_max, m], rows: i32[t],"
    " positions: i32[t]) -> (partial: f32[t, h, splits, l], lse: f32[t, h, splits])",
    flops="4*t*h*l*p*page + 2*t*h*c*p*page",
    bytes="p*page*(l+c)*bytes_pool + t*h*(l+c)*bytes_q + 4*t*h*splits*l + 4*t*h*splits",
    holds=PAGED, example={**_SIZES, "t": 3, "scale": 0.35, "splits": 2},
)  # fmt: skip
def paged_latent_attention_split(
    q: Any, rotary: Any, pool: Any, pages: Any, rows: Any, positions: Any, *, scale: float, splits: int
) -> Any:
    """paged_latent_attention of one token per row, with each row's pages divided among `splits` parts.

    The parts, and their lse, are those of paged_attention_split.
    """
    (t, h, width), page = q.shape, pool.shape[1]
    partial = np.zeros((t, h, splits, width), q.dtype)
    lse = np.full((t, h, splits), -np.inf, q.dtype)
    for i, (row, pos) in enumerate(zip(rows, positions, strict=True)):
        count = -(-(pos + 1) // page) if row >= 0 else 0
        per = max(1, -(-count // splits))
        for z, first in enumerate(range(0, count, per)):
            at = np.arange(first * page, min(pos + 1, (first + per) * page))
            k = pool[pages[row][at // page], at % page]
            s = np.concatenate([q[i], rotary[i]], 1) @ k.T * scale
            top = s.max(-1)
            lse[i, :, z] = top + np.log(np.exp(s - top[:, None]).sum(-1))
            partial[i, :, z] = _attend(q[i : i + 1], rotary[i : i + 1], k, np.ones((1, len(at)), bool), scale)[0]
    return partial, lse
