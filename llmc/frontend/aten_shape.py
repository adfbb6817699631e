"""Lowerings of aten ops that move, cut, join, convert or create data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llmc.frontend.aten_math import Lowering
from llmc.frontend.lowering import Call, Unsupported, axis_of
from llmc.ir.dim import Dim, product
from llmc.ir.graph import Value

END = 2**63 - 1


def same(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Lower an op that does nothing in inference."""
    return x


def dropout(c: Call, x: Value, p: float, train: bool) -> Value:
    """Lower dropout, which must be switched off."""
    if train and p:
        raise Unsupported("dropout that is switched on")
    return x


def convert(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Lower any op of the `to` family: cast to the result's dtype."""
    return c.cast(x, c.type.dtype)


def view(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Lower any op that keeps the order of the elements: reshape to the result's shape."""
    return c.reshape(x, c.shape)


def transpose(c: Call, x: Value, a: int, b: int) -> Value:
    """Lower an exchange of two axes."""
    perm = list(range(x.type.rank))
    a, b = axis_of(x, a), axis_of(x, b)
    perm[a], perm[b] = perm[b], perm[a]
    return c.transpose(x, perm)


def expand(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    """Lower a broadcast to the result's shape."""
    return c.broadcast(x, c.shape)


def slice_(c: Call, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Value:
    """Lower a slice of one axis."""
    axis = axis_of(x, dim)
    lo, hi = _bounds(x.type.shape[axis], start, end)
    if step == 1:
        return c.part(x, axis, lo, hi)
    return c.b.slice(x, axis=axis, start=lo, stop=hi, step=int(step))


def joined(c: Call, x: Value, part: Value, dim: int, start: Any, end: Any, step: Any) -> Value | None:
    """Return x with its slice start .. end along an axis replaced by `part`, or None if the slice has a step."""
    if step != 1:
        return None
    axis = axis_of(x, dim)
    size = x.type.shape[axis]
    lo, hi = _bounds(size, start, end)
    before = [c.part(x, axis, 0, lo)] if lo != 0 else []
    after = [c.part(x, axis, hi, size)] if hi != size else []
    return c.b.concat(*before, part, *after, axis=axis) if before or after else part


def _bounds(size: Dim, start: Any, end: Any) -> tuple[Dim, Dim]:
    """Start and end of a torch slice of an axis, as non-negative indices."""

    def bound(v: Any, default: Dim) -> Dim:
        if v is None or (isinstance(v, int) and v >= END):
            return default
        v = Dim.of(v)
        if v.const is None or size.const is None:
            minimum = v.subs(dict.fromkeys(v.symbols, 1)).const or 0
            return size + v if minimum < 0 else v
        return Dim.of(max(0, min(size.const, v.const + (size.const if v.const < 0 else 0))))

    return bound(start, Dim.of(0)), bound(end, size)


def select(c: Call, x: Value, dim: int, index: Any) -> Value:
    """Lower the selection of one index of an axis."""
    axis, at = axis_of(x, dim), Dim.of(index)
    if at.const is not None and at.const < 0:
        at = x.type.shape[axis] + at
    return c.reshape(c.part(x, axis, at, at + 1), c.shape)


def pieces(c: Call, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    """Lower chunk and split; the sizes of the results determine the cuts."""
    axis, at, out = axis_of(x, dim), Dim.of(0), []
    for ty in c.types:
        out.append(c.part(x, axis, at, at + ty.shape[axis]))
        at = at + ty.shape[axis]
    return tuple(out)


def unbind(c: Call, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """Lower unbind: one result per index of the axis."""
    axis = axis_of(x, dim)
    return tuple(c.reshape(c.part(x, axis, i, i + 1), ty.shape) for i, ty in enumerate(c.types))


def cat(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    """Lower a concatenation; operands are cast to the result's dtype."""
    xs = [c.cast(x, c.type.dtype) for x in xs]
    return xs[0] if len(xs) == 1 else c.b.concat(*xs, axis=axis_of(xs[0], dim))


def stack(c: Call, xs: Sequence[Value], dim: int = 0) -> Value:
    """Lower stack: concatenate along a new axis."""
    axis = axis_of(c.type, dim)
    shape = (*c.shape[:axis], Dim.of(1), *c.shape[axis + 1 :])
    return c.b.concat(*[c.reshape(c.cast(x, c.type.dtype), shape) for x in xs], axis=axis)


def repeat_interleave(c: Call, x: Value, repeats: Any, dim: int | None = None, **_: Any) -> Value:
    """Lower repeat_interleave with one axis and an integer count."""
    if dim is None or not isinstance(repeats, int):
        raise Unsupported("repeat_interleave without one axis and one count")
    axis, shape = axis_of(x, dim), x.type.shape
    pre, post = shape[: axis + 1], shape[axis + 1 :]
    wide = c.broadcast(c.reshape(x, (*pre, Dim.of(1), *post)), (*pre, Dim.of(repeats), *post))
    return c.reshape(wide, c.shape)


def repeat(c: Call, x: Value, repeats: Sequence[Any]) -> Value:
    """Lower tile: each axis is repeated as (count, size) and merged."""
    shape = (*[Dim.of(1)] * (len(repeats) - x.type.rank), *x.type.shape)
    counts = [Dim.of(r) for r in repeats]
    x = c.reshape(x, [d for s in shape for d in (Dim.of(1), s)])
    return c.reshape(c.broadcast(x, [d for pair in zip(counts, shape, strict=True) for d in pair]), c.shape)


def index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    """Lower x[:, idx] with one integer tensor as a lookup of rows; axes before the indexed one must have size 1."""
    tensors = [(i, v) for i, v in enumerate(indices) if v is not None]
    if len(tensors) != 1 or tensors[0][1].type.dtype == "bool":
        raise Unsupported("an index other than one integer tensor")
    axis, at = tensors[0]
    if product(x.type.shape[:axis]).const != 1:
        raise Unsupported(f"an index along axis {axis} after axes of size {list(map(str, x.type.shape[:axis]))}")
    return c.reshape(c.b.take(c.reshape(x, x.type.shape[axis:]), at), c.shape)


def index_put(c: Call, x: Value, indices: Sequence[Value | None], value: Value, accumulate: bool = False) -> Value:
    """Lower x[mask] = value for a mask of x's shape and a single value."""
    if len(indices) != 1 or indices[0] is None or indices[0].type.shape != x.type.shape or accumulate:
        raise Unsupported("an index_put other than through one mask of the tensor's shape")
    if indices[0].type.dtype != "bool" or product(value.type.shape).const != 1:
        raise Unsupported("an index_put of anything but one value through a mask")
    return c.b.where(indices[0], c.cast(c.reshape(value, ()), x.type.dtype), x)


def scatter_value(c: Call, x: Value, dim: int, at: Value, value: Any) -> Value:
    """Lower writing one value at indices of the last axis, by comparing the indices with every column's number."""
    if axis_of(x, dim) != x.type.rank - 1:
        raise Unsupported(f"scatter along axis {dim}, not the last")
    columns = c.b.iota(size=x.type.shape[-1], dtype=at.type.dtype)
    hits = c.b.eq(c.reshape(at, (*at.type.shape, Dim.of(1))), columns)
    hit = c.b.cast(c.b.amax(c.b.cast(hits, dtype="i32"), axis=-2, keepdim=False), dtype="bool")
    return c.b.where(hit, c.value(value, x), x)


def arange(c: Call, *args: Any, **_: Any) -> Value:
    """Lower arange with step 1.

    A traced model counts the tokens of one sequence from its start, so the numbers of all tokens are their positions.
    """
    start, stop, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if step != 1:
        raise Unsupported(f"arange with step {step}")
    if start == 0 and Dim.of(stop) == c.positions.type.shape[0]:
        return c.cast(c.positions, c.type.dtype)
    counted = c.b.iota(size=Dim.of(stop) - Dim.of(start), dtype=c.type.dtype)
    return counted if start == 0 else c.b.add(counted, c.value(start, counted))


def filled(c: Call, value: Any) -> Value:
    """Lower a tensor filled with one value."""
    return c.broadcast(c.value(value, c.type), c.shape)


_VIEWS = (
    "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
    "unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default",
)  # fmt: skip
_NO_OPS = (
    "alias.default", "detach.default", "detach_.default", "contiguous.default", "clone.default",
    "lift_fresh_copy.default",
)  # fmt: skip
_TO = ("dtype", "dtype_layout", "device", "other")
_CONVERT = (*(f"to.{n}" for n in _TO), "_to_copy.default", "type_as.default")

_EXPAND = ("expand.default", "expand_as.default", "broadcast_to.default")
_PIECES = ("chunk.default", "split.Tensor", "split_with_sizes.default")

# Overloads whose result may share memory with their operand: writing to the result would change the operand, too.
ALIASES = frozenset(
    f"aten.{n}"
    for n in (*_VIEWS, *_NO_OPS[:3], *_PIECES, *_EXPAND, "transpose.int", "t.default", "numpy_T.default", "mT.default",
              "permute.default", "slice.Tensor", "select.int", "unbind.int")
)  # fmt: skip
# Overloads that return their operand if nothing has to be copied.
UNLESS_COPIED = frozenset({"aten.contiguous.default", "aten.type_as.default", *(f"aten.to.{n}" for n in _TO)})

LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        **{f"aten.{n}": view for n in _VIEWS},
        **{f"aten.{n}": same for n in _NO_OPS},
        **{f"aten.{n}": convert for n in _CONVERT},
        **{f"aten.{n}": expand for n in _EXPAND},
        **{f"aten.{n}": pieces for n in _PIECES},
        # new_empty: any value is valid, because it is overwritten before it is read
        **{
            f"aten.{n}.default": lambda c, *_, **__: filled(c, 0)
            for n in ("zeros", "zeros_like", "new_zeros", "new_empty")
        },
        **{f"aten.{n}.default": lambda c, *_, **__: filled(c, 1) for n in ("ones", "ones_like")},
        **{f"aten.{n}.default": lambda c, _, value, **__: filled(c, value) for n in ("full", "full_like")},
        "aten.scalar_tensor.default": lambda c, value, **_: filled(c, value),
        "aten.dropout.default": dropout,
        "aten.transpose.int": transpose,
        **{f"aten.{n}.default": lambda c, x: c.transpose(x, range(x.type.rank)[::-1]) for n in ("t", "numpy_T")},
        "aten.mT.default": lambda c, x: transpose(c, x, -1, -2),
        "aten.permute.default": lambda c, x, dims: c.transpose(x, [axis_of(x, d) for d in dims]),
        "aten.slice.Tensor": slice_,
        "aten.select.int": select,
        "aten.unbind.int": unbind,
        "aten.cat.default": cat,
        "aten.concat.default": cat,
        "aten.concatenate.default": cat,
        "aten.stack.default": stack,
        "aten.repeat_interleave.self_int": repeat_interleave,
        "aten.repeat.default": repeat,
        "aten.embedding.default": lambda c, w, at, *_: c.b.take(w, at),
        "aten.index.Tensor": index,
        "aten.index_select.default": lambda c, x, dim, at: index(c, x, [*[None] * axis_of(x, dim), at]),
        "aten.index_put.default": index_put,
        "aten.gather.default": lambda c, x, dim, at, **_: c.b.gather(x, at, axis=axis_of(x, dim)),
        "aten.scatter.value": scatter_value,
        "aten.arange.default": arange,
        "aten.arange.start": arange,
        "aten.copy.default": lambda c, x, source, *_: c.broadcast(c.cast(source, c.type.dtype), c.shape),
    }
)
