"""Helpers of the op declarations: broadcasting, promotion, axes, and numpy functions for the scalar primitives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES, promote
from llmc.ir.scalar import E
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(np.asarray(x).dtype)


def _sigmoid(x: Any) -> Any:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


NUMPY: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "neg": np.negative, "abs": np.abs, "floor": np.floor, "exp": np.exp, "exp2": np.exp2, "log": np.log,
        "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
        "erf": _erf, "sigmoid": _sigmoid, "not": np.logical_not,
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
        "pow": np.power, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
        "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or, "select": np.where,
        "row_sum": lambda x: np.sum(x, -1, keepdims=True), "row_mean": lambda x: np.mean(x, -1, keepdims=True),
        "row_max": lambda x: np.max(x, -1, keepdims=True),
    }
)  # fmt: skip


def broadcast_shapes(shapes: Sequence[Sequence[Dim]]) -> tuple[Dim, ...]:
    """Broadcast shapes by numpy's rule: trailing axes are equal, or one of them is 1. Raises Mismatch."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Dim] = []
    for i in range(rank):
        size = Dim.of(1)
        for s in shapes:
            d = s[len(s) - rank + i] if len(s) - rank + i >= 0 else Dim.of(1)
            if d.const == 1 or d == size:
                continue
            if size.const != 1:
                raise Mismatch(f"sizes {size} and {d} do not broadcast")
            size = d
        out.append(size)
    return tuple(out)


def promoted(types: Sequence[Type]) -> str:
    """Promote dtypes as torch does: among operands of the highest kind, those with axes override scalars."""
    kinds = {t.dtype: "bif".index(DTYPES[t.dtype].kind) for t in types}
    top = max(kinds.values())
    best = [t for t in types if kinds[t.dtype] == top]
    ranked = [t for t in best if t.rank] or best
    dtype = ranked[0].dtype
    for t in ranked[1:]:
        dtype = promote(dtype, t.dtype)
    return dtype


def axis_of(rank: int, axis: int) -> int:
    """Normalize a possibly negative axis; raises Mismatch if it is out of range."""
    if not -rank <= axis < rank:
        raise Mismatch(f"axis {axis} of a rank-{rank} value")
    return axis % rank


def expr_shape(e: E, shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Return the shape of an expression over broadcast operands. A row reduction leaves a last axis of size 1."""
    if e.fn == "arg":
        if e.args[0] >= len(shapes):
            raise Mismatch(f"the body reads a{e.args[0]}, but there are {len(shapes)} operands")
        return shapes[e.args[0]]
    if e.fn == "const":
        return ()
    shape = broadcast_shapes([expr_shape(a, shapes) for a in e.args])
    if e.fn.startswith("row_"):
        if not shape:
            raise Mismatch(f"{e.fn} of a rank-0 value")
        return (*shape[:-1], Dim.of(1))
    return shape
