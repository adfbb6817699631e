"""Recognizes rotary embeddings written in elementary ops: in halves, in pairs, and of a part of each head.

Tables of cos and sin in elementary ops become the op rope_tables, which the front end usually emits itself.

Names in the patterns: x is the rotated value [.., size], c and s are the tables of cosines and sines, and y is the
value whose parts are swapped, of which x may be a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Node, Value
from llmc.passes.analysis import core, drop_ones, made_by, squeezed
from llmc.passes.base import Ctx, Pass
from llmc.passes.canonicalize.shape_rules import MOVES
from llmc.passes.canonicalize.sink_rules import SINKS
from llmc.passes.rewrite import Build, Match, Misses, Pat, Rewrite, Simplify, apply, either

p = Pat()

# concat(-y[mid:end], y[begin:mid]): y with its halves swapped, the first of them negated.
_ROTATED_HALF = p.concat(
    p.neg(p.slice(p.y, axis=p.axis1, start=p.mid, stop=p.end, step=1)),
    p.slice(p.y, axis=p.axis2, start=p.begin, stop=p.mid, step=1),
    axis=p.axis3,
)
# Every pair (y[2i], y[2i + 1]) becomes (-y[2i + 1], y[2i]).
_ROTATED_PAIRS = p.reshape(
    p.concat(
        p.reshape(p.neg(p.slice(p.y, axis=p.axis1, start=p.odd, stop=p.end1, step=2))),
        p.reshape(p.slice(p.y, axis=p.axis2, start=p.begin, stop=p.end2, step=2)),
        axis=p.axis3,
    )
)
# concat(a * c - b * s, b * c + a * s): both halves of the result, from the halves a and b of x.
_HALVES = p.concat(
    p.sub(p.mul(p.a, p.c), p.mul(p.b, p.s)),
    p.add(p.mul(p.b, p.c), p.mul(p.a, p.s)),
    axis=p.axis,
)


def _angles(v: Value) -> tuple[Value, Value] | None:
    """Return (frequencies [h], positions [t]) if v [t, h] is their outer product in any form, else None."""
    if v.type.rank != 2:
        return None
    transposed = made_by(v, "transpose")
    product = made_by(transposed.operands[0] if transposed else v, "mul", "matmul")
    if product is None:
        return None
    parts = [squeezed(o) for o in product.operands]
    if any(len(drop_ones(o.type.shape)) != 1 for o in parts):
        return None
    positions = [o for o in parts if DTYPES[_integers(o).type.dtype].kind == "i"]
    frequencies = [o for o in parts if o not in positions]
    if len(positions) != 1 or len(frequencies) != 1:
        return None
    num_positions = drop_ones(positions[0].type.shape)[0]
    num_frequencies = drop_ones(frequencies[0].type.shape)[0]
    if (num_positions, num_frequencies) != v.type.shape or num_positions == num_frequencies:
        return None
    return frequencies[0], _integers(positions[0])


def _integers(v: Value) -> Value:
    """Return the operand of `v` if `v` casts integers, else `v`."""
    n = made_by(v, "cast")
    return n.operands[0] if n and DTYPES[n.operands[0].type.dtype].kind == "i" else v


def _table(n: Node) -> Build | None:
    """Match cos or sin of angles. A spread table concatenates the narrow one with itself."""
    (x,) = n.operands
    result = 0 if n.op.name == "cos" else 1  # of rope_tables, which returns cosines and sines
    spread = made_by(x, "concat")
    if spread and (len(spread.operands) != 2 or core(spread.operands[0]) is not core(spread.operands[1])):
        return None
    parts = _angles(spread.operands[0] if spread else x)
    if parts is None or x.type.dtype != "f32":
        return None
    frequencies, positions = parts

    def build(b: Any) -> Value:
        flat = [_vector(b, v) for v in (frequencies, positions)]
        narrow: Value = b.rope_tables(*flat, scaling=1.0, dtype="f32")[result]
        return b.concat(narrow, narrow, axis=spread.attrs["axis"]) if spread else narrow

    return build


def _vector(b: Any, v: Value) -> Value:
    """Drop the axes of size 1."""
    shape: tuple[Dim, ...] = drop_ones(v.type.shape)
    return v if v.type.shape == shape else b.reshape(v, shape=shape)


TABLES = (Simplify("rope-tables", ("cos", "sin"), _table),)


class Table(NamedTuple):
    """A cos or sin operand: the narrow table [t, h], and how its columns are spread.

    spread: "half" if the columns are followed by the same columns again, "pairs" if each column is repeated next to
    itself, "plain" if the operand is the narrow table.
    """

    value: Value
    spread: str


def table(v: Value) -> Table:
    """Analyse a cos or sin operand."""
    dtype = v.type.dtype
    while n := made_by(v, "cast", "reshape", "broadcast"):
        same = n.op.name == "cast" or drop_ones(n.operands[0].type.shape) == drop_ones(v.type.shape)
        if not same or (n.op.name == "cast" and n.operands[0].type.dtype not in ("f32", "bf16", "f16", dtype)):
            break
        v = n.operands[0]
    halves = made_by(v, "concat")
    if halves and len(halves.operands) == 2 and halves.attrs["axis"] % v.type.rank == v.type.rank - 1:
        first, second = halves.operands
        if core(first) is core(second):
            return Table(first, "half")
    flat = made_by(v, "reshape")
    wide = made_by(flat.operands[0], "broadcast") if flat else None
    if wide and wide.result.type.shape[-1] == 2 and wide.operands[0].type.shape[-1] == 1:
        return Table(squeezed(wide.operands[0]), "pairs")
    return Table(v, "plain")


def _reject_tables(m: Match, spread: str) -> str | None:
    """Return None if both tables are [t, h] with this spread, else the reason."""
    for key in ("c", "s"):
        rotation = table(m[key])
        if rotation.spread != spread:
            return f"the table {m[key]} is not spread as {spread}"
        if len(drop_ones(rotation.value.type.shape)) != 2:
            return f"the table {rotation.value.type} is not of shape [tokens, columns]"
    return None


def _reject_axes(m: Match, *keys: str, rank: int = 0) -> str | None:
    """Return None if these axes are the last ones of values of `rank` (0: the rank of x), else the reason."""
    for key in keys:
        last = (rank or m["x"].type.rank) - 1
        if m[key] % (last + 1) != last:
            return f"it applies to axis {m[key]}, not to the last"
    return None


def _reject_layout(m: Match, x: Value) -> str | None:
    """Return None if the axes of x are tokens and heads in an order that the tables determine, else the reason."""
    if _tokens_axis(m["c"], x) is None or _tokens_axis(m["s"], x) is None:
        return f"a table {m['c'].type} over {x.type} does not determine which axis is the tokens'"
    return None


def _tokens_axis(c: Value, x: Value) -> int | None:
    """Return the axis of x along which the table's rows run, 0 or 1; None if ambiguous."""
    if x.type.rank == 2 and c.type.rank == 2:
        return 0
    if x.type.rank != 3 or c.type.rank > 3:
        return None
    shape = (Dim.of(1),) * (3 - c.type.rank) + c.type.shape
    if shape[0] == 1 and shape[1] == x.type.shape[1]:
        return 1
    return 0 if shape[1] == 1 and shape[0] == x.type.shape[0] else None


def _offset(m: Match) -> Dim | None:
    """Return the offset of x in y, the value whose parts are swapped; 0 if x is y, None if x is not a slice of y."""
    if core(m["x"]) is core(m["y"]):
        return Dim.of(0)
    n = made_by(m["x"], "slice")
    if n is None or n.operands[0] is not m["y"] or n.attrs["step"] != 1:
        return None
    at: Dim = n.attrs["start"]
    return at if n.attrs["axis"] % n.result.type.rank == n.result.type.rank - 1 else None


def _is_half(m: Match) -> str | None:
    """Return None if the match rotates the two halves of x, else the reason."""
    size, at = m["x"].type.shape[-1], _offset(m)
    if at is None:
        return "the swapped value is not the scaled value"
    begin, mid, end = (m[k] - at for k in ("begin", "mid", "end"))
    if begin != 0 or end != size or mid * 2 != size:
        return f"it swaps {begin}..{mid} and {mid}..{end} of {size}, not halves"
    axes = _reject_axes(m, "axis1", "axis2", "axis3")
    return axes or _reject_tables(m, "half") or _reject_layout(m, m["x"])


def _is_pairs(m: Match) -> str | None:
    """Return None if the match rotates adjacent pairs of x, else the reason."""
    size, at = m["x"].type.shape[-1], _offset(m)
    if at is None:
        return "the swapped value is not the scaled value"
    odd = (m["end1"] - m["odd"]).ceildiv(2)
    even = (m["end2"] - m["begin"]).ceildiv(2)
    if m["begin"] != at or m["odd"] != at + 1 or odd * 2 != size or even * 2 != size:
        return f"it does not swap every pair of {size}"
    axes = _reject_axes(m, "axis1", "axis2") or _reject_axes(m, "axis3", rank=m["x"].type.rank + 1)
    return axes or _reject_tables(m, "pairs") or _reject_layout(m, m["x"])


def _is_halves(m: Match) -> str | None:
    """Return None if the match rotates two slices that are the halves of one value, else the reason."""
    first, second = made_by(m["a"], "slice"), made_by(m["b"], "slice")
    if first is None or second is None or first.operands[0] is not second.operands[0]:
        return "its two halves are not slices of one value"
    x = first.operands[0]
    if any(axis % x.type.rank != x.type.rank - 1 for axis in (m["axis"], first.attrs["axis"], second.attrs["axis"])):
        return "it does not split the last axis"
    size, middle = x.type.shape[-1], first.attrs["stop"]
    are_adjacent = first.attrs["start"] == 0 and second.attrs["start"] == middle and second.attrs["stop"] == size
    if not are_adjacent or middle * 2 != size or first.attrs["step"] != 1 or second.attrs["step"] != 1:
        return f"it does not split {size} in halves"
    return _reject_tables(m, "plain") or _reject_layout(m, x)


def _emit(b: Any, m: Match, x: Value, interleaved: bool) -> Value:
    """Apply rope to x in the op's layout, and convert back to the layout of the root."""
    dtype = m.root.result.type.dtype
    if x.type.dtype != dtype:
        x = b.cast(x, dtype=dtype)
    y = b.reshape(x, shape=(x.type.shape[0], Dim.of(1), x.type.shape[1])) if x.type.rank == 2 else x
    heads_first = _tokens_axis(m["c"], x) == 1
    if heads_first:
        y = b.transpose(y, perm=(1, 0, 2))
    y = b.rope(y, _narrow_table(b, m["c"]), _narrow_table(b, m["s"]), interleaved=interleaved)
    if heads_first:
        y = b.transpose(y, perm=(1, 0, 2))
    return b.reshape(y, shape=x.type.shape) if x.type.rank == 2 else y


def _narrow_table(b: Any, v: Value) -> Value:
    """Return the narrow table [t, h], in the dtype of the model's table."""
    narrow = table(v).value
    shape = drop_ones(narrow.type.shape)
    if narrow.type.shape != shape:
        narrow = b.reshape(narrow, shape=shape)
    return narrow if narrow.type.dtype == v.type.dtype else b.cast(narrow, dtype=v.type.dtype)


# Partial rotation: x[begin:mid] is rotated, with tokens or heads as its first axis, and x[mid:end] is not.
_ROTATED = p.slice(p.x, axis=p.axis1, start=p.begin, stop=p.mid, step=1)
_UNROTATED = p.slice(p.x, axis=p.axis2, start=p.mid, stop=p.end, step=1)
_TOKENS_FIRST = p.rope(_ROTATED, p.c, p.s, interleaved=p.pairs)
_HEADS_FIRST = p.transpose(p.rope(p.transpose(_ROTATED, perm=(1, 0, 2)), p.c, p.s, interleaved=p.pairs), perm=(1, 0, 2))


def _is_partial(m: Match) -> str | None:
    """Return None if the tables have as many columns as are sliced, and all axes are the last, else the reason."""
    if m["c"].type.shape[-1] * 2 != m["mid"] - m["begin"]:
        return f"{m['begin']}..{m['mid']} is sliced, but {m['c'].type.shape[-1] * 2} columns are rotated"
    return _reject_axes(m, "axis1", "axis2", "axis3")


def _emit_partial(b: Any, m: Match) -> Value:
    """Apply rope to x[begin:end]: the op leaves the columns unchanged for which its tables have no columns."""
    heads_first = made_by(m.root.operands[0], "transpose") is not None
    x = m["x"]
    if m["begin"] != 0 or m["end"] != x.type.shape[-1]:
        x = b.slice(x, axis=x.type.rank - 1, start=m["begin"], stop=m["end"])
    if heads_first:
        x = b.transpose(x, perm=(1, 0, 2))
    y = b.rope(x, m["c"], m["s"], interleaved=m["pairs"])
    return b.transpose(y, perm=(1, 0, 2)) if heads_first else y


RULES = (
    Rewrite(
        "rope", p.add(p.mul(p.x, p.c), p.mul(_ROTATED_HALF, p.s)), lambda b, m: _emit(b, m, m["x"], False), _is_half,
        near=4,
    ),
    Rewrite(
        "rope-interleaved", p.add(p.mul(p.x, p.c), p.mul(_ROTATED_PAIRS, p.s)),
        lambda b, m: _emit(b, m, m["x"], True), _is_pairs, near=5,
    ),
    Rewrite("rope-halves", _HALVES, lambda b, m: _emit(b, m, m["a"].node.operands[0], False), _is_halves, near=4),
    Rewrite(
        "rope-partial", p.concat(either(_TOKENS_FIRST, _HEADS_FIRST), _UNROTATED, axis=p.axis3),
        _emit_partial, _is_partial, near=3,
    ),
    Rewrite(
        "rope-cast",
        p.cast(p.rope(p.cast(p.x), p.c, p.s, interleaved=p.pairs), dtype=p.dtype),
        lambda b, m: b.rope(m["x"], m["c"], m["s"], interleaved=m["pairs"]),
        lambda m: None if m["x"].type.dtype == m["dtype"] else f"it converts {m['x'].type.dtype} to {m['dtype']}",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FuseRope(Pass):
    """Replace rotary embeddings and their tables written in elementary ops by rope and rope_tables.

    See Su et al. 2021, arXiv 2104.09864. Covers partial rotation, both orders of pairs, and computation in float32.
    """

    name: ClassVar[str] = "fuse-rope"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Fuse the rotations as written; then sink transposes, and join partial rotations with the rest of the head."""
        misses = Misses()
        done = apply(g, (*TABLES, *RULES, *MOVES), ctx, misses)
        done += apply(g, (*RULES, *MOVES, *SINKS), ctx, misses)
        misses.report(g, ctx)
        return done
