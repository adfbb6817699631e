"""Moves computations that depend only on weights to the graph @weights, which is evaluated at compile time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import WEIGHTS, Graph, Module, Node, Value
from llmc.passes.analysis import Origin, origin, weight_only
from llmc.passes.base import Ctx, Pass


@dataclass(frozen=True)
class LiftWeights(Pass):
    """Move weight-only nodes of every entry point to @weights, merging equal ones.

    Entry points read its outputs by name. A weight that is used unchanged passes through.
    """

    name: ClassVar[str] = "lift-weights"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Move nodes of every launched graph to @weights; return the number of changes."""
        entries = m.launched
        if not any(v.weight for g in entries for v in g.inputs) or WEIGHTS in m.graphs or not ctx.spend():
            return 0
        lifted = _Lifted(Graph(WEIGHTS))
        done = sum(_lift(g, lifted) for g in entries)
        m.graphs[WEIGHTS] = lifted.graph
        return done + 1


class _Lifted:
    """@weights under construction: equal nodes are merged, and every output has a unique name."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.inputs: dict[str, Value] = {}
        self.nodes: dict[Any, Node] = {}
        self.names: dict[Value, str] = {}
        self.taken: set[str] = set()

    def take(self, v: Value, copies: dict[Value, Value]) -> Value:
        """Copy `v` of an entry point, with everything it depends on, and return the copy."""
        if v not in copies:
            if v.node is None:
                copies[v] = self.inputs.get(v.name) or self._input(v)
            else:
                self._node(v.node, copies)
        return copies[v]

    def _input(self, v: Value) -> Value:
        self.inputs[v.name] = self.graph.input(v.name, v.type, weight=True)
        return self.inputs[v.name]

    def _node(self, n: Node, copies: dict[Value, Value]) -> None:
        operands = [self.take(v, copies) for v in n.operands]
        key = (n.op.name, tuple(map(id, operands)), repr(n.attrs))
        if key not in self.nodes:
            self.nodes[key] = self.graph.add(n.op, operands, n.attrs, loc=n.loc)
        copies.update(zip(n.results, self.nodes[key].results, strict=True))

    def output(self, v: Value, inner: Value) -> str:
        """Return the name of output `inner`; a weight that passes through keeps its checkpoint name."""
        if inner not in self.names:
            base = inner.name
            if inner.node is not None and v.node is not None:
                base = f"{_origin(v)}.{v.node.op.name}"
            name, n = base, 1
            while name in self.taken or (inner.node is not None and name in self.inputs):
                n += 1
                name = f"{base}.{n}"
            self.taken.add(name)
            self.names[inner] = inner.name = name
            self.graph.outputs.append(inner)
        return self.names[inner]


def _origin(v: Value) -> str:
    """Return the name of the first weight that a value depends on."""
    while v.node is not None:
        v = next((o for o in v.node.operands if origin(o) is Origin.WEIGHTS), v.node.operands[0])
    return v.name


def _lift(g: Graph, lifted: _Lifted) -> int:
    """Move the weight-only nodes of one entry point; return how many there were.

    A value that is used outside of the weight-only part (by another node, or as an output of `g`) becomes an output of
    @weights, and an input of `g` of that name. Equal nodes share one output, and so one input.
    """
    lifted_values = weight_only(g)
    lifted_nodes = [n for n in g.nodes if n.results[0] in lifted_values]
    outputs = set(g.outputs)
    boundary = [v for v in g.values if v in lifted_values and (v in outputs or _readers(v, lifted_values))]
    copies: dict[Value, Value] = {}
    new_inputs: dict[str, Value] = {}
    other_inputs = [v for v in g.inputs if not v.weight]
    for v in boundary:
        name = lifted.output(v, lifted.take(v, copies))
        new = new_inputs.setdefault(name, Value(v.type, name, weight=True))
        readers = _readers(v, lifted_values)
        for reader in set(readers):
            reader.operands = [new if operand is v else operand for operand in reader.operands]
        new.uses += readers
        v.uses = [u for u in v.uses if u.results[0] in lifted_values]
        g.outputs = [new if output is v else output for output in g.outputs]
    g.inputs = [*other_inputs, *new_inputs.values()]
    for n in reversed(lifted_nodes):
        g.erase(n)
    return len(lifted_nodes)


def _readers(v: Value, lifted_values: Collection[Value]) -> list[Node]:
    """Return the uses of a value by nodes that stay in the entry point."""
    return [u for u in v.uses if u.results[0] not in lifted_values]
