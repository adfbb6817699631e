"""Pointwise ops, each declared by its scalar expression; casts, constants, broadcasts and fused groups.

Shapes broadcast as in numpy, and dtypes promote as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.contents import Content, positive
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import OpDef, Shape, Strs, op
from llmc.ir.ops.common import NUMPY, broadcast_shapes, expr_shape, promoted
from llmc.ir.scalar import call, evaluate, flops, parse_expr, trace
from llmc.ir.signature import Mismatch, parse_signature
from llmc.ir.types import Type


def pointwise(
    name: str,
    fn: Any,
    doc: str,
    kinds: str = "fff",
    out: str = "",
    commutes: bool = False,
    oracle: str | None = None,
    holds: Mapping[str, Content] = MappingProxyType({}),
    example: Mapping[str, Any] = MappingProxyType({}),
) -> OpDef:
    """Declare a pointwise op by a Python function of scalar expressions.

    kinds: the dtype class of each operand. out: "bool", or "" for the promoted dtype.
    """
    arity = fn.__code__.co_argcount
    e = trace(fn, arity)
    names = "abc"[:arity]
    text = "(" + ", ".join(f"{n}: {kinds[i]}[*{n}]" for i, n in enumerate(names)) + f") -> {out or 'a'}[*a]"
    operands, results = parse_signature(text)

    def infer(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
        types = [env[n] for n in names]
        branches = types[1:] if name == "where" else types
        return [Type(out or promoted(branches), broadcast_shapes([t.shape for t in types]))]

    def ref(*xs: Any) -> Any:
        with np.errstate(all="ignore"):
            return evaluate(e, NUMPY, xs)

    return OpDef(
        name, operands, results, {}, ref, flops=f"{max(1, flops(e))}*out", commutes=commutes, scalar=lambda attrs: e,
        oracle=oracle, infer=infer, holds=holds, example=example, doc=doc, signature=text,
    )  # fmt: skip


def _unary(name: str, doc: str, **kw: Any) -> OpDef:
    return pointwise(name, lambda a: call(name, a), doc, oracle=f"torch.{name}", **kw)


def _compare(name: str, sign: str) -> OpDef:
    return pointwise(name, lambda a, b: call(name, a, b), f"a {sign} b", "tt", "bool", oracle=f"torch.{name}")


_POSITIVE: Mapping[str, Content] = MappingProxyType({"a": positive})


_half_erf = lambda a: 0.5 * a * (1 + call("erf", a * math.sqrt(0.5)))  # noqa: E731
_gelu_tanh = lambda a: 0.5 * a * (1 + call("tanh", math.sqrt(2 / math.pi) * (a + 0.044715 * a * a * a)))  # noqa: E731

add = pointwise("add", lambda a, b: a + b, "a + b", "tt", commutes=True, oracle="torch.add")
sub = pointwise("sub", lambda a, b: a - b, "a - b", "tt", oracle="torch.sub")
mul = pointwise("mul", lambda a, b: a * b, "a * b", "tt", commutes=True, oracle="torch.mul")
div = pointwise("div", lambda a, b: a / b, "a / b", oracle="torch.div")
pow_ = pointwise("pow", lambda a, b: call("pow", a, b), "a to the power b", oracle="torch.pow", holds=_POSITIVE)
maximum = pointwise(
    "maximum", lambda a, b: call("max", a, b), "the larger", "tt", commutes=True, oracle="torch.maximum"
)
minimum = pointwise(
    "minimum", lambda a, b: call("min", a, b), "the smaller", "tt", commutes=True, oracle="torch.minimum"
)
neg = _unary("neg", "-a", kinds="t")
abs_ = _unary("abs", "|a|", kinds="t")
floor = _unary("floor", "the largest integer not above a")
exp = _unary("exp", "e to the power a")
exp2 = _unary("exp2", "2 to the power a")
log = _unary("log", "natural logarithm", holds=_POSITIVE)
sqrt = _unary("sqrt", "square root", holds=_POSITIVE)
rsqrt = _unary("rsqrt", "1 / sqrt(a)", holds=_POSITIVE)
sin = _unary("sin", "sine of radians")
cos = _unary("cos", "cosine of radians")
tanh = _unary("tanh", "hyperbolic tangent")
erf = _unary("erf", "error function")
sigmoid = _unary("sigmoid", "1 / (1 + exp(-a))")
square = pointwise("square", lambda a: a * a, "a * a", oracle="torch.square")
reciprocal = pointwise("reciprocal", lambda a: 1 / a, "1 / a", oracle="torch.reciprocal", holds=_POSITIVE)
silu = pointwise("silu", lambda a: a * call("sigmoid", a), "a * sigmoid(a)", oracle="torch.nn.functional.silu")
gelu = pointwise("gelu", _half_erf, "a * Phi(a), exact (by erf)", oracle="torch.nn.functional.gelu")
gelu_tanh = pointwise("gelu_tanh", _gelu_tanh, "gelu by its tanh approximation (GPT-2)")
relu = pointwise("relu", lambda a: call("max", a, 0.0), "max(a, 0)", oracle="torch.relu")
eq, ne = _compare("eq", "=="), _compare("ne", "!=")
lt, le = _compare("lt", "<"), _compare("le", "<=")
gt, ge = _compare("gt", ">"), _compare("ge", ">=")
logical_and = pointwise(
    "logical_and", lambda a, b: call("and", a, b), "a and b", "bb", "bool", True, "torch.logical_and"
)
logical_or = pointwise("logical_or", lambda a, b: call("or", a, b), "a or b", "bb", "bool", True, "torch.logical_or")
logical_not = pointwise("logical_not", lambda a: call("not", a), "not a", "b", "bool", oracle="torch.logical_not")
where = pointwise(
    "where", lambda a, b, c: call("select", a, b, c), "b if a, else c, element by element", "btt", oracle="torch.where",
    example={"*a": (3, 1), "*b": (3, 5), "*c": (3, 5)},
)  # fmt: skip


@op("() -> dtype[]", example={"value": 2.5, "dtype": "f32"})
def constant(*, value: float, dtype: str) -> Any:
    """A rank-0 constant."""
    return np.asarray(value)


@op("(x: t[*s]) -> dtype[*s]", elementwise=True, example={"*s": (3, 5), "dtype": "i32"})
def cast(x: Any, *, dtype: str) -> Any:
    """Convert x to another dtype: floats round to nearest even, float to integer truncates."""
    kind = DTYPES[dtype].kind
    if kind == "b":
        return x != 0
    return np.trunc(x) if kind == "i" and x.dtype.kind == "f" else x


@op("() -> dtype[size]", example={"size": 7, "dtype": "i64"})
def iota(*, size: Dim, dtype: str) -> Any:
    """The integers 0, 1, ..., size - 1."""
    return np.arange(int(size))


def _fused_types(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    shapes = [t.shape for t in env["xs"]]
    if len(attrs["body"]) != len(attrs["dtypes"]):
        raise Mismatch(f"{len(attrs['body'])} bodies but {len(attrs['dtypes'])} dtypes")
    if unknown := [dtype for dtype in attrs["dtypes"] if dtype not in DTYPES]:
        raise Mismatch(f"{unknown[0]!r} is not a dtype")
    bodies = zip(attrs["body"], attrs["dtypes"], strict=True)
    return [Type(dtype, expr_shape(parse_expr(body), shapes)) for body, dtype in bodies]


@op(
    "(xs*: t[...]) -> f32[]", infer=_fused_types, flops="out",
    example={
        "xs": [(3, 5), (3, 5), (5,)], "dtypes": ["f32", "f32"],
        "body": ["add(a0, a1)", "mul(mul(a0, rsqrt(add(row_mean(mul(a0, a0)), 1e-06))), a2)"],
    },
)  # fmt: skip
def fused(*xs: Any, body: Strs, dtypes: Strs) -> Any:
    """A group of pointwise and last-axis reduction ops as one node.

    Each body is a scalar expression over the broadcast operands a0, a1, ...; each gives one result, rounded once to its
    dtype.
    """
    with np.errstate(all="ignore"):
        return tuple(np.asarray(evaluate(parse_expr(b), NUMPY, xs)) for b in body)


def _broadcast_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if broadcast_shapes([env["x"].shape, attrs["shape"]]) != attrs["shape"]:
        raise Mismatch(f"{env['x']} does not broadcast to [{', '.join(map(str, attrs['shape']))}]")
    return [Type(env["x"].dtype, attrs["shape"])]


@op("(x: t[*s]) -> x[...]", infer=_broadcast_type, example={"*s": (3, 1), "shape": [2, 3, 5]})
def broadcast(x: Any, *, shape: Shape) -> Any:
    """Repeat x along new axes and axes of size 1."""
    return np.broadcast_to(x, tuple(map(int, shape)))
