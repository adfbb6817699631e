"""Decode attention that also does what precedes it: head norms, rotation, and the append to the KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Content
from llmc.ir.dim import Dim
from llmc.ir.opdef import OpDef, op
from llmc.ir.ops.attention import paged_attention, paged_attention_split
from llmc.ir.ops.rope import append_type, rope_append, round_steps
from llmc.ir.ops.state import row_slots
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

_OPERANDS = (
    "x: f[t, n], kv: state f[p, 2, g, page, d], pages: state i32[rows_max, m], rows: i32[t], positions: i32[t],"
    " scales?kv: f32[2*g], cos?: f[t, r], sin?: f[t, r], qw?: f[d], kw?: f[d]"
)
_HOLDS: Mapping[str, Content] = MappingProxyType(
    {
        "kv": contents.kv_pool, "pages": contents.page_table, "rows": contents.rows, "positions": contents.positions,
        "scales": contents.positive, "cos": contents.cosine, "sin": contents.sine,
    }
)  # fmt: skip
_EXAMPLE: Mapping[str, Any] = MappingProxyType(
    {
        "t": 3, "n": 64, "p": 6, "g": 2, "page": 4, "d": 8, "rows_max": 3, "m": 3, "r": 3, "heads": 4, "eps": 1e-5,
        "dtype": "f32", "scale": 0.35, "window": 6, "softcap": 3.0,
    }
)  # fmt: skip


def _split_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    q, kv = append_type(env, attrs)
    t, h, d = q.shape
    if attrs["splits"] < 1:
        raise Mismatch(f"splits={attrs['splits']} is not a number of parts")
    splits = Dim.of(attrs["splits"])
    return [Type("f32", (t, h, splits, d)), Type("f32", (t, h, splits)), kv]


def _appended(
    x: Any, kv: Any, pages: Any, rows: Any, positions: Any, rotation: tuple[Any, ...], scales: Any,
    attrs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """The queries, and the pool with the keys and values of the tokens at `positions` of the device rows `rows`.

    A pool with scales is one of 8-bit floats, which attention reads as they are rounded.
    """
    exists = (rows >= 0) & (positions >= 0)
    slots = row_slots.ref(pages, np.where(exists, rows, -1), positions, page=kv.shape[3])
    q, kv = rope_append.ref(x, kv, slots, *rotation, scales=scales, **attrs)
    return q, kv if scales is None else round_steps(kv, "f8e4m3")


@op(
    f"({_OPERANDS}) -> (y: x[t, heads, d], appended: state kv[p, 2, g, page, d])",
    writes=("kv",), infer=append_type, flops="4*t*heads*d*p*page + 6*t*n",
    bytes="2*p*page*g*d*bytes_kv + t*n*bytes_x + t*heads*d*bytes_x", holds=_HOLDS, example=_EXAMPLE,
)  # fmt: skip
def rope_attention(
    x: Any, kv: Any, pages: Any, rows: Any, positions: Any, cos: Any = None, sin: Any = None, qw: Any = None,
    kw: Any = None, scales: Any = None, *, heads: int, dtype: str, scale: float, eps: float = 0.0,
    interleaved: bool = False, window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """paged_attention of one token per row, after rope_append of the QKV product x [t, n] at the tokens' positions.

    Returns the attention and the pool. Rows are distinct; rows and positions of -1 are padding, whose result is zero.
    """
    rotation = {"heads": heads, "dtype": dtype, "eps": eps, "interleaved": interleaved}
    q, kv = _appended(x, kv, pages, rows, positions, (cos, sin, qw, kw), scales, rotation)
    starts, sizes = np.arange(len(rows) + 1), {"scale": scale, "window": window, "softcap": softcap}
    return paged_attention.ref(q, kv, pages, rows, starts, positions, scales=scales, **sizes), kv


@op(
    f"({_OPERANDS}) -> (partial: f32[t, heads, splits, d], lse: f32[t, heads, splits],"
    " appended: state kv[p, 2, g, page, d])",
    writes=("kv",), infer=_split_type, flops="4*t*heads*d*p*page + 6*t*n",
    bytes="2*p*page*g*d*bytes_kv + t*n*bytes_x + 4*t*heads*splits*d + 4*t*heads*splits", holds=_HOLDS,
    example={**_EXAMPLE, "splits": 2},
)  # fmt: skip
def rope_attention_split(
    x: Any, kv: Any, pages: Any, rows: Any, positions: Any, cos: Any = None, sin: Any = None, qw: Any = None,
    kw: Any = None, scales: Any = None, *, heads: int, dtype: str, scale: float, splits: int, eps: float = 0.0,
    interleaved: bool = False, window: int = 0, softcap: float = 0.0,
) -> Any:  # fmt: skip
    """rope_attention with the pages divided among `splits` parts, as paged_attention_split divides them."""
    rotation = {"heads": heads, "dtype": dtype, "eps": eps, "interleaved": interleaved}
    q, kv = _appended(x, kv, pages, rows, positions, (cos, sin, qw, kw), scales, rotation)
    sizes = {"scale": scale, "window": window, "softcap": softcap, "splits": splits}
    return *paged_attention_split.ref(q, kv, pages, rows, positions, scales=scales, **sizes), kv


OPS = tuple(v for v in globals().values() if isinstance(v, OpDef) and v.name.startswith("rope_attention"))
