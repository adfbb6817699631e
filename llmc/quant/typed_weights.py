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
    done = 0
    orders: dict[str, Value] = {}
    moved: dict[tuple[Value, Value], Value] = {}
    for v in list(g.inputs):
        if not (v.weight and v.uses and v.name in source.formats):
            continue
        f, transposed = source.formats[v.name], v.name in source.transposed
        moves = _moves(v, f, transposed)
        if moves is None:
            continue
        parts = [g.input(name, t, weight=True) for name, t in source.part_types(v.name).items()]
        b: Any = Builder(g, ops, before=g.nodes.head, loc=v.uses[0].loc)
        whole = b.assemble(*parts, code=f.code, block=f.block, zero=f.zero, act=f.act, dtype=v.type.dtype)
        if name := source.orders.get(v.name):
            if name not in orders:
                orders[name] = g.input(name, tensor("i32", v.type.shape[1]), weight=True)
            _reorder(g, v, orders[name], moved, ops)
        _replace(g, v, whole, moves)
        g.inputs.remove(v)
        done += source.counts[v.name]
    return done


def _moves(v: Value, f: QFormat, transposed: bool) -> list[Node] | None:
    """The nodes that move a weight on its way to products, in order; None if it has other readers.

    A weight that is the transpose of its parts has only readers that transpose it back.
    """
    types = {v: None if transposed else Type(v.type.dtype, v.type.shape, format=f)}
    moves: list[Node] = []
    todo = [v]
    while todo:
        u = todo.pop(0)
        for n in dict.fromkeys(u.uses):
            if n in moves:
                continue
            if n.op.name not in MOVES:
                if types[u] is None or not _reads(n, u, f):
                    return None
                continue
            t = _moved_type(n, [types.get(o) for o in n.operands], types[u], f)
            if t is None:
                if n.op.name == "concat" and any(o not in types for o in n.operands):
                    continue  # until the other operands are known
                return None
            types[n.result] = t
            moves.append(n)
            todo.append(n.result)
    whole = all(n in moves for u in types for n in u.uses if n.op.name in MOVES)
    return moves if whole else None


def _moved_type(n: Node, operands: list[Type | None], of: Type | None, f: QFormat) -> Type | None:
    """The type of a moved stack; None if the parts cannot be moved so."""
    t = n.result.type
    if n.op.name == "transpose":
        last = t.rank - 1
        back = tuple(n.attrs["perm"]) == (*range(t.rank - 2), last, last - 1)
        return Type(t.dtype, t.shape, format=f) if of is None and back else None
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


def _replace(g: Graph, v: Value, whole: Value, moves: list[Node]) -> None:
    """Make the products that read `v`, directly or through `moves`, read `whole` instead."""
    new = {v: whole}
    for n in moves:
        if n.op.name == "transpose":
            new[n.result] = whole
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
