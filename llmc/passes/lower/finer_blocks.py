"""Gives quantised weights smaller blocks, so that they can be cut inside of a block: the pieces repeat its scale."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from llmc.ir.dim import Dim
from llmc.ir.graph import Builder, Value

ASSEMBLE = "assemble"


def cuttable(b: Builder, v: Value, axis: int, ends: Iterable[Dim]) -> Value:
    """Return `v`, or the same numbers in smaller blocks, which can be cut in front of each of `ends` along an axis.

    `v` is returned unchanged if it can be cut there already, or if it is not made of assembled weights.
    """
    inner = [end for end in ends if end not in (0, v.type.shape[axis]) and not v.type.can_cut(axis, end)]
    if not inner or v.type.format is None or not _assembled(v):
        return v
    size = v.type.format.block[axis - v.type.rank + 2]
    return _finer(b, v, axis, gcd(size, *(c for end in inner for _, c in end.terms)))


def can_be_finer(v: Value) -> bool:
    """Whether `cuttable` finds smaller blocks of the matrix `v` along its first axis, for any end."""
    return v.type.format is not None and v.type.rank <= 2 and _assembled(v)


def _assembled(v: Value) -> bool:
    """Whether a value is made by `assemble`, or a slice of such a value."""
    n = v.node
    if n is not None and n.op.name == "slice" and n.attrs["step"] == 1:
        return _assembled(n.operands[0])
    return n is not None and n.op.name == ASSEMBLE


def _finer(b: Builder, v: Value, axis: int, size: int) -> Value:
    """Return the same numbers in blocks of `size` along an axis."""
    n = v.node
    assert n is not None
    if n.op.name == "slice":
        return b.slice(_finer(b, n.operands[0], axis, size), **n.attrs)
    block, place = list(n.attrs["block"]), axis - v.type.rank + 2
    times = block[place] // size
    count = v.type.shape[axis].ceildiv(size)
    block[place] = size
    codes, *parts = n.operands
    repeated = [_repeated(b, part, axis, times, count) for part in parts]
    return b.assemble(codes, *repeated, **{**n.attrs, "block": block})


def _repeated(b: Builder, part: Value, axis: int, times: int, count: Dim) -> Value:
    """Repeat each element of `part` `times` times along an axis, to `count` elements."""
    before, after = part.type.shape[:axis], part.type.shape[axis + 1 :]
    length = part.type.shape[axis]
    x = b.reshape(part, shape=(*before, length, Dim.of(1), *after))
    x = b.broadcast(x, shape=(*before, length, Dim.of(times), *after))
    whole: Value = b.reshape(x, shape=(*before, length * times, *after))
    return whole if length * times == count else b.slice(whole, axis=axis, start=Dim.of(0), stop=count)
