"""Gathers along the first axis, as NCCL does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.dim import product
from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.base import Ctx, NodePass
from llmc.passes.rewrite import substitute


@dataclass(frozen=True)
class GatherFirst(NodePass):
    """Replace an all_gather along another axis by one along the first axis and a transposition.

    Axes of one element do not count. NCCL concatenates the ranks' operands as they are in memory. The pass runs after
    `shard`, with --collectives nccl.
    """

    name: ClassVar[str] = "gather-first"
    ops: ClassVar[tuple[str, ...]] = ("all_gather",)

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Replace a node unless it gathers along the first axis already; return whether it was replaced."""
        (x,), ranks = n.operands, n.attrs["ranks"]
        shape, axis = x.type.shape, n.attrs["axis"] % x.type.rank
        if product(shape[:axis]).const == 1 or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        parts = b.reshape(b.all_gather(x, axis=0, ranks=ranks), shape=(ranks, *shape))
        ordered = b.transpose(parts, perm=(*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)))
        substitute(g, n, [b.reshape(ordered, shape=n.result.type.shape)], self.name)
        return True
