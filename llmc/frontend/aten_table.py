"""The aten table: maps each supported aten overload, and the ops of `traced_ops`, to the function that lowers it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmc.frontend import aten_math, aten_shape
from llmc.frontend.aten_math import Lowering
from llmc.frontend.lowering import IR_DTYPE, Call
from llmc.ir.dim import Dim, product
from llmc.ir.graph import Value


def causal_conv(c: Call, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Lower a convolution of [1, T, C] to the op's [T, C]."""
    extra = () if bias is None else (bias,)
    return c.reshape(c.b.causal_conv(_without_batch(c, x), weight, c.positions, *extra, layer=0), c.shape)


def linear_recurrence(
    c: Call, q: Value, k: Value, v: Value, decay: Value, beta: Value | None = None, scale: float = 1.0, eps: float = 0.0
) -> Value:
    """Lower a recurrence of [1, T, H, D]; queries and keys that are repeated for each head are read once.

    `decay` is [1, T, H], or [1, T, H, D] with a factor for each channel of a key.
    """
    unrepeated_q, unrepeated_k = _unrepeated(c, q), _unrepeated(c, k)
    if unrepeated_q.type.shape[2] == unrepeated_k.type.shape[2]:
        q, k = unrepeated_q, unrepeated_k
    q, k, v, decay = (_without_batch(c, x) for x in (q, k, v, decay))
    extra = () if beta is None else (_without_batch(c, beta),)
    if decay.type.rank == 3:
        tokens, heads, size = decay.type.shape
        decay = c.reshape(decay, (tokens, heads * size))
    q, k = _scaled(c, q, scale, eps), _scaled(c, k, 1.0, eps)
    return c.reshape(c.b.linear_recurrence(q, k, v, decay, c.positions, *extra, layer=0), c.shape)


def _without_batch(c: Call, x: Value) -> Value:
    """Reshape [1, ...] to [...]."""
    return c.reshape(x, x.type.shape[1:])


def _unrepeated(c: Call, x: Value) -> Value:
    """Return the heads [1, T, G, D] if x [1, T, H, D] repeats each of them H / G times in a row, else x."""
    if x.node is None or x.node.op.name != "reshape" or x.node.operands[0].type.rank != 5:
        return x
    inner = x.node.operands[0].node
    if inner is None or inner.op.name != "broadcast":
        return x
    heads, (batch, t, g, n, d) = inner.operands[0], inner.result.type.shape
    repeats = heads.type.shape == (batch, t, g, Dim.of(1), d) and x.type.shape == (batch, t, g * n, d)
    return c.reshape(heads, (batch, t, g, d)) if repeats else x


def _scaled(c: Call, x: Value, scale: float, eps: float) -> Value:
    """Multiply x by `scale` and, if eps > 0, divide it by its L2 norm; compute in f32 and round once."""
    if scale == 1.0 and not eps:
        return x
    wide = c.cast(x, "f32")
    if eps:
        squares = c.b.sum(c.b.mul(wide, wide), axis=2, keepdim=True)
        wide = c.b.mul(wide, c.b.rsqrt(c.b.add(squares, c.b.constant(eps, "f32"))))
    if scale != 1.0:
        wide = c.b.mul(wide, c.b.constant(scale, "f32"))
    return c.cast(wide, x.type.dtype)


def attention(
    c: Call, q: Value, k: Value, v: Value, layer: int, scale: float, window: int, softcap: float, sinks: Any = None,
    causal: bool = True,
) -> Value:  # fmt: skip
    """Lower attention of [1, H, T, D] to the op's [T, H, D], and reshape the result to [1, T, H, E].

    If queries and keys are narrower than values they are padded with zeros, because KV pages store keys and values with
    the width of a key.
    """

    missing = (v.type.shape[-1] - k.type.shape[-1]).const or 0

    def padded(x: Value) -> Value:
        if missing <= 0:
            return x
        zeros = c.broadcast(c.b.constant(0.0, x.type.dtype), (*x.type.shape[:-1], Dim.of(missing)))
        return c.b.concat(x, zeros, axis=2)

    extra = () if sinks is None else (sinks,)
    out = c.b.attention(
        padded(_tokens_first(c, q)),
        padded(_tokens_first(c, k)),
        _tokens_first(c, v),
        c.positions,
        *extra,
        layer=layer,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return c.reshape(out, c.shape)


def alibi_attention(c: Call, q: Value, k: Value, v: Value, slopes: Value, layer: int, scale: float) -> Value:
    """Lower attention with a bias by distance, of [1, H, T, D], to the op's [T, H, D]."""
    q, k, v = (_tokens_first(c, x) for x in (q, k, v))
    return c.reshape(c.b.alibi_attention(q, k, v, c.positions, slopes, layer=layer, scale=scale), c.shape)


def _tokens_first(c: Call, x: Value) -> Value:
    """Transpose [1, H, T, D] to [T, H, D]."""
    return _without_batch(c, c.transpose(x, (0, 2, 1, 3)))


def moe(
    c: Call, x: Value, idx: Value, weights: Value, gate_up: Value, down: Value, body: str, *biases: Value | None
) -> Value:
    """Lower a mixture of experts; biases that are None are left out."""
    return c.b.moe(x, idx, weights, gate_up, down, *(b for b in biases if b is not None), body=body)


def rope_tables(
    c: Call, inv_freq: Value, positions: Value, scaling: float, layout: str, dtype: Any
) -> tuple[Value, ...]:
    """Lower rotary tables: compute them at half width, then widen them to the model's layout."""
    flat = c.reshape(positions, (product(positions.type.shape),))
    tables = c.b.rope_tables(inv_freq, flat, scaling=scaling, dtype=IR_DTYPE[dtype])
    return tuple(c.reshape(_widen(c, x, layout), c.shape) for x in tables)


def _widen(c: Call, x: Value, layout: str) -> Value:
    """Widen a table [t, h] to [t, 2 h] ("twice": halves) or [t, h, 2] ("pairs"); other layouts keep it."""
    if layout == "twice":
        return c.b.concat(x, x, axis=1)
    if layout == "pairs":
        column = c.reshape(x, (*x.type.shape, Dim.of(1)))
        return c.broadcast(column, (*x.type.shape, Dim.of(2)))
    return x


def complex_(c: Call, real: Value, imaginary: Value) -> Value:
    """Lower torch.complex: real and imaginary parts become the last axis."""
    shape = (*real.type.shape, Dim.of(1))
    return c.b.concat(c.reshape(real, shape), c.reshape(imaginary, shape), axis=len(shape) - 1)


def complex_mul(c: Call, x: Value, y: Value) -> Value:
    """Lower a complex product as a rotation of pairs: (a + ib)(d + ie) = (ad - be) + i(bd + ae).

    The result is x * d + swapped * e, in which `swapped` has the pairs (-b, a). Models write rotations of pairs in this
    form, which the pass fuse-rope recognizes.
    """
    *outer, h, two = c.shape
    width, last = h * two, len(outer)
    flat = (*outer, width)

    def factor(part: int) -> Value:
        """Return the real (0) or imaginary (1) part of y, repeated for both numbers of a pair: [..., 2 * h]."""
        return c.reshape(_twice(c, c.part(y, y.type.rank - 1, part, part + 1)), (*y.type.shape[:-2], width))

    d, e = factor(0), factor(1)
    x = c.reshape(c.broadcast(x, c.shape), flat)
    a = c.b.slice(x, axis=last, start=Dim.of(0), stop=width, step=2)
    b = c.b.slice(x, axis=last, start=Dim.of(1), stop=width, step=2)
    column = (*outer, h, Dim.of(1))
    swapped = c.b.concat(c.reshape(c.b.neg(b), column), c.reshape(a, column), axis=last + 1)
    return c.reshape(c.b.add(c.b.mul(x, d), c.b.mul(c.reshape(swapped, flat), e)), c.shape)


def _twice(c: Call, x: Value) -> Value:
    return c.broadcast(x, (*x.type.shape[:-1], Dim.of(2)))


TABLE: Mapping[str, Lowering] = MappingProxyType(
    {
        **aten_math.LOWERINGS,
        **aten_shape.LOWERINGS,
        "aten.view_as_real.default": aten_shape.same,
        "llmc.alibi_attention.default": alibi_attention,
        "llmc.attention.default": attention,
        "llmc.causal_conv.default": causal_conv,
        "llmc.linear_recurrence.default": linear_recurrence,
        "llmc.moe.default": moe,
        "llmc.rope_tables.default": rope_tables,
    }
)

# Overloads with a complex result. They need entries of their own because a complex tensor has one more axis in IR, so
# axes counted from the end differ.
COMPLEX: Mapping[str, Lowering] = MappingProxyType(
    {
        "aten.complex.default": complex_,
        "aten.view_as_complex.default": aten_shape.same,
        "aten.mul.Tensor": complex_mul,
        "aten.unsqueeze.default": aten_shape.view,
        **dict.fromkeys(("aten.to.device", "aten.to.dtype_layout", "aten.to.dtype"), aten_shape.same),
    }
)
