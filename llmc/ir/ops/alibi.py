"""Attention whose logits have a bias by distance, a multiple of each head's slope (ALiBi).

The bias of a key is its slope times (position of the key - position of the query): 0 for the query's own token, and
the lower the earlier the key is. It replaces positions in the embedding (Press et al. 2021, arXiv 2108.12409).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.opdef import op
from llmc.ir.ops.attention import PAGED, attend, row_spans, unscaled, visible, visible_in_sequence

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
