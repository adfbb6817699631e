"""Lowerings of the ops of recurrent layers in a trace."""

from __future__ import annotations

from llmc.frontend.lowering import Call
from llmc.ir.dim import Dim
from llmc.ir.graph import Value


def causal_conv(c: Call, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """Lower a convolution of [1, T, C] to the op's [T, C]."""
    extra = () if bias is None else (bias,)
    return c.reshape(c.b.causal_conv(c.reshape(x, x.type.shape[1:]), weight, c.positions, *extra, layer=0), c.shape)


def linear_recurrence(
    c: Call, q: Value, k: Value, v: Value, decay: Value, beta: Value | None = None, scale: float = 1.0, eps: float = 0.0
) -> Value:
    """Lower a recurrence of [1, T, H, D]; queries and keys that are repeated for each head are read once.

    `decay` is [1, T, H], or [1, T, H, D] with a factor for each channel of a key.
    """
    unrepeated = [_unrepeated(c, x) for x in (q, k)]
    if unrepeated[0].type.shape[2] == unrepeated[1].type.shape[2]:
        q, k = unrepeated
    flat = [c.reshape(x, x.type.shape[1:]) for x in (q, k, v, decay, *(() if beta is None else (beta,)))]
    if flat[3].type.rank == 3:
        tokens, heads, size = flat[3].type.shape
        flat[3] = c.reshape(flat[3], (tokens, heads * size))
    q, k, v, decay = _normal(c, flat[0], scale, eps), _normal(c, flat[1], 1.0, eps), flat[2], flat[3]
    return c.reshape(c.b.linear_recurrence(q, k, v, decay, c.positions, *flat[4:], layer=0), c.shape)


def _unrepeated(c: Call, x: Value) -> Value:
    """[1, T, H, D] that repeats each of G heads H / G times, one after another -> the heads [1, T, G, D]."""
    if x.node is None or x.node.op.name != "reshape" or x.node.operands[0].type.rank != 5:
        return x
    inner = x.node.operands[0].node
    if inner is None or inner.op.name != "broadcast":
        return x
    heads, (batch, t, g, n, d) = inner.operands[0], inner.result.type.shape
    repeats = heads.type.shape == (batch, t, g, Dim.of(1), d) and x.type.shape == (batch, t, g * n, d)
    return c.reshape(heads, (batch, t, g, d)) if repeats else x


def _normal(c: Call, x: Value, scale: float, eps: float) -> Value:
    """Multiply by `scale`, with eps > 0 also by the reciprocal of the length; computed in f32 and rounded once."""
    if scale == 1.0 and not eps:
        return x
    wide = c.cast(x, "f32")
    if eps:
        squares = c.b.sum(c.b.mul(wide, wide), axis=2, keepdim=True)
        wide = c.b.mul(wide, c.b.rsqrt(c.b.add(squares, c.b.constant(eps, "f32"))))
    if scale != 1.0:
        wide = c.b.mul(wide, c.b.constant(scale, "f32"))
    return c.cast(wide, x.type.dtype)
