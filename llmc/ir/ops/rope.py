"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): angle tables, the rotation, and a fused op.

The fused op, `rope_append`, covers everything between a layer's QKV product and its attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import op
from llmc.ir.ops import norm, state
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


@op(
    "(inv_freq: f[h], pos: i[t]) -> (cos: dtype[t, h], sin: dtype[t, h])", flops="4*t*h",
    holds={"inv_freq": contents.probability, "pos": contents.positions},
    example={"h": 4, "t": 6, "scaling": 1.0, "dtype": "f32"},
)  # fmt: skip
def rope_tables(inv_freq: Any, pos: Any, *, scaling: float, dtype: str) -> Any:
    """cos and sin of pos * inv_freq (radians, one column per frequency), times an attention scaling factor (YaRN)."""
    angle = pos[:, None].astype(inv_freq.dtype) * inv_freq
    return np.cos(angle) * scaling, np.sin(angle) * scaling


def _rope_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    d, h = env["d"].const, env["h"].const
    if d is None or h is None or 2 * h > d:
        raise Mismatch(f"{env['h']} frequencies rotate {env['h'] * 2} elements, but a head has {env['d']}")
    return [env["x"]]


@op(
    "(x: f[t, n, d], cos: f[t, h], sin: f[t, h]) -> x[t, n, d]",
    infer=_rope_type,
    flops="3*t*n*d",
    holds={"cos": contents.cosine, "sin": contents.sine},
    example={"t": 5, "n": 2, "d": 8, "h": 3},
)
def rope(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
    """Rotate the first 2h elements of every head by the position's angles; the rest pass through.

    The pairs are (i, i + h), or (2i, 2i + 1) if interleaved.
    """
    h = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    out = np.array(x)
    a, b = (
        (np.s_[..., 0 : 2 * h : 2], np.s_[..., 1 : 2 * h : 2])
        if interleaved
        else (np.s_[..., :h], np.s_[..., h : 2 * h])
    )
    out[a] = x[a] * c - x[b] * s
    out[b] = x[b] * c + x[a] * s
    return out


def _append_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, kv, heads = env["x"], env["kv"], attrs["heads"]
    expected = env["d"] * (env["g"] * 2 + heads)
    if expected != env["n"]:
        raise Mismatch(
            f"{heads} query and {env['g']} KV heads of {env['d']} elements need {expected} columns, not {env['n']}"
        )
    if ("cos" in env) != ("sin" in env) or ("qw" in env) != ("kw" in env):
        raise Mismatch("pass both or neither of cos and sin, and of qw and kw")
    if "cos" in env:
        _rope_type(env | {"h": env["r"]}, {})
    return [x.with_shape(x.shape[0], heads, env["d"]), kv]


@op(
    "(x: f[t, n], kv: state f[p, 2, g, page, d], slots: i32[t], scales?kv: f32[2*g], cos?: f[t, r], sin?: f[t, r],"
    " qw?: f[d], kw?: f[d])"
    " -> (q: x[t, heads, d], appended: state kv[p, 2, g, page, d])",
    writes=("kv",), infer=_append_type, flops="6*t*n",
    holds={
        "kv": contents.kv_pool, "slots": contents.slots, "scales": contents.positive, "cos": contents.cosine,
        "sin": contents.sine,
    },
    example={
        "t": 5, "n": 64, "p": 4, "g": 2, "page": 3, "d": 8, "r": 3, "heads": 4, "dtype": "f32", "eps": 1e-5,
    },
    bytes="t*n*bytes_x + t*heads*d*bytes_x + 2*t*g*d*bytes_kv + 4*t",
)  # fmt: skip
def rope_append(
    x: Any, kv: Any, slots: Any, cos: Any = None, sin: Any = None, qw: Any = None, kw: Any = None, scales: Any = None,
    largest: float = 0.0, *, heads: int, dtype: str, eps: float = 0.0, interleaved: bool = False,
) -> Any:  # fmt: skip
    """Normalize and rotate the queries and keys of a QKV product, and append keys and values to the KV pool.

    Returns the queries. x holds the query heads, then the key heads, then the value heads. The norm is rms_norm with
    gains qw and kw, the rotation is rope, the append is kv_append; norm and rotation are skipped if their operands are
    absent. Every step rounds to `dtype`, as the separate ops would.
    """
    g, d = kv.shape[2], kv.shape[4]
    y = np.ascontiguousarray(x.reshape(len(x), -1, d))
    q = y[:, :heads]
    k = y[:, heads : heads + g]
    v = y[:, heads + g :]
    if qw is not None:
        q, k = (_round(norm.rms_norm.ref(part, w, eps=eps), dtype) for part, w in ((q, qw), (k, kw)))
    if cos is not None:
        q, k = (_round(rope.ref(part, cos, sin, interleaved=interleaved), dtype) for part in (q, k))
    return q, state.kv_append.ref(kv, k, v, slots, scales, largest)


def _round(x: Any, dtype: str) -> Any:
    """Round as the interpreter rounds an op's result; float64 (exact mode) is not rounded."""
    return x if x.dtype == np.float64 else x.astype(DTYPES[dtype].np).astype(x.dtype)
