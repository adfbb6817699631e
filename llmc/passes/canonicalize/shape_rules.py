"""Rules for ops that move elements: remove moves without effect and merge chains of moves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node, Value
from llmc.ir.ops.common import broadcast_shapes
from llmc.ir.signature import Mismatch
from llmc.passes.analysis import const_value, is_pointwise, made_by, rounded_to, widens
from llmc.passes.rewrite import Build, Simplify


def _same(v: Value) -> Build:
    return lambda b: v


def axis_of(n: Node) -> int:
    """Return the node's `axis` attribute as a non-negative number."""
    return int(n.attrs["axis"]) % n.operands[0].type.rank


def _cast(n: Node) -> Build | None:
    """Drop casts to the same dtype, fold casts of constants, skip widening casts before casts."""
    (x,), dtype = n.operands, n.attrs["dtype"]
    if x.type.dtype == dtype:
        return _same(x)
    if made_by(x, "constant") and (value := const_value(x)) is not None:
        return lambda b: b.constant(rounded_to(value, dtype), dtype)
    inner = made_by(x, "cast")
    if inner and widens(inner.operands[0].type.dtype, x.type.dtype):
        source = inner.operands[0]
        return _same(source) if source.type.dtype == dtype else lambda b: b.cast(source, dtype=dtype)
    return None


def _reshape(n: Node) -> Build | None:
    """Drop reshapes to the same shape, merge chains of reshapes."""
    (x,), shape = n.operands, n.attrs["shape"]
    if x.type.shape == shape:
        return _same(x)
    if chain := made_by(x, "reshape"):
        return lambda b: b.reshape(chain.operands[0], shape=shape)
    inner = made_by(x, "cast")
    below = made_by(inner.operands[0], "reshape") if inner else None
    if below and (source := below.operands[0]).type.shape == shape:
        return lambda b: b.cast(source, dtype=x.type.dtype)
    return None


def _transpose(n: Node) -> Build | None:
    """Drop identity permutations, merge chains; moves of size-1 axes become reshapes."""
    (x,), perm = n.operands, n.attrs["perm"]
    if perm == tuple(range(len(perm))):
        return _same(x)
    if inner := made_by(x, "transpose"):
        both = tuple(inner.attrs["perm"][p] for p in perm)
        return lambda b: b.transpose(inner.operands[0], perm=both)
    moved = [p for p in perm if x.type.shape[p].const != 1]
    if moved == sorted(moved):  # only axes of size 1 move
        return lambda b: b.reshape(x, shape=n.result.type.shape)
    return None


def _broadcast(n: Node) -> Build | None:
    """broadcast(x) -> x, if the shape is equal; broadcast(broadcast(x)) -> broadcast(x)."""
    (x,), shape = n.operands, n.attrs["shape"]
    if x.type.shape == shape:
        return _same(x)
    if inner := made_by(x, "broadcast"):
        return lambda b: b.broadcast(inner.operands[0], shape=shape)
    if (below := _below_front(x)) is not None:
        return lambda b: b.broadcast(below, shape=shape)
    return None


def _below_front(v: Value) -> Value | None:
    """Return the operand of a reshape that only prepends axes of size 1; None for any other value."""
    n = made_by(v, "reshape")
    if n is None:
        return None
    inner = n.operands[0].type.shape
    extra = len(v.type.shape) - len(inner)
    adds = extra > 0 and v.type.shape[extra:] == inner and all(d.const == 1 for d in v.type.shape[:extra])
    return n.operands[0] if adds else None


def _operand_broadcasts(n: Node) -> Build | None:
    """Let a pointwise op read the operands of broadcasts and of prepended unit axes, if its type stays the same."""
    if not is_pointwise(n):
        return None
    operands = list(n.operands)
    for i, v in enumerate(n.operands):
        wide = made_by(v, "broadcast")
        below = wide.operands[0] if wide else _below_front(v)
        if below is None:
            continue
        trial = [*operands[:i], below, *operands[i + 1 :]]
        try:
            types = n.op.infer_types([t.type for t in trial], n.attrs)
        except Mismatch:
            continue
        if types[0] == n.result.type and broadcast_shapes([t.type.shape for t in trial]) == n.result.type.shape:
            operands = trial
    if operands == n.operands:
        return None
    return lambda b: b.emit(n.op, operands, n.attrs)


def _slice(n: Node) -> Build | None:
    """Drop full slices, merge chains of slices, slice the parts of a concatenation."""
    (x,), axis = n.operands, axis_of(n)
    start, stop, step = n.attrs["start"], n.attrs["stop"], n.attrs["step"]
    if step == 1 and start == 0 and stop == x.type.shape[axis]:
        return _same(x)
    inner = made_by(x, "slice")
    if inner and axis_of(inner) == axis and inner.attrs["step"] == 1:
        base = inner.attrs["start"]
        source = inner.operands[0]
        return lambda b: b.slice(source, axis=axis, start=base + start, stop=base + stop, step=step)
    inner = made_by(x, "concat")
    if inner and axis_of(inner) == axis:
        return _slice_of_concat(inner.operands, axis, start, stop, step)
    return None


def _slice_of_concat(parts: Sequence[Value], axis: int, start: Dim, stop: Dim, step: int) -> Build | None:
    """Let a slice within one part read that part, and a slice of several whole parts concatenate those."""
    edges = [Dim.of(0)]  # where each part begins, and the end
    for v in parts:
        edges.append(edges[-1] + v.type.shape[axis])
    if step == 1 and start in edges and stop in edges:
        chosen = parts[edges.index(start) : edges.index(stop)]
        if len(chosen) == 1:
            return _same(chosen[0])
        return (lambda b: b.concat(*chosen, axis=axis)) if chosen else None
    for v, (begin, end) in zip(parts, pairwise(edges), strict=True):
        if any(d.const is None for d in (begin, end, start, stop)):
            continue
        if int(begin) <= int(start) and int(stop) <= int(end):
            return lambda b: b.slice(v, axis=axis, start=start - begin, stop=stop - begin, step=step)
    return None


def _concat(n: Node) -> Build | None:
    """Drop trivial parts, rejoin slices of one value, flatten nested concatenations."""
    axis = axis_of(n)
    if len(n.operands) == 1:
        return _same(n.operands[0])
    non_empty = [v for v in n.operands if v.type.shape[axis] != 0]
    if len(non_empty) < len(n.operands):
        return (lambda b: b.concat(*non_empty, axis=axis)) if non_empty else None
    if (source := _whole_of_slices(n.operands, axis)) is not None:
        return _same(source)
    flat: list[Value] = []
    shrinks = False  # whether a nested concatenation has no other reader, and so disappears
    for v in n.operands:
        inner = made_by(v, "concat")
        if inner is not None and axis_of(inner) == axis:
            flat += inner.operands
            shrinks = shrinks or len(v.uses) == 1
        else:
            flat.append(v)
    return (lambda b: b.concat(*flat, axis=axis)) if shrinks else None


def _whole_of_slices(parts: Sequence[Value], axis: int) -> Value | None:
    """Return the value that is completely covered by these consecutive slices, or None."""
    first = made_by(parts[0], "slice")
    if first is None:
        return None
    x, at = first.operands[0], Dim.of(0)
    for v in parts:
        s = made_by(v, "slice")
        if s is None or s.operands[0] is not x or axis_of(s) != axis or s.attrs["step"] != 1 or s.attrs["start"] != at:
            return None
        at = s.attrs["stop"]
    return x if at == x.type.shape[axis] else None


def _move_narrow(n: Node) -> Build | None:
    """Exchange a move and a cast so that the move handles the narrower dtype."""
    (x,) = n.operands
    if n.op.name in ("reshape", "transpose"):
        inner = made_by(x, "cast")
        if inner is None or len(x.uses) != 1 or not _narrower(inner.operands[0], x):
            return None
        return lambda b: b.cast(b.emit(n.op, inner.operands, n.attrs), dtype=x.type.dtype)
    move = made_by(x, "reshape", "transpose")
    if move is None or len(x.uses) != 1 or not _narrower(n.result, x):
        return None
    return lambda b: b.emit(move.op, (b.cast(move.operands[0], dtype=n.attrs["dtype"]),), move.attrs)


def _narrower(a: Value, b: Value) -> bool:
    return DTYPES[a.type.dtype].bits < DTYPES[b.type.dtype].bits


MOVES = (
    Simplify("cast", ("cast",), _cast),
    Simplify("reshape", ("reshape",), _reshape),
    Simplify("transpose", ("transpose",), _transpose),
    Simplify("broadcast", ("broadcast",), _broadcast),
    Simplify("slice", ("slice",), _slice),
    Simplify("concat", ("concat",), _concat),
    Simplify("move-narrow", ("reshape", "transpose", "cast"), _move_narrow),
)


def broadcast_rule(roots: Sequence[str]) -> Simplify:
    """Return the rule that lets the ops in `roots` read the operands of broadcasts."""
    return Simplify("operand-broadcast", tuple(roots), _operand_broadcasts)
