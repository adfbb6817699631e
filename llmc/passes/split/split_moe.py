"""Splits a mixture of experts into three ops over (token, expert) pairs sorted by expert, one launch each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.base import Ctx, NodePass, NoMatch
from llmc.passes.rewrite import substitute


@dataclass(frozen=True)
class SplitMoe(NodePass):
    """Replace moe by moe_route, moe_up, moe_down and the sum over a token's experts.

    quantized: only those whose experts are quantised.
    """

    name: ClassVar[str] = "split-moe"
    ops: ClassVar[tuple[str, ...]] = ("moe",)
    quantized: bool = False

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite one node; return whether it was split."""
        x, idx, weights, gate_up, down, *biases = n.operands
        k, experts = idx.type.shape[1].const, down.type.shape[0].const
        if self.quantized and not (gate_up.type.format or down.type.format):
            return False
        if k is None or experts is None:
            raise NoMatch("the number of experts is not constant")
        if not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        order, starts = b.moe_route(idx, experts=experts)
        h = b.moe_up(x, order, starts, gate_up, *biases[:1], k=k, body=n.attrs["body"])
        y = b.sum(b.moe_down(h, order, starts, down, weights, *biases[1:]), axis=1)
        substitute(g, n, [y if x.type.dtype == "f32" else b.cast(y, dtype=x.type.dtype)], self.name)
        return True
