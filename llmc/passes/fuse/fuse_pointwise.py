"""Fuses chains of pointwise and row ops into `fused` ops, so that intermediate values stay in registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.scalar import E, arg, parse_expr, substitute
from llmc.passes.analysis import const_value, rounds_little
from llmc.passes.base import Ctx, Pass


@dataclass(frozen=True)
class FusePointwise(Pass):
    """Fuse pointwise ops, float casts, norms and softmax into groups.

    Groups grow along values with one reader and one shape. limit: maximum number of primitives in a body.
    """

    name: ClassVar[str] = "fuse-pointwise"
    limit: int = 256

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Fuse the groups of a graph; return their number."""
        return _Groups(g, self.limit, ctx).run()


@dataclass
class _Group:
    """A future `fused` op: its expression over `operands`, the nodes it replaces, and its size as a tree."""

    expr: E
    operands: list[Value]
    nodes: list[Node]
    size: int


def expression(n: Node) -> E | None:
    """Return the node's scalar expression if it is a pointwise or row op with one result, else None."""
    if len(n.results) != 1 or n.op.writes:
        return None
    if n.op.name == "cast":
        return arg(0) if rounds_little(n) else None
    if n.op.name == "fused":
        return parse_expr(n.attrs["body"][0])
    return n.op.scalar(n.attrs) if n.op.scalar else None


def _size(e: E) -> int:
    """Return the number of primitives in the printed form of `e`; shared ones count each time they are printed."""
    return 0 if e.fn in ("arg", "const") else 1 + sum(map(_size, e.args))


def _fits(v: Value) -> bool:
    """Whether a group may read or compute the value: floats or booleans, neither quantised nor a state."""
    return DTYPES[v.type.dtype].kind in "fb" and v.type.format is None and not v.type.state


class _Groups:
    """Grows groups of fusible nodes in execution order, then emits one `fused` op per group."""

    def __init__(self, g: Graph, limit: int, ctx: Ctx):
        self.g, self.limit, self.ctx = g, limit, ctx
        self.group_of: dict[Value, _Group] = {}

    def run(self) -> int:
        """Grow and emit the groups; return how many have more than one node."""
        for n in self.g.nodes:
            e = expression(n)
            if e is not None and all(map(_fits, [*n.operands, *n.results])) and self.ctx.allows(n):
                self._add(n, e)
        emitted: dict[Value, Value] = {}
        for v, group in self.group_of.items():
            if len(group.nodes) > 1 and self.ctx.spend():
                group.operands = [emitted.get(o, o) for o in group.operands]
                emitted[v] = _emit(self.g, v, group, self.ctx.opset)
        return len(emitted)

    def _add(self, n: Node, e: E) -> None:
        """Start the group of `n`, merging the groups of operands that only `n` reads."""
        y = n.results[0]
        group = _Group(e, [], [n], 0)
        inner: list[E] = []
        inlined: dict[Value, E] = {}
        for v in n.operands:
            if v in inlined:
                inner.append(inlined[v])
                continue
            producer = self.group_of.get(v)
            if producer and self._joins(n, v, producer):
                inlined[v] = substitute(producer.expr, [_operand(group, o) for o in producer.operands])
                group.nodes += producer.nodes
                inner.append(inlined[v])
            else:
                value = const_value(v)
                inner.append(E("const", (value,)) if value is not None else _operand(group, v))
        group.expr = substitute(e, inner)
        group.size = _size(group.expr)
        if group.size > self.limit:
            return
        for v in inlined:
            del self.group_of[v]
        self.group_of[y] = group

    def _joins(self, n: Node, v: Value, producer: _Group) -> bool:
        """Whether the group that computes `v` merges into that of `n`: only `n` reads `v`, and the shapes are equal."""
        y = n.results[0]
        if any(u is not n for u in v.uses) or v in self.g.outputs:
            self.ctx.miss(FusePointwise.name, n, f"{producer.nodes[0].op.name} has {len(v.uses)} users")
            return False
        return v.type.shape == y.type.shape


def _operand(group: _Group, v: Value) -> E:
    """Return the argument of the group's expression that stands for `v`, adding `v` to the operands if it is new."""
    if v not in group.operands:
        group.operands.append(v)
    return arg(group.operands.index(v))


def _emit(g: Graph, v: Value, group: _Group, ops: Mapping[str, OpDef]) -> Value:
    """Replace the nodes of a group by one `fused` node; return its result, which replaces `v`."""
    n = group.nodes[0]  # the node that computes `v`; those whose results it reads follow
    attrs = {"body": [str(group.expr)], "dtypes": [v.type.dtype]}
    new = g.add(ops["fused"], group.operands, attrs, before=n, loc=n.loc, names=[v.name]).result
    g.replace(v, new)
    for old in group.nodes:
        g.erase(old)
    return new
