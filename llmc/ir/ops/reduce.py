"""Reductions, softmax, cumulative sums and top-k along one axis."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.dim import Dim
from llmc.ir.opdef import op
from llmc.ir.ops.common import NUMPY, axis_of
from llmc.ir.scalar import E, arg, call, evaluate, parse_expr, walk
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


def _reduced(dtype: str = "") -> Any:
    def infer(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
        x = env["x"]
        a = axis_of(x.rank, attrs["axis"])
        middle = (Dim.of(1),) if attrs["keepdim"] else ()
        return [Type(dtype or x.dtype, x.shape[:a] + middle + x.shape[a + 1 :])]

    return infer


def _same(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    axis_of(env["x"].rank, attrs["axis"])
    return [Type(env["x"].dtype, env["x"].shape)]


_EXAMPLE: Mapping[str, Any] = MappingProxyType({"*s": (3, 4, 5), "axis": -2})


@op("(x: t[*s]) -> x[...]", infer=_reduced(), flops="s", oracle="torch.sum", example=_EXAMPLE)
def sum_(x: Any, *, axis: int, keepdim: bool = False) -> Any:
    """Sum over one axis."""
    return np.sum(x, axis, keepdims=keepdim)


@op("(x: f[*s]) -> x[...]", infer=_reduced(), flops="s", oracle="torch.mean", example=_EXAMPLE)
def mean(x: Any, *, axis: int, keepdim: bool = False) -> Any:
    """Mean over one axis."""
    return np.mean(x, axis, keepdims=keepdim)


@op("(x: t[*s]) -> x[...]", infer=_reduced(), flops="s", oracle="torch.amax", example=_EXAMPLE)
def amax(x: Any, *, axis: int, keepdim: bool = False) -> Any:
    """Maximum over one axis."""
    return np.max(x, axis, keepdims=keepdim)


@op("(x: t[*s]) -> x[...]", infer=_reduced(), flops="s", oracle="torch.amin", example=_EXAMPLE)
def amin(x: Any, *, axis: int, keepdim: bool = False) -> Any:
    """Minimum over one axis."""
    return np.min(x, axis, keepdims=keepdim)


@op("(x: t[*s]) -> i64[...]", infer=_reduced("i64"), flops="s", oracle="torch.argmax", example=_EXAMPLE)
def argmax(x: Any, *, axis: int, keepdim: bool = False) -> Any:
    """Index of the maximum over one axis; the first one among equals."""
    return np.argmax(x, axis, keepdims=keepdim)


def _softmax_rows(attrs: Mapping[str, Any]) -> E:
    e = call("exp", arg(0) - call("row_max", arg(0)))
    return e / call("row_sum", e)


@op(
    "(x: f[*s]) -> x[*s]", infer=_same, flops="5*s", oracle="torch.softmax", example=_EXAMPLE,
    scalar=lambda attrs: _softmax_rows(attrs) if attrs["axis"] == -1 else None,
)  # fmt: skip
def softmax(x: Any, *, axis: int = -1) -> Any:
    """exp(x - max) / sum over one axis."""
    e = np.exp(x - np.max(x, axis, keepdims=True))
    return e / np.sum(e, axis, keepdims=True)


@op("(x: t[*s]) -> x[*s]", infer=_same, flops="s", oracle="torch.cumsum", example=_EXAMPLE)
def cumsum(x: Any, *, axis: int) -> Any:
    """Cumulative sum along one axis."""
    return np.cumsum(x, axis)


def _topk_types(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, k = env["x"], attrs["k"]
    size = x.shape[-1].const
    if k < 1 or (size is not None and k > size):
        raise Mismatch(f"k = {k} must be between 1 and the size of the last axis, {x.shape[-1]}")
    shape = (*x.shape[:-1], Dim.of(k))
    return [Type(x.dtype, shape), Type("i64", shape)]


@op(
    "(x: f[*b, n]) -> (values: x[*b, k], indices: i64[*b, k])", infer=_topk_types, flops="b*n",
    oracle="torch.topk", example={"*b": (3,), "n": 9, "k": 4},
)  # fmt: skip
def topk(x: Any, *, k: int) -> Any:
    """The k largest elements along the last axis in descending order; the lower index comes first among equals."""
    idx = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, idx, -1), idx


def row_expr(text: str) -> E:
    """Parse an expression of one operand a0 and of its rows; raises Mismatch if it is anything else."""
    try:
        e = parse_expr(text)
    except ValueError as error:
        raise Mismatch(str(error)) from None
    if rejected := [x for x in walk(e) if x.fn == "arg" and x.args[0] > 0]:
        raise Mismatch(f"{text!r} uses {rejected[0]}; the only operand is a0")
    return e


def _topk_map_types(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    row_expr(attrs["before"]), row_expr(attrs["after"])
    values, indices = _topk_types(env, attrs)
    return [Type(attrs["dtype"] or values.dtype, values.shape), Type("i32", indices.shape)]


@op(
    "(x: f[*b, n]) -> (values: x[*b, k], indices: i32[*b, k])", infer=_topk_map_types, flops="6*b*n",
    example={
        "*b": (3,), "n": 9, "k": 4, "before": "div(exp(sub(a0, row_max(a0))), row_sum(exp(sub(a0, row_max(a0)))))",
        "after": "div(a0, row_sum(a0))",
    },
)  # fmt: skip
def topk_map(x: Any, *, k: int, before: str = "a0", after: str = "a0", dtype: str = "") -> Any:
    """The k largest of `before` of each row in descending order, `after` of them as a row, and their indices.

    before, after: expressions of a0 and of reductions of its row. The lower index comes first among equals.
    """
    with np.errstate(all="ignore"):
        values, indices = topk.ref(np.broadcast_to(evaluate(row_expr(before), NUMPY, [x]), x.shape), k=k)
        return np.broadcast_to(evaluate(row_expr(after), NUMPY, [values]), values.shape), indices
