"""Gives the quantised weights of a checkpoint a quantised type in the graph, instead of their dequantised numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.qformat import QFormat
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type, tensor

# The operands that products read as weights, and ops that move the parts of a stack of experts as they move the stack.
WEIGHTS: Mapping[str, tuple[int, ...]] = MappingProxyType({"linear": (1,), "moe": (3, 4)})
MOVES = ("slice", "concat", "transpose")


class QuantisedSource(Protocol):
    """A checkpoint of which some weights can be read as parts."""

    formats: dict[str, QFormat]
    orders: dict[str, str]
    transposed: set[str]
    counts: dict[str, int]

    def part_types(self, name: str) -> Mapping[str, Type]:
        """Return the types of a weight's codes, scales and zeros by the names under which they are read."""


def use_codes(m: Module, source: QuantisedSource, ops: Mapping[str, OpDef]) -> int:
    """Replace weights of @main that only products read by `assemble` of their parts.

    Other readers, such as an embedding that shares its table with the output projection, take the dequantised numbers.
    Return the number of stored weights that were replaced.
    """
    g = m.graphs["main"]
    count = 0
    orders: dict[str, Value] = {}
    moved: dict[tuple[Value, Value], Value] = {}
    for weight in list(g.inputs):
        name = weight.name
        if not (weight.weight and weight.uses and name in source.formats):
            continue
        f = source.formats[name]
        moves = _moves(weight, f, name in source.transposed)
        if moves is None:
            continue
        parts = [g.input(part, t, weight=True) for part, t in source.part_types(name).items()]
        b: Any = Builder(g, ops, before=g.nodes.head, loc=weight.uses[0].loc)
        assembled = b.assemble(*parts, code=f.code, block=f.block, zero=f.zero, act=f.act, dtype=weight.type.dtype)
        if order := source.orders.get(name):
            if order not in orders:
                orders[order] = g.input(order, tensor("i32", weight.type.shape[1]), weight=True)
            _reorder(g, weight, orders[order], moved, ops)
        _replace(g, weight, assembled, moves)
        g.inputs.remove(weight)
        count += source.counts[name]
    return count


def _moves(v: Value, f: QFormat, transposed: bool) -> list[Node] | None:
    """Return the nodes that move a weight on its way to products, in order; None if it has other readers.

    A weight that is the transpose of its parts has only readers that transpose it back.

    Invariant of the search: `types` has the type that the weight and each moved value will have, None for the
    transpose of the parts. A concatenation waits until all of its operands have one.
    """
    types = {v: None if transposed else Type(v.type.dtype, v.type.shape, format=f)}
    moves: list[Node] = []
    pending = [v]
    while pending:
        source = pending.pop(0)
        for n in dict.fromkeys(source.uses):
            if n in moves:
                continue
            if n.op.name not in MOVES:
                if types[source] is None or not _reads(n, source, f):
                    return None
                continue
            moved = _moved_type(n, [types.get(o) for o in n.operands], types[source], f)
            if moved is None:
                if n.op.name == "concat" and any(o not in types for o in n.operands):
                    continue
                return None
            types[n.result] = moved
            moves.append(n)
            pending.append(n.result)
    all_moved = all(n in moves for source in types for n in source.uses if n.op.name in MOVES)
    return moves if all_moved else None


def _moved_type(n: Node, operands: list[Type | None], source: Type | None, f: QFormat) -> Type | None:
    """Return the type of the result of `n`, which moves a value of type `source`; None if parts cannot be moved so.

    `operands` are the types of all operands of `n`, and None types are as in `_moves`.
    """
    t = n.result.type
    if n.op.name == "transpose":
        last = t.rank - 1
        transposes = tuple(n.attrs["perm"]) == (*range(t.rank - 2), last, last - 1)
        return Type(t.dtype, t.shape, format=f) if source is None and transposes else None
    if t.rank < 3 or not all(operands):
        return None
    try:
        return n.op.infer_types([o for o in operands if o], n.attrs)[0]
    except Mismatch:
        return None


def _reads(n: Node, v: Value, f: QFormat) -> bool:
    """Whether a product reads `v` as its weight, and codes of this format."""
    places = WEIGHTS.get(n.op.name, ())
    return all(i in places for i, o in enumerate(n.operands) if o is v) and not (f.values and n.op.name == "linear")


def _replace(g: Graph, v: Value, assembled: Value, moves: list[Node]) -> None:
    """Make the products that read `v`, directly or through `moves`, read `assembled` instead."""
    new = {v: assembled}
    for n in moves:
        if n.op.name == "transpose":
            new[n.result] = assembled
        else:
            new[n.result] = g.add(n.op, [new[o] for o in n.operands], n.attrs, before=n, loc=n.loc).result
    for old, value in new.items():
        for n in dict.fromkeys(old.uses):
            if n not in moves:
                g.set_operands(n, [value if o is old else o for o in n.operands])
    for n in reversed(moves):
        g.erase(n)


def _reorder(
    g: Graph, v: Value, order: Value, moved: dict[tuple[Value, Value], Value], ops: Mapping[str, OpDef]
) -> None:
    """Make the products of `v` read the columns of their other operand in this order; `moved` caches the results."""
    for n in list(v.uses):
        x = n.operands[0]
        if (x, order) not in moved:
            before = x.node.next if x.node else g.nodes.head
            moved[x, order] = Builder(g, ops, before=before, loc=n.loc).take_columns(x, order)
        g.set_operands(n, [moved[x, order], *n.operands[1:]])
