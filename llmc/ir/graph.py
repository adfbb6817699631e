"""Graphs: ordered lists of nodes over named values, with use lists and without control flow or regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.ir.opdef import OpDef
from llmc.ir.qformat import QFormat
from llmc.ir.types import Type


@dataclass(eq=False)
class Value:
    """A named value: a graph input (`node` is None) or a result of `node`.

    `weight` marks inputs known at compile time; their name is the tensor's name in the checkpoint. `uses` has one entry
    per operand position that reads the value.
    """

    type: Type
    name: str = ""
    node: Node | None = None
    uses: list[Node] = field(default_factory=list)
    weight: bool = False

    def __repr__(self) -> str:
        return f"%{self.name or '_'}: {self.type}"


@dataclass(eq=False)
class Node:
    """An op applied to values.

    `loc` is the module path that the node was traced from. `choice` is the kernel and schedule written by the `select`
    pass (kernel="cpu/linear", ...), empty before it; it never changes what the node computes.
    """

    op: OpDef
    operands: list[Value]
    attrs: dict[str, Any]
    results: list[Value]
    loc: str = ""
    choice: dict[str, Any] = field(default_factory=dict)
    prev: Node | None = None
    next: Node | None = None

    @property
    def result(self) -> Value:
        """The result of a node with exactly one; raises ValueError for a node with several."""
        (r,) = self.results
        return r

    def operand(self, name: str) -> Value | None:
        """Return the operand of that name in the op's signature, or None if the node lacks it."""
        at = self.op.places([v.type for v in self.operands]).get(name)
        return None if at is None else self.operands[at]

    def __repr__(self) -> str:
        return f"<{self.op.name} at {self.loc or '?'}>"


class NodeList:
    """The nodes of a graph in order: a doubly linked list, with constant-time insertion and removal anywhere."""

    def __init__(self) -> None:
        self.head: Node | None = None
        self.tail: Node | None = None
        self.count = 0

    def __iter__(self) -> Iterator[Node]:
        n = self.head
        while n is not None:
            following = n.next
            yield n
            n = following

    def __reversed__(self) -> Iterator[Node]:
        n = self.tail
        while n is not None:
            before = n.prev
            yield n
            n = before

    def __len__(self) -> int:
        return self.count

    def insert(self, node: Node, before: Node | None) -> None:
        """Insert `node` before `before`, or at the end if that is None."""
        after = self.tail if before is None else before.prev
        node.prev, node.next = after, before
        if after is None:
            self.head = node
        else:
            after.next = node
        if before is None:
            self.tail = node
        else:
            before.prev = node
        self.count += 1

    def remove(self, node: Node) -> None:
        """Unlink `node`. The current node may be removed during iteration."""
        if node.prev is None:
            self.head = node.next
        else:
            node.prev.next = node.next
        if node.next is None:
            self.tail = node.prev
        else:
            node.next.prev = node.prev
        node.prev = node.next = None
        self.count -= 1


@dataclass(eq=False)
class Graph:
    """Inputs, nodes in execution order, and outputs.

    `ranges` narrows the bounds of symbols to the sizes that this graph is specialized for.
    """

    name: str
    inputs: list[Value] = field(default_factory=list)
    nodes: NodeList = field(default_factory=NodeList)
    outputs: list[Value] = field(default_factory=list)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def values(self) -> Iterator[Value]:
        """The inputs, and the results of all nodes, in order of definition."""
        yield from self.inputs
        for n in self.nodes:
            yield from n.results

    def input(self, name: str, type: Type, weight: bool = False) -> Value:
        """Append an input and return its value."""
        v = Value(type, name, weight=weight)
        self.inputs.append(v)
        return v

    def add(
        self,
        op: OpDef,
        operands: Sequence[Value],
        attrs: Mapping[str, Any] | None = None,
        before: Node | None = None,
        loc: str = "",
        names: Sequence[str] = (),
    ) -> Node:
        """Append a node, or insert it before `before`; raises Mismatch if the operand types do not fit the op."""
        full = op.normal_attrs(attrs or {})
        types = op.infer_types([v.type for v in operands], full)
        node = Node(op, list(operands), full, [], loc)
        node.results = [Value(t, names[i] if i < len(names) else "", node) for i, t in enumerate(types)]
        for v in operands:
            v.uses.append(node)
        self.nodes.insert(node, before)
        return node

    def replace(self, old: Value, new: Value) -> None:
        """Make all readers of `old`, including the graph's outputs, read `new`."""
        if old is new:
            return
        for user in set(old.uses):
            user.operands = [new if v is old else v for v in user.operands]
        new.uses += old.uses
        old.uses = []
        self.outputs = [new if v is old else v for v in self.outputs]

    def replace_node(self, node: Node, *values: Value) -> None:
        """Make all readers of a node's results read `values`, which take their names, and erase the node."""
        for old, new in zip(node.results, values, strict=True):
            new.name = old.name
            self.replace(old, new)
        self.erase(node)

    def replace_op(self, node: Node, op: OpDef, operands: Sequence[Value], attrs: Mapping[str, Any]) -> Node:
        """Replace a node by one of another op; place, names, module path and kernel choice are kept.

        Raises Mismatch if the operand types do not fit the op.
        """
        new = self.add(op, operands, attrs, node, node.loc)
        new.choice = dict(node.choice)
        self.replace_node(node, *new.results)
        return new

    def erase_unused(self) -> None:
        """Erase all nodes whose results have no uses."""
        for n in reversed(self.nodes):
            if not self.is_used(n):
                self.erase(n)

    @staticmethod
    def set_operands(node: Node, operands: Sequence[Value]) -> None:
        """Make `node` read other values, of types that leave its result types as they are."""
        for v in node.operands:
            v.uses.remove(node)
        node.operands = list(operands)
        for v in operands:
            v.uses.append(node)

    def erase(self, node: Node) -> None:
        """Remove a node whose results have no uses; raises AssertionError otherwise."""
        assert not any(r.uses for r in node.results), f"{node.op.name}: erasing a node in use"
        assert not any(r in self.outputs for r in node.results), f"{node.op.name}: erasing an output"
        for v in node.operands:
            v.uses.remove(node)
        self.nodes.remove(node)

    def move_before(self, node: Node, other: Node | None) -> None:
        """Move `node` in front of `other`, or to the end if that is None."""
        self.nodes.remove(node)
        self.nodes.insert(node, other)

    def is_used(self, node: Node) -> bool:
        """Whether a result of `node` is read by another node or is an output."""
        return any(r.uses or r in self.outputs for r in node.results)

    def copy(self, name: str | None = None) -> Graph:
        """Return a deep copy; ops and types are shared."""
        out = Graph(name or self.name, ranges=dict(self.ranges))
        env: dict[Value, Value] = {v: out.input(v.name, v.type, v.weight) for v in self.inputs}
        for n in self.nodes:
            new = Node(n.op, [env[v] for v in n.operands], dict(n.attrs), [], n.loc, dict(n.choice))
            new.results = [Value(r.type, r.name, new) for r in n.results]
            for v in new.operands:
                v.uses.append(new)
            out.nodes.insert(new, None)
            env |= dict(zip(n.results, new.results, strict=True))
        out.outputs = [env[v] for v in self.outputs]
        return out


def inputs_of(value: Value) -> list[Value]:
    """Return the graph inputs from which a value is computed, in the order in which they are first used."""
    if value.node is None:
        return [value]
    return list(dict.fromkeys(v for operand in value.node.operands for v in inputs_of(operand)))


WEIGHTS = "weights"  # the graph that is evaluated when weights are packed, and never launched


@dataclass(eq=False)
class Module:
    """Graphs that share symbols (name to inclusive bounds)."""

    graphs: dict[str, Graph] = field(default_factory=dict)
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def formats(self) -> Mapping[str, QFormat]:
        """The quantised formats of the graphs' values by name, in order of appearance."""
        formats = (v.type.format for g in self.graphs.values() for v in g.values)
        return {format.name: format for format in formats if format}

    @property
    def launched(self) -> list[Graph]:
        """The graphs that become programs: all except @weights."""
        return [g for name, g in self.graphs.items() if name != WEIGHTS]

    def bounds(self, g: Graph) -> dict[str, tuple[int, int]]:
        """Return the symbols' inclusive bounds within graph `g`."""
        return self.symbols | g.ranges

    def find(self, *ops: str) -> list[tuple[Graph, Node]]:
        """Return (graph, node) for all nodes of these ops, in order. The list stays valid when nodes are erased."""
        return [(g, n) for g in self.graphs.values() for n in g.nodes if n.op.name in ops]

    def clone(self) -> Module:
        """Return a deep copy."""
        return Module({k: g.copy() for k, g in self.graphs.items()}, dict(self.symbols))


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [*stack, n, k] in a format: its codes, scales and, if the format has them, zero points.

    order: i32[k], column j of the codes is column order[j] of the weight; None if the order is the same. transposed:
    the weight is [*stack, k, n], the transpose of the dequantised parts. count: the number of stored weights that it
    joins.
    """

    format: QFormat
    parts: tuple[Value, ...]
    order: Value | None = None
    transposed: bool = False
    count: int = 1


class Builder:
    """Adds nodes by op name: `b.rms_norm(x, w, eps=1e-6)` returns the result, or a tuple if there are several."""

    def __init__(self, graph: Graph, ops: Mapping[str, OpDef], before: Node | None = None, loc: str = ""):
        """Add nodes to `graph` before `before` (None: at the end), with the module path `loc`."""
        self.graph, self.ops, self.before, self.loc = graph, ops, before, loc

    def __getattr__(self, name: str) -> Any:
        """Return a function that adds a node of the op with this name; a trailing underscore is dropped."""
        if name.startswith("__") or name.rstrip("_") not in self.ops:
            raise AttributeError(f"there is no op {name!r}")
        op = self.ops[name.rstrip("_")]

        def build(*operands: Value, **attrs: Any) -> Any:
            return self.emit(op, operands, attrs)

        return build

    def emit(self, op: OpDef, operands: Sequence[Value], attrs: Mapping[str, Any], names: Sequence[str] = ()) -> Any:
        """Add a node and return its result, or a tuple if there are several."""
        node = self.graph.add(op, operands, attrs, self.before, self.loc, names)
        return node.results[0] if len(node.results) == 1 else tuple(node.results)

    def constant(self, value: float | int | bool, dtype: str) -> Value:
        """Add a rank-0 constant."""
        return self.emit(self.ops["constant"], (), {"value": float(value), "dtype": dtype})
