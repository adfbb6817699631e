"""Gives the quantised weights of a checkpoint a quantised type in the graph, instead of their dequantised numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from llmc.ir.graph import Builder, Graph, Module, Value
from llmc.ir.opdef import OpDef
from llmc.ir.qformat import QFormat
from llmc.ir.types import Type


class QuantisedSource(Protocol):
    """A checkpoint of which some weights can be read as parts."""

    formats: dict[str, QFormat]

    def part_types(self, name: str) -> Mapping[str, Type]:
        """Return the types of a weight's codes, scales, zeros and order; the part p is read as NAME.p."""


def use_codes(m: Module, source: QuantisedSource, ops: Mapping[str, OpDef]) -> int:
    """Replace weights of @main that only products read by `assemble` of their parts; return how many there were.

    Other readers, such as an embedding that shares its table with the output projection, take the dequantised numbers.
    """
    g = m.graphs["main"]
    done = 0
    for v in list(g.inputs):
        if not (v.weight and v.name in source.formats and _only_in_products(v)):
            continue
        f = source.formats[v.name]
        parts = {part: g.input(f"{v.name}.{part}", t, weight=True) for part, t in source.part_types(v.name).items()}
        order = parts.pop("order", None)
        b: Any = Builder(g, ops, before=next(iter(g.nodes)), loc=v.uses[0].loc)
        whole = b.assemble(*parts.values(), code=f.code, block=f.block, zero=f.zero, dtype=v.type.dtype)
        if order is not None:
            _reorder(g, v, order, ops)
        g.replace(v, whole)
        g.inputs.remove(v)
        done += 1
    return done


def _reorder(g: Graph, v: Value, order: Value, ops: Mapping[str, OpDef]) -> None:
    """Let the products of `v` read the columns of their other operand in this order."""
    moved: dict[Value, Value] = {}
    for n in list(v.uses):
        x = n.operands[0]
        if x not in moved:
            moved[x] = Builder(g, ops, before=n, loc=n.loc).take_columns(x, order)
        g.set_operands(n, [moved[x], *n.operands[1:]])


def _only_in_products(v: Value) -> bool:
    return bool(v.uses) and all(u.op.name == "linear" and u.operands[0] is not v for u in v.uses)
