"""Separates what a product or a convolution computes for several readers (queries, keys and values; gate and up), so
that each part divides by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.passes.base import Ctx
from llmc.passes.lower.finer_blocks import can_be_finer, cuttable
from llmc.passes.lower.shard_rules import CHANNELS, CONVS, is_elementwise


class Cut(NamedTuple):
    """Elements start, start + step, ... below stop along one axis."""

    axis: int
    start: Any
    stop: Any
    step: int

    @property
    def ends(self) -> tuple[Dim, ...]:
        """The elements in front of which a tensor is cut: any, if elements are left out."""
        return (self.start, self.stop) if self.step == 1 else (self.start, self.stop, D(1))


def separate(g: Graph, ctx: Ctx) -> int:
    """Compute slices of a product or convolution from slices of the weight; return the number of slices.

    Between the two may be ops on elements, transposes and concatenations. A value that has other readers than such
    slices stays unchanged. Each part of a convolution has a state of its own.
    """
    done = 0
    for node in list(g.nodes):
        if node.op.name != "slice" or not ctx.allows(node):
            continue
        cut, v = _cut_of(node), node.operands[0]
        if _separable(g, v, [_cut_of(n) for n in v.uses if n.op.name == "slice"], v.uses):
            part = _Parts(g, Builder(g, ctx.opset, before=node)).of(v, cut)
            part.name = node.result.name
            g.replace(node.result, part)
            done += 1
    if done:
        _erase_unused(g)
    return done


def _cut_of(n: Node) -> Cut:
    return Cut(n.attrs["axis"] % n.operands[0].type.rank, n.attrs["start"], n.attrs["stop"], n.attrs["step"])


def _separable(g: Graph, v: Value, cuts: list[Cut], readers: list[Node]) -> bool:
    """Whether all `readers` of a value are slices along one axis, and the value can be computed in these parts."""
    n = v.node
    if n is None or len(cuts) != len(readers) or len({cut.axis for cut in cuts}) != 1 or v in g.outputs:
        return False
    axis = cuts[0].axis
    if n.op.name == "linear":
        weight = n.operands[1]
        ends = {end for cut in cuts for end in cut.ends} - {D(0), v.type.shape[axis]}
        cuts_weight = can_be_finer(weight) or all(weight.type.can_cut(0, end) for end in ends)
        return axis == v.type.rank - 1 and cuts_weight
    if n.op.name == "concat":
        return n.attrs["axis"] % v.type.rank == axis and all(_operand_of(n, cut) is not None for cut in cuts)
    computed = [(x, at) for x, at in _parts_of(n, axis) if not _is_weight(x)]
    return bool(computed) and all(
        set(x.uses) == {n} and _separable(g, x, [cut._replace(axis=at) for cut in cuts], [n] * len(cuts))
        for x, at in computed
    )


def _parts_of(n: Node, axis: int) -> list[tuple[Value, int]]:
    """Return the operands that make up the elements of a result along an axis, with their axis; [] if none do."""
    if n.op.name == "transpose":
        return [(n.operands[0], n.attrs["perm"][axis])]
    if n.op.name in CONVS:
        return [(n.operands[0], 1)] if axis == 1 else []
    if not is_elementwise(n):
        return []
    shape = n.result.type.shape
    places = [(x, axis - len(shape) + x.type.rank) for x in n.operands]
    return [(x, at) for x, at in places if at >= 0 and x.type.shape[at] == shape[axis]]


def _is_weight(x: Value) -> bool:
    """Whether a value is a weight, or a reshaped part of one."""
    while x.node is not None and x.node.op.name in ("reshape", "slice"):
        x = x.node.operands[0]
    return x.weight


def _operand_of(n: Node, cut: Cut) -> Value | None:
    """Return the operand of a concatenation that a cut consists of, if there is one."""
    at = D(0)
    for x in n.operands:
        end = at + x.type.shape[cut.axis]
        if (cut.start, cut.stop, cut.step) == (at, end, 1):
            return x
        at = end
    return None


class _Parts:
    """Computes parts of values."""

    def __init__(self, g: Graph, b: Builder) -> None:
        self.g, self.b = g, b

    def of(self, v: Value, cut: Cut) -> Value:
        """Return a part of a value that is separable, or of a weight."""
        n = v.node
        if n is None or _is_weight(v):
            return self._slice(v, cut)
        self.b.loc = n.loc
        if n.op.name == "linear":
            x, weight = n.operands
            return self.b.linear(x, self._slice(weight, cut._replace(axis=0)))
        if n.op.name == "concat":
            operand = _operand_of(n, cut)
            assert operand is not None
            return operand
        if n.op.name in CONVS:
            return self._conv(n, cut)
        parts = dict(_parts_of(n, cut.axis))
        operands = [self.of(x, cut._replace(axis=parts[x])) if x in parts else x for x in n.operands]
        self.b.loc = n.loc
        return self.b.emit(n.op, operands, n.attrs)

    def _conv(self, n: Node, cut: Cut) -> Value:
        """Return a part of the channels of a convolution, which has its own state."""
        places = n.op.places([x.type for x in n.operands])
        at = {i: CHANNELS[name] for name, i in places.items() if name in CHANNELS}
        operands = list(n.operands)
        for i, axis in at.items():
            x, operand_cut = operands[i], cut._replace(axis=axis)
            operands[i] = self._state(x, operand_cut) if x.type.state else self.of(x, operand_cut)
        self.b.loc = n.loc
        out = self.b.emit(n.op, operands, n.attrs)
        if n.op.name == "causal_conv":
            return out
        y, ring = out
        self.g.outputs.insert(self.g.outputs.index(n.results[1]), ring)
        return y

    def _state(self, v: Value, cut: Cut) -> Value:
        """Return a new state, for a part of the channels of `v`."""
        shape = v.type.shape
        kind = v.type.with_shape(*shape[: cut.axis], cut.stop - cut.start, *shape[cut.axis + 1 :])
        return self.g.input(f"{v.name}.{cut.start}", kind)

    def _slice(self, v: Value, cut: Cut) -> Value:
        return self.b.slice(cuttable(self.b, v, cut.axis, cut.ends), **cut._asdict())


def _erase_unused(g: Graph) -> None:
    """Erase the nodes that have been computed in parts, and the states of convolutions among them."""
    ops = ("slice", "add", "linear", "transpose", "concat")
    for node in reversed(list(g.nodes)):
        if node.op.name == "row_conv" and not node.results[0].uses:
            g.outputs = [v for v in g.outputs if v is not node.results[1]]
            state = node.operand("recent")
            g.erase(node)
            g.inputs = [v for v in g.inputs if v is not state]
        elif (node.op.name in (*ops, *CONVS) or is_elementwise(node)) and not g.is_used(node):
            g.erase(node)
