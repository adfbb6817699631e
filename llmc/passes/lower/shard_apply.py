"""Applies the plan of a sharding to a graph: nodes over parts of values, and the collectives between them."""

from __future__ import annotations

from typing import Any

from llmc_runtime.format.program import RANK

from llmc.diagnostics import Diagnostic
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.ir.signature import Mismatch
from llmc.passes.base import Ctx
from llmc.passes.lower.finer_blocks import cuttable
from llmc.passes.lower.shard_plan import Plan
from llmc.passes.lower.shard_rules import Relation, Split

SHAPED = ("reshape", "broadcast")  # ops with the attribute shape


def apply_plan(g: Graph, plan: Plan, ranks: int, ctx: Ctx) -> int:
    """Replace the nodes of a graph's plan by nodes over a rank's parts; return the number of nodes that changed.

    Raises Diagnostic E438 if a weight cannot be divided.
    """
    return _Sharding(g, plan, ranks, ctx).apply()


class _Sharding:
    """Replaces the nodes of a plan by nodes over parts."""

    def __init__(self, g: Graph, plan: Plan, ranks: int, ctx: Ctx):
        self.g, self.plan, self.ranks, self.ops = g, plan, ranks, ctx.opset
        self.parts: dict[Value, Value] = {}  # split value -> a rank's part of it
        self.sliced: dict[tuple[Value, Split, bool], Value] = {}
        self.whole: dict[Value, Value] = {}  # gathered values

    def apply(self) -> int:
        """Apply the plan; return the number of nodes that it changes."""
        for v, s in self.plan.splits.items():
            if v.node is None:
                v.type = v.type.with_shape(*_local_shape(v.type.shape, s))
                self.parts[v] = v
        for n in list(self.g.nodes):
            b = Builder(self.g, self.ops, before=n, loc=n.loc)
            if n in self.plan.relations:
                try:
                    self._divide(b, n, self.plan.relations[n])
                except Mismatch as e:
                    remedy = "use fewer ranks, or smaller groups of quantised weights"
                    raise Diagnostic("E438", f"a weight cannot be divided: {e}", remedy, node=n) from None
            elif any(v in self.plan.splits for v in n.operands):
                self.g.set_operands(n, [self._gathered(b, v) for v in n.operands])
        end = Builder(self.g, self.ops)
        self.g.outputs = [v if v.node is None else self._output(end, v) for v in self.g.outputs]
        for n in reversed(list(self.g.nodes)):
            if n in self.plan.relations:
                self.g.erase(n)
        return len(self.plan.relations)

    def _output(self, b: Builder, v: Value) -> Value:
        return self.parts[v] if v.type.state and v in self.parts else self._gathered(b, v)

    def _divide(self, b: Builder, n: Node, r: Relation) -> None:
        """Add the node that computes a rank's part."""
        operands = []
        for i, (v, s) in enumerate(zip(n.operands, r.operands, strict=True)):
            x = self._gathered(b, v) if s is None else self._part(b, v, s, i in r.halves)
            if i == r.bias:
                x = b.mul(x, b.constant(1 / self.ranks, x.type.dtype))
            operands.append(x)
        op, attrs = n.op, dict[str, Any](n.attrs)
        if r.partial and op.name == "take":
            op = self.ops["take_part"]
            attrs = {"start": n.operands[0].type.shape[0].ceildiv(self.ranks) * D(RANK)}
        if n.op.name in SHAPED and r.results[0] is not None:
            attrs["shape"] = _local_shape(n.result.type.shape, r.results[0])
        names = [v.name for v in n.results] if not r.partial else []
        new = self.g.add(op, operands, attrs, n, n.loc, names)
        if not r.partial:
            self.parts |= dict(zip(n.results, new.results, strict=True))
            return
        total: Value = b.all_reduce(new.result, ranks=self.ranks)
        total.name = n.result.name
        self.g.replace(n.result, total)

    def _gathered(self, b: Builder, v: Value) -> Value:
        """Return the whole of a value."""
        if v not in self.parts:
            return v
        if v not in self.whole:
            split = self.plan.splits[v]
            axis, size = split.axis, v.type.shape[split.axis]
            whole: Value = b.all_gather(self.parts[v], axis=axis, ranks=self.ranks)
            self.whole[v] = whole if split.divides(size) else b.slice(whole, axis=axis, start=D(0), stop=size)
        return self.whole[v]

    def _part(self, b: Builder, v: Value, s: Split, halves: bool) -> Value:
        """Return a rank's part of a value, of both halves of it if `halves`."""
        if self.plan.splits.get(v) == s:
            return self.parts[v]
        key = (v, s, halves)
        if key not in self.sliced:
            x, size = self._gathered(b, v), v.type.shape[s.axis]
            if halves:
                half = size.ceildiv(2)
                two = [self._slice(b, x, s, half, at) for at in (D(0), half)]
                self.sliced[key] = b.concat(*two, axis=s.axis)
            else:
                self.sliced[key] = self._slice(b, x, s, size, D(0))
        return self.sliced[key]

    def _slice(self, b: Builder, x: Value, s: Split, size: Dim, offset: Dim) -> Value:
        """Return a rank's part of `size` elements from `offset` along an axis, and zeros if they do not divide."""
        width = s.local(size)
        if not s.divides(size):
            x = self._padded(b, x, s.axis, offset, size, width * s.parts - size)
            offset = D(0)
        part = D(RANK) if s.parts == self.ranks else (D(RANK) + 1).ceildiv(self.ranks // s.parts) - 1
        start = offset + width * part
        x = cuttable(b, x, s.axis, (start, start + width))
        return b.slice(x, axis=s.axis, start=start, stop=start + width)

    def _padded(self, b: Builder, x: Value, axis: int, offset: Dim, size: Dim, zeros: Dim) -> Value:
        """Return `size` elements from `offset` along an axis, and zeros after them."""
        if size != x.type.shape[axis]:
            x = b.slice(x, axis=axis, start=offset, stop=offset + size)
        shape = (*x.type.shape[:axis], zeros, *x.type.shape[axis + 1 :])
        return b.concat(x, b.broadcast(b.constant(0.0, x.type.dtype), shape=shape), axis=axis)


def _local_shape(shape: tuple[Dim, ...], s: Split) -> tuple[Dim, ...]:
    return (*shape[: s.axis], s.local(shape[s.axis]), *shape[s.axis + 1 :])
