"""Gives the quantised weights of a checkpoint a quantised type in the graph, instead of their dequantised numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from llmc.ir.graph import Builder, Graph, Module, Value
from llmc.ir.opdef import OpDef
from llmc.ir.qformat import QFormat
from llmc.ir.types import Type, tensor


class QuantisedSource(Protocol):
    """A checkpoint of which some weights can be read as parts."""

    formats: dict[str, QFormat]
    orders: dict[str, str]

    def part_types(self, name: str) -> Mapping[str, Type]:
        """Return the types of a weight's codes, scales and zeros by the names under which they are read."""


def use_codes(m: Module, source: QuantisedSource, ops: Mapping[str, OpDef]) -> int:
    """Replace weights of @main that only products read by `assemble` of their parts; return how many there were.

    Other readers, such as an embedding that shares its table with the output projection, take the dequantised numbers.
    """
    g = m.graphs["main"]
    done = 0
    orders: dict[str, Value] = {}
    moved: dict[tuple[Value, Value], Value] = {}
    for v in list(g.inputs):
        if not (v.weight and v.name in source.formats and _only_in_products(v)):
            continue
        f = source.formats[v.name]
        parts = [g.input(name, t, weight=True) for name, t in source.part_types(v.name).items()]
        b: Any = Builder(g, ops, before=g.nodes.head, loc=v.uses[0].loc)
        whole = b.assemble(*parts, code=f.code, block=f.block, zero=f.zero, act=f.act, dtype=v.type.dtype)
        if name := source.orders.get(v.name):
            if name not in orders:
                orders[name] = g.input(name, tensor("i32", v.type.shape[1]), weight=True)
            _reorder(g, v, orders[name], moved, ops)
        g.replace(v, whole)
        g.inputs.remove(v)
        done += 1
    return done


def _reorder(
    g: Graph, v: Value, order: Value, moved: dict[tuple[Value, Value], Value], ops: Mapping[str, OpDef]
) -> None:
    """Let the products of `v` read the columns of their other operand in this order; `moved` keeps what they read."""
    for n in list(v.uses):
        x = n.operands[0]
        if (x, order) not in moved:
            before = x.node.next if x.node else g.nodes.head
            moved[x, order] = Builder(g, ops, before=before, loc=n.loc).take_columns(x, order)
        g.set_operands(n, [moved[x, order], *n.operands[1:]])


def _only_in_products(v: Value) -> bool:
    return bool(v.uses) and all(u.op.name == "linear" and u.operands[0] is not v for u in v.uses)
