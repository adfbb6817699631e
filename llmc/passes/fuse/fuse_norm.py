"""Recognizes RMS and layer norms that a model writes out in elementary ops, with casts in any place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Graph, Value
from llmc.passes.analysis import core, made_by
from llmc.passes.base import Ctx, Pass
from llmc.passes.rewrite import Match, Op, Pat, Rewrite, apply, const, shared, through

p = Pat()

# Patterns; `through` allows casts. x: the normed value; w: the gain.
# 1 / sqrt(mean(x^2) + eps)
_INVERSE_RMS = p.rsqrt(p.add(through(p.mean(p.square(p.x), axis=p.axis, keepdim=True)), const("eps")))
_RMS_NORMED = p.mul(p.x, through(_INVERSE_RMS))
# sum(x^2) + eps: the squared length of x
_SQUARED_LENGTH = p.add(through(p.sum(p.square(p.x), axis=p.axis, keepdim=True)), const("eps"))
# x - mean(x), and 1 / sqrt(mean((x - mean(x))^2) + eps)
_CENTRED = shared(p.sub(p.x, through(shared(p.mean(p.x, axis=p.axis, keepdim=True)))))
_INVERSE_DEVIATION = p.rsqrt(
    p.add(through(p.mean(p.square(through(_CENTRED)), axis=p.axis2, keepdim=True)), const("eps"))
)
_LAYER_NORMED = p.mul(through(_CENTRED), through(_INVERSE_DEVIATION))


def _weighted(inner: Op) -> Op:
    return p.mul(p.w, through(inner))


def _over_last(m: Match, *weights: str) -> str | None:
    """Return None if the norm is over the last axis and its weights are vectors of that size, else the reason."""
    x = m["x"].type
    for key in ("axis", "axis2"):
        axis = m.get(key)
        if axis is not None and axis % x.rank != x.rank - 1:
            return f"it averages over axis {axis} of {x}, not over the last"
    for w in weights:
        if m[w].type.shape != x.shape[-1:]:
            return f"the operand {w} is {m[w].type}, not a vector of {x.shape[-1]}"
    return None


def _constant_length(m: Match) -> str | None:
    """Return None if the norm is over the last axis, whose size is constant, else the reason."""
    why = _over_last(m)
    return why or (None if m["x"].type.shape[-1].const else f"the last size of {m['x'].type} is not constant")


def _source(x: Value, dtype: str) -> Value:
    """Return the value of the result's dtype that casts convert to x, or x: norms compute in float32 anyway."""
    v = x
    while v.type.dtype != dtype and (n := made_by(v, "cast")) and n.operands[0].type.dtype in FLOATS:
        v = n.operands[0]
    return v if v.type.dtype == dtype else x


def _finish(b: Any, m: Match, y: Value) -> Value:
    """Cast the norm to the dtype of the matched root."""
    dtype = m.root.result.type.dtype
    return y if y.type.dtype == dtype else b.cast(y, dtype=dtype)


def _rms(b: Any, m: Match) -> Value:
    x = _source(m["x"], m.root.result.type.dtype)
    return _finish(b, m, b.rms_norm(x, core(m["w"]), eps=m["eps"]))


def _layer(b: Any, m: Match) -> Value:
    x = _source(m["x"], m.root.result.type.dtype)
    w = core(m["w"])
    zero = b.broadcast(b.constant(0.0, w.type.dtype), shape=w.type.shape)
    return _finish(b, m, b.layer_norm(x, w, zero, eps=m["eps"]))


def _unit(b: Any, m: Match) -> Value:
    """Emit x / sqrt(sum(x^2) + eps) of n elements as an RMS norm with the gain 1 / sqrt(n): sum(x^2) is n mean(x^2)."""
    x = _source(m["x"], m.root.result.type.dtype)
    n = int(x.type.shape[-1])
    return _finish(b, m, b.rms_norm(x, _gain(b, n**-0.5, n), eps=m["eps"] / n))


def _gain(b: Any, value: float, size: int) -> Value:
    return b.broadcast(b.constant(value, "f32"), shape=(size,))


def _scaled(b: Any, m: Match) -> Value:
    size = int(m["x"].type.shape[-1])
    return _finish(b, m, b.rms_norm(m["x"], _gain(b, m["gain"] * m["scale"], size), eps=m["eps"]))


def _bias(b: Any, m: Match) -> Value:
    x = _source(m["x"], m.root.result.type.dtype)
    return _finish(b, m, b.layer_norm(x, m["w"], core(m["bias"]), eps=m["eps"]))


def _rounds_once(m: Match) -> str | None:
    """Return None if cast(norm(x)) equals norm(source), where x is a cast of `source`, else the reason."""
    x, dtype = m["x"], m.root.result.type.dtype
    if _source(x, dtype) is not x:
        return None
    return f"its operand is {x.type.dtype} and its result {dtype}"


RULES = (
    Rewrite("layer-norm", _weighted(_LAYER_NORMED), _layer, lambda m: _over_last(m, "w"), near=4),
    Rewrite("rms-norm", _weighted(_RMS_NORMED), _rms, lambda m: _over_last(m, "w"), near=3),
    Rewrite("unit-norm", p.mul(p.x, through(p.rsqrt(_SQUARED_LENGTH))), _unit, _constant_length, near=3),
    Rewrite(
        "rms-norm-scale",
        p.mul(p.rms_norm(p.x, const("gain"), eps=p.eps), const("scale")),
        _scaled,
        lambda m: None if m.root.result.type.dtype == "f32" else "the norm is rounded before it is scaled",
    ),
    Rewrite(
        "layer-norm-bias",
        p.add(through(p.layer_norm(p.x, p.w, const(0.0), eps=p.eps)), p.bias),
        _bias,
        lambda m: _over_last(m, "bias"),
        near=3,
    ),
    Rewrite(
        "rms-norm-cast",
        p.cast(p.rms_norm(p.x, p.w, eps=p.eps)),
        lambda b, m: b.rms_norm(_source(m["x"], m.root.result.type.dtype), m["w"], eps=m["eps"]),
        _rounds_once,
    ),
    Rewrite(
        "layer-norm-cast",
        p.cast(p.layer_norm(p.x, p.w, p.b, eps=p.eps)),
        lambda b, m: b.layer_norm(_source(m["x"], m.root.result.type.dtype), m["w"], m["b"], eps=m["eps"]),
        _rounds_once,
    ),
)


@dataclass(frozen=True)
class FuseNorm(Pass):
    """Replace norms written in elementary ops by rms_norm and layer_norm, including divisions by the length.

    RMS norms are those of Zhang and Sennrich 2019 (arXiv 1910.07467), layer norms of Ba et al. 2016 (arXiv 1607.06450).
    A gain that is computed from weights remains an expression.
    """

    name: ClassVar[str] = "fuse-norm"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Replace the norms of a graph; return the number of changes."""
        return apply(g, RULES, ctx)
