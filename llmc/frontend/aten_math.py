"""Lowerings of aten ops that compute: pointwise ops, reductions, norms and products.

A lowering is a function of a `Call` and of the arguments of the aten op. It adds nodes with the call's builder, `c.b`,
and returns the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llmc.frontend.lowering import Call, Unsupported, axis_of
from llmc.ir.graph import Value

Lowering = Callable[..., Any]  # (Call, *arguments of the aten op) -> Value, or a tuple of one Value per result


def unary(name: str) -> Lowering:
    """Return the lowering of a pointwise op with one operand."""
    return lambda c, x: getattr(c.b, name)(x)


def binary(name: str) -> Lowering:
    """Return the lowering of a pointwise op with two operands, either of which may be a number."""

    def lower(c: Call, x: Any, y: Any, *, alpha: Any = 1) -> Value:
        like = x if isinstance(x, Value) else y
        x, y = c.value(x, like), c.value(y, like)
        if alpha != 1:
            y = c.b.mul(y, c.value(alpha, y))
        return getattr(c.b, name)(x, y)

    return lower


def logical(name: str) -> Lowering:
    """Return the lowering of a bitwise op; only bool tensors are supported."""

    def lower(c: Call, *xs: Any) -> Value:
        if any(not isinstance(x, Value) or x.type.dtype != "bool" for x in xs):
            raise Unsupported(f"bitwise {name} of anything but bool tensors")
        return getattr(c.b, f"logical_{name}")(*xs)

    return lower


def div(c: Call, x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    """Lower a division. True division of integers is computed in the result's float dtype."""
    like_x = x if isinstance(x, Value) else c.type
    like_y = y if isinstance(y, Value) else c.type
    x, y = c.value(x, like_y), c.value(y, like_x)
    are_integers = {x.type.dtype[0], y.type.dtype[0]} <= {"i", "u", "b"}
    if are_integers:
        float_dtype = c.type.dtype if rounding_mode is None else "f32"
        x, y = c.cast(x, float_dtype), c.cast(y, float_dtype)
    quotient = c.b.div(x, y)
    if rounding_mode is None:
        return quotient
    if rounding_mode == "floor":
        return c.cast(c.b.floor(quotient), c.type.dtype)
    if not are_integers:
        raise Unsupported("div truncating floats")
    return c.cast(quotient, c.type.dtype)  # the cast to integers truncates


def in_float32(lower: Lowering) -> Lowering:
    """Return `lower` computed in float32: an op that becomes several nodes is rounded once, as in torch."""
    return lambda c, x, *args, **kw: c.cast(lower(c, c.cast(x, "f32"), *args, **kw), c.type.dtype)


def expm1(c: Call, x: Value) -> Value:
    """Lower exp(x) - 1 as tanh(x / 2) * (exp(x) + 1), which is accurate near zero."""
    return c.b.mul(c.b.tanh(c.b.mul(x, c.value(0.5, x))), c.b.add(c.b.exp(x), c.value(1.0, x)))


def softplus(c: Call, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    """Lower softplus as max(x, 0) + log(1 + exp(-|x|)), which matches torch on both sides of its threshold."""
    if beta != 1:
        raise Unsupported(f"softplus with beta={beta}")
    tail = c.b.log(c.b.add(c.b.exp(c.b.neg(c.b.abs(x))), c.value(1.0, x)))
    return c.b.add(c.b.relu(x), tail)


def leaky_relu(c: Call, x: Value, slope: float = 0.01) -> Value:
    """Lower leaky_relu: x if x > 0, else slope * x."""
    return c.b.where(c.b.gt(x, c.value(0.0, x)), x, c.b.mul(x, c.value(slope, x)))


def where(c: Call, condition: Value, x: Any, y: Any) -> Value:
    """Lower where; numbers become constants of the result's dtype."""
    return c.b.where(condition, c.value(x, c.type), c.value(y, c.type))


def masked_fill(c: Call, x: Value, mask: Value, value: Any) -> Value:
    """Lower masked_fill with a number."""
    return c.b.where(mask, c.value(value, x), x)


def max_dim(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, ...]:
    """Lower max over one axis to its values and indices."""
    axis = axis_of(x, dim) - x.type.rank
    return c.b.amax(x, axis=axis, keepdim=keepdim), c.b.argmax(x, axis=axis, keepdim=keepdim)


def pow_scalar(c: Call, x: Value, exponent: float) -> Value:
    """Lower a power with a constant exponent, using square, sqrt, rsqrt or reciprocal if possible."""
    named = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent in named:
        return getattr(c.b, named[exponent])(x)
    return x if exponent == 1 else c.b.pow(x, c.value(exponent, x))


def clamp(c: Call, x: Value, low: Any = None, high: Any = None) -> Value:
    """Lower a clamp; a bound of None is ignored."""
    if low is not None:
        x = c.b.maximum(x, c.value(low, x))
    return x if high is None else c.b.minimum(x, c.value(high, x))


def reduce(name: str) -> Lowering:
    """Return the lowering of a reduction over one axis, several axes, or all axes if none are named."""

    def lower(c: Call, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
        if dtype is not None:
            x = c.cast(x, c.type.dtype)
        if isinstance(dim, int):
            dims = [dim]
        else:
            dims = list(dim or range(x.type.rank))
        for axis in sorted({axis_of(x, d) for d in dims}, reverse=True):
            x = getattr(c.b, name)(x, axis=axis - x.type.rank, keepdim=keepdim)
        return x

    return lower


def vector_norm(
    c: Call, x: Value, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """Lower a norm of order 1 or 2: the sum of magnitudes, or the root of the sum of squares."""
    if ord not in (1, 2):
        raise Unsupported(f"a vector norm of order {ord}")
    total = reduce("sum")(c, c.b.abs(x) if ord == 1 else c.b.square(x), dim, keepdim)
    return total if ord == 1 else c.b.sqrt(total)


def along(name: str) -> Lowering:
    """Return the lowering of an op along one axis that, like torch, first casts to the result's dtype."""
    return lambda c, x, dim, dtype=None: getattr(c.b, name)(c.cast(x, c.type.dtype), axis=axis_of(x, dim) - x.type.rank)


def topk(c: Call, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, ...]:
    """Lower topk; only the largest elements of the last axis are supported."""
    if axis_of(x, dim) != x.type.rank - 1 or not largest:
        raise Unsupported("topk other than the largest of the last axis")
    values, index = c.b.topk(x, k=k)
    return values, index


def linear(c: Call, x: Value, w: Value, bias: Value | None = None) -> Value:
    """Lower a linear layer; a bias is added by a separate op."""
    y = c.b.linear(x, w)
    return y if bias is None else c.b.add(y, bias)


def addmm(c: Call, bias: Value, x: Value, w: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """Lower bias + x @ w (GPT-2's Conv1D, whose weight is stored as [in, out])."""
    if beta != 1 or alpha != 1:
        raise Unsupported(f"addmm with beta={beta}, alpha={alpha}")
    return c.b.add(mm(c, x, w), bias)


def mm(c: Call, x: Value, w: Value) -> Value:
    """Lower a matrix product; if the right operand is a weight, as `linear` with the weight transposed."""
    return c.b.linear(x, c.transpose(w, (1, 0))) if w.weight else c.b.matmul(x, w)


def matmul(c: Call, x: Value, y: Value) -> Value:
    """Lower matmul: with a rank-2 operand as `linear`, otherwise as a batched product of equal ranks."""
    if y.type.rank == 2 and x.type.rank >= 2:
        return c.b.linear(x, c.transpose(y, (1, 0)))
    if x.type.rank == 2 and y.type.rank == 3:  # a weight times columns
        return c.transpose(c.b.linear(c.transpose(y, (0, 2, 1)), x), (0, 2, 1))
    if x.type.rank != y.type.rank or x.type.rank < 3:
        raise Unsupported(f"matmul of ranks {x.type.rank} and {y.type.rank}")
    batch = c.shape[:-2]
    return c.b.matmul(c.broadcast(x, (*batch, *x.type.shape[-2:])), c.broadcast(y, (*batch, *y.type.shape[-2:])))


def layer_norm(
    c: Call, x: Value, shape: Any, w: Value | None = None, b: Value | None = None, eps: float = 1e-5, *_: Any
) -> Value:
    """Lower a layer norm; a missing gain becomes ones, a missing bias zeros."""
    return c.b.layer_norm(x, _filled(c, x, shape, w, 1.0), _filled(c, x, shape, b, 0.0), eps=eps)


def rms_norm(c: Call, x: Value, shape: Any, w: Value | None = None, eps: float | None = None) -> Value:
    """Lower an RMS norm; `eps` must be given."""
    if eps is None:
        raise Unsupported("rms_norm without eps")
    return c.b.rms_norm(x, _filled(c, x, shape, w, 1.0), eps=eps)


def _filled(c: Call, x: Value, shape: Any, w: Value | None, value: float) -> Value:
    if len(shape) != 1:
        raise Unsupported(f"a norm over {len(shape)} axes")
    return w if w is not None else c.broadcast(c.b.constant(value, x.type.dtype), x.type.shape[-1:])


_UNARY = (
    "abs", "cos", "erf", "exp", "exp2", "floor", "log", "logical_not", "neg", "reciprocal", "relu", "rsqrt",
    "sigmoid", "silu", "sin", "sqrt", "square", "tanh",
)  # fmt: skip
_GELU = MappingProxyType({"none": "gelu", "tanh": "gelu_tanh"})
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")

LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        **{f"aten.{n}.default": unary(n) for n in _UNARY},
        **{f"aten.{n}.{kind}": binary(n) for n in ("add", "sub", "mul") for kind in ("Tensor", "Scalar")},
        **{f"aten.{n}.Tensor": binary(op) for n, op in (("multiply", "mul"), ("subtract", "sub"))},
        **{f"aten.{n}.Tensor": div for n in ("divide", "true_divide")},
        **{f"aten.{n}.{kind}": binary(n) for n in _COMPARE for kind in ("Tensor", "Scalar")},
        **{f"aten.{n}.default": binary(n) for n in ("maximum", "minimum", "logical_and", "logical_or")},
        **{f"aten.div.{n}": div for n in ("Tensor", "Scalar", "Tensor_mode")},
        **{f"aten.{n}.Tensor": logical("and") for n in ("bitwise_and", "__and__")},
        **{f"aten.{n}.Tensor": logical("or") for n in ("bitwise_or", "__or__")},
        "aten.bitwise_not.default": logical("not"),
        "aten.rsub.Scalar": lambda c, x, y, alpha=1: binary("sub")(c, y, x, alpha=alpha),
        "aten.softplus.default": in_float32(softplus),
        "aten.expm1.default": in_float32(expm1),
        "aten.log1p.default": in_float32(lambda c, x: c.b.log(c.b.add(x, c.value(1.0, x)))),
        "aten.ceil.default": lambda c, x: c.b.neg(c.b.floor(c.b.neg(x))),
        "aten.max.dim": max_dim,
        "aten.pow.Tensor_Scalar": pow_scalar,
        "aten.pow.Tensor_Tensor": binary("pow"),
        "aten.gelu.default": lambda c, x, approximate="none": getattr(c.b, _GELU[approximate])(x),
        **{f"aten.{n}": clamp for n in ("clamp.default", "clamp.Tensor", "clip.default", "clamp_min.default")},
        "aten.hardtanh.default": lambda c, x, low=-1.0, high=1.0: clamp(c, x, low, high),
        "aten.relu6.default": lambda c, x: clamp(c, x, 0.0, 6.0),
        "aten.leaky_relu.default": leaky_relu,
        "aten.min.other": binary("minimum"),
        "aten.max.other": binary("maximum"),
        **{f"aten.where.{n}": where for n in ("self", "ScalarOther", "ScalarSelf", "Scalar")},
        **{f"aten.masked_fill.{n}": masked_fill for n in ("Scalar", "Tensor")},
        "aten.sum.dim_IntList": reduce("sum"),
        "aten.mean.dim": reduce("mean"),
        "aten.linalg_vector_norm.default": vector_norm,
        **{f"aten.{n}.default": reduce(n) for n in ("amax", "amin", "argmax")},
        "aten.softmax.int": along("softmax"),
        "aten.topk.default": topk,
        "aten.cumsum.default": along("cumsum"),
        "aten.linear.default": linear,
        "aten.addmm.default": addmm,
        "aten.mm.default": mm,
        "aten.bmm.default": matmul,
        "aten.matmul.default": matmul,
        "aten.layer_norm.default": layer_norm,
        "aten.rms_norm.default": rms_norm,
    }
)
