"""Algebraic rules for pointwise ops: identities, named activations, constant folding.

A rule changes results by at most the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from llmc.ir.graph import Node, Value
from llmc.ir.opdef import OpDef
from llmc.passes.analysis import const_value, is_pointwise, made_by, rounded_to, same_type
from llmc.passes.rewrite import Build, Match, Pat, Rewrite, Simplify, const, either

p = Pat()


def _replace_by(n: Node, v: Value) -> Build | None:
    """Replace the node by `v` if both have the same type."""
    return (lambda b: v) if same_type(v.type, n.result.type) else None


def _neutral(n: Node) -> Build | None:
    """x*1, x/1, x+0, x-0 -> x."""
    a, c = n.operands
    neutral = 1.0 if n.op.name in ("mul", "div") else 0.0
    if const_value(c) == neutral:
        return _replace_by(n, a)
    if n.op.commutes and const_value(a) == neutral:
        return _replace_by(n, c)
    return None


def _square(n: Node) -> Build | None:
    """x*x -> square(x), for floats."""
    a, c = n.operands
    if a is c and n.result.type.dtype[0] in "fb" and n.result.type.dtype != "bool":
        return lambda b: b.square(a)
    return None


def _power(n: Node) -> Build | None:
    """pow(x, c) with the constant 2, 0.5, -0.5, -1 or 1 -> square(x), sqrt(x), rsqrt(x), reciprocal(x) or x."""
    x, exponent = n.operands[0], const_value(n.operands[1])
    name = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(exponent or 0.0)
    if exponent == 1.0:
        return _replace_by(n, x)
    if name is None or not same_type(x.type, n.result.type):
        return None
    return lambda b: getattr(b, name)(x)


def _divide(n: Node) -> Build | None:
    """a / sqrt(c) -> a * rsqrt(c); a / 2^k -> a * 2^-k, which is exact."""
    a, c = n.operands
    if (root := made_by(c, "sqrt")) and same_type(c.type, root.operands[0].type):
        return lambda b: b.mul(a, b.rsqrt(root.operands[0]))
    value = const_value(c)
    if value and math.isfinite(value) and math.frexp(abs(value))[0] == 0.5 and c.type.rank == 0:
        return lambda b: b.mul(a, b.constant(1 / value, c.type.dtype))
    return None


def _reciprocal(n: Node) -> Build | None:
    """reciprocal(sqrt(x)) -> rsqrt(x)."""
    root = made_by(n.operands[0], "sqrt")
    return (lambda b: b.rsqrt(root.operands[0])) if root else None


def _negated(n: Node) -> Build | None:
    """neg(neg(x)) -> x."""
    inner = made_by(n.operands[0], "neg")
    return _replace_by(n, inner.operands[0]) if inner else None


def _floor_at_zero(n: Node) -> Build | None:
    """maximum(x, 0) -> relu(x), for floats."""
    for x, zero in (n.operands, n.operands[::-1]):
        if const_value(zero) == 0.0 and same_type(x.type, n.result.type) and x.type.dtype[0] in "fb":
            return lambda b: b.relu(x)
    return None


def _constants(n: Node) -> Build | None:
    """Evaluate a pointwise op on rank-0 constants."""
    if not is_pointwise(n) or n.result.type.rank or not n.operands:
        return None
    values = [const_value(v) for v in n.operands]
    if None in values:
        return None
    dtype = n.result.type.dtype
    with np.errstate(all="ignore"):
        result = float(n.op.ref(*(np.float64(v) for v in values)))
    return lambda b: b.constant(rounded_to(result, dtype), dtype)


SIMPLE = (
    Simplify("neutral", ("mul", "div", "add", "sub"), _neutral),
    Simplify("square", ("mul",), _square),
    Simplify("power", ("pow",), _power),
    Simplify("divide", ("div",), _divide),
    Simplify("reciprocal", ("reciprocal",), _reciprocal),
    Simplify("double-negation", ("neg",), _negated),
    Simplify("relu", ("maximum",), _floor_at_zero),
)

_HALF_X = p.mul(p.x, const(0.5))
_CUBE = either(p.pow(p.x, const(3.0)), p.mul(p.x, p.square(p.x)))
_INNER = p.add(p.x, p.mul(_CUBE, const("cubic")))
_TANH = p.add(p.tanh(p.mul(_INNER, const("scale"))), const(1.0))
_ERF = p.add(p.erf(either(p.mul(p.x, const("scale")), p.div(p.x, const("root")))), const(1.0))


def _is_gelu_tanh(m: Match) -> str | None:
    """Return None if the constants are those of gelu's approximation by tanh, else the reason."""
    if abs(m["cubic"] - 0.044715) < 1e-4 and abs(m["scale"] - math.sqrt(2 / math.pi)) < 1e-3:
        return _like_x(m)
    return f"its constants {m['cubic']:g} and {m['scale']:g} are not those of gelu"


def _is_gelu(m: Match) -> str | None:
    """Return None if the constant is that of gelu, else the reason."""
    scale = m.get("scale") or 1 / m["root"]
    return _like_x(m) if abs(scale - math.sqrt(0.5)) < 1e-3 else f"its constant {scale:g} is not that of gelu"


def _like_x(m: Match) -> str | None:
    """Return None if the result has the type of x, else the reason."""
    same = same_type(m["x"].type, m.root.result.type)
    return None if same else f"its result is {m.root.result.type}, its operand {m['x'].type}"


ACTIVATIONS = (
    Rewrite("silu", p.mul(p.x, p.sigmoid(p.x)), lambda b, m: b.silu(m["x"]), _like_x, near=2),
    *(
        Rewrite("gelu-tanh", form, lambda b, m: b.gelu_tanh(m["x"]), _is_gelu_tanh, near=6)
        for form in (p.mul(_HALF_X, _TANH), p.mul(p.mul(p.x, _TANH), const(0.5)))
    ),
    *(
        Rewrite("gelu", form, lambda b, m: b.gelu(m["x"]), _is_gelu, near=4)
        for form in (p.mul(_HALF_X, _ERF), p.mul(p.mul(p.x, _ERF), const(0.5)))
    ),
)


def constant_rule(opset: Mapping[str, OpDef]) -> Simplify:
    """Return the constant folding rule for all pointwise ops of the op set."""
    return Simplify("constants", pointwise_names(opset), _constants)


def pointwise_names(opset: Mapping[str, OpDef]) -> tuple[str, ...]:
    """Return the names of all ops with a scalar expression."""
    return tuple(name for name, o in opset.items() if o.scalar is not None)


__all__ = ["ACTIVATIONS", "SIMPLE", "constant_rule", "pointwise_names"]
