"""Ops that move or rearrange elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.contents import index
from llmc.ir.dim import Dim, product
from llmc.ir.opdef import Ints, Shape, op
from llmc.ir.ops.common import axis_of
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


def _reshape_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x = env["x"]
    if product(attrs["shape"]) != x.numel:
        raise Mismatch(f"{x} has {x.numel} elements, [{', '.join(map(str, attrs['shape']))}] a different number")
    return [Type(x.dtype, attrs["shape"])]


@op(
    "(x: t[*s]) -> x[...]", infer=_reshape_type, bytes="0",
    example={"*s": (4, 6), "shape": [2, 12]},
)  # fmt: skip
def reshape(x: Any, *, shape: Shape) -> Any:
    """The same elements in row-major order, with another shape."""
    return np.reshape(x, shape)


def _transpose_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, perm = env["x"], attrs["perm"]
    if sorted(perm) != list(range(x.rank)):
        raise Mismatch(f"{list(perm)} does not permute the axes of {x}")
    return [Type(x.dtype, tuple(x.shape[p] for p in perm))]


@op(
    "(x: t[*s]) -> x[...]", infer=_transpose_type, oracle="torch.permute",
    example={"*s": (3, 4, 5), "perm": [2, 0, 1]},
)  # fmt: skip
def transpose(x: Any, *, perm: Ints) -> Any:
    """Permute the axes: axis i of the result is axis perm[i] of x."""
    return np.transpose(x, perm)


def _slice_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x = env["x"]
    a = axis_of(x.rank, attrs["axis"])
    start, stop, step = attrs["start"], attrs["stop"], attrs["step"]
    if step < 1:
        raise Mismatch(f"step {step} must be positive")
    size = x.shape[a].const
    for name, d in (("start", start), ("stop", stop)):
        if d.const is not None and (d.const < 0 or (size is not None and d.const > size)):
            raise Mismatch(f"{name} {d} is outside axis {a} of {x}")
    if start.const is not None and stop.const is not None and start.const > stop.const:
        raise Mismatch(f"start {start} is after stop {stop}")
    ends = [d for d in (start, stop) if d != 0 and d != x.shape[a]]
    if not ((step == 1 or x.can_cut(a, 1)) and all(x.can_cut(a, d) for d in ends)):
        raise Mismatch(f"{x} cannot be cut inside of a block")
    return [x.with_shape(*x.shape[:a], (stop - start).ceildiv(step), *x.shape[a + 1 :])]


@op(
    "(x: tq[*s]) -> x[...]", infer=_slice_type, bytes="2*out*bytes_x",
    example={"*s": (3, 9), "axis": 1, "start": 1, "stop": 8, "step": 2},
)  # fmt: skip
def slice_(x: Any, *, axis: int, start: Dim, stop: Dim, step: int = 1) -> Any:
    """Elements start, start + step, ... below stop along one axis; indices count from the front."""
    index: list[Any] = [np.s_[:]] * x.ndim
    index[axis] = np.s_[int(start) : int(stop) : step]
    return x[tuple(index)]


def _concat_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    xs = env["xs"]
    if not xs:
        raise Mismatch("nothing to concatenate")
    a = axis_of(xs[0].rank, attrs["axis"])
    total = Dim.of(0)
    for t in xs:
        if t.dtype != xs[0].dtype or t.rank != xs[0].rank or t.format != xs[0].format:
            raise Mismatch(f"{t} and {xs[0]} differ in dtype or rank")
        if not t.whole_blocks(a, t.shape[a]):
            raise Mismatch(f"{t} does not end with a whole block along axis {a}")
        if t.shape[:a] + t.shape[a + 1 :] != xs[0].shape[:a] + xs[0].shape[a + 1 :]:
            raise Mismatch(f"{t} and {xs[0]} differ in an axis other than {a}")
        total = total + t.shape[a]
    return [xs[0].with_shape(*xs[0].shape[:a], total, *xs[0].shape[a + 1 :])]


@op(
    "(xs*: tq[...]) -> t[...]", infer=_concat_type,
    example={"xs": [(3, 2), (3, 5)], "axis": 1},
)  # fmt: skip
def concat(*xs: Any, axis: int) -> Any:
    """Concatenate the operands along one axis."""
    return np.concatenate(xs, axis)


@op(
    "(x: t[n, *d], idx: i[*b]) -> x[*b, *d]", bytes="2*out*bytes_x", oracle="torch.embedding",
    holds={"idx": index("x")}, example={"n": 7, "*d": (5,), "*b": (2, 3)},
)  # fmt: skip
def take(x: Any, idx: Any) -> Any:
    """Rows of x by index (an embedding). A negative index, used for padding tokens, gives a row of zeros."""
    return np.where((idx >= 0).reshape(idx.shape + (1,) * (x.ndim - 1)), x[np.maximum(idx, 0)], 0)


@op(
    "(x: t[n, *d], idx: i[*b]) -> x[*b, *d]", bytes="2*out*bytes_x",
    holds={"idx": index("x")}, example={"n": 7, "*d": (5,), "*b": (2, 3), "start": 3},
)  # fmt: skip
def take_part(x: Any, idx: Any, *, start: Dim) -> Any:
    """Rows of x, which is a part of a table from its row `start` on, by index into the table; zeros for other rows."""
    at = idx - start
    inside = (at >= 0) & (at < len(x))
    return np.where(inside.reshape(idx.shape + (1,) * (x.ndim - 1)), x[np.where(inside, at, 0)], 0)


def _gather_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, idx = env["x"], env["idx"]
    a = axis_of(x.rank, attrs["axis"])
    if idx.rank != x.rank or any(i != a and p != q for i, (p, q) in enumerate(zip(x.shape, idx.shape, strict=False))):
        raise Mismatch(f"{idx} does not index axis {a} of {x}")
    return [Type(x.dtype, idx.shape)]


@op(
    "(x: t[*s], idx: i[*i]) -> x[*i]", infer=_gather_type, bytes="2*out*bytes_x", oracle="torch.gather",
    holds={"idx": index("x", "axis")}, example={"*s": (3, 7), "*i": (3, 4), "axis": 1},
)  # fmt: skip
def gather(x: Any, idx: Any, *, axis: int) -> Any:
    """result[.., i, ..] = x[.., idx[.., i, ..], ..] along one axis; all other axes are shared."""
    return np.take_along_axis(x, idx, axis)
