"""Experts as three ops over pairs in the order of the experts, each of which one launch can do well; no kernel here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node

from .base import Ctx, Pass
from .rewrite import substitute


@dataclass(frozen=True)
class SplitMoe(Pass):
    """moe -> moe_route, moe_up, moe_down and the sum over a token's experts."""

    name: ClassVar[str] = "split-moe"

    def run(self, m: Module, ctx: Ctx) -> int:
        return sum(self.split(g, n, ctx) for g in m.graphs.values() for n in list(g.nodes) if n.op.name == "moe")

    def split(self, g: Graph, n: Node, ctx: Ctx) -> bool:
        """Rewrite one node; note why not where it cannot be."""
        x, idx, weights, gate_up, down, *biases = n.operands
        k, experts = idx.type.shape[1].const, down.type.shape[0].const
        if not ctx.allows(n):
            return False
        if k is None or experts is None:
            ctx.miss(self.name, n, "the number of experts is not constant")
            return False
        if not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        order, starts = b.moe_route(idx, experts=experts)
        h = b.moe_up(x, order, starts, gate_up, *biases[:1], k=k, body=n.attrs["body"])
        y = b.sum(b.moe_down(h, order, starts, down, weights, *biases[1:]), axis=1)
        substitute(g, n, [y if x.type.dtype == "f32" else b.cast(y, dtype=x.type.dtype)], self.name)
        return True
