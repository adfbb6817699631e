"""Separates what chunks of a prompt's recurrence can compute at once from what they must compute one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.base import Ctx, NodePass
from llmc.passes.rewrite import substitute


@dataclass(frozen=True)
class SplitRecurrence(NodePass):
    """Replace row_recurrence and row_recurrence_draft in graphs of prompts by chunk_factors and chunk_recurrence.

    Values of f32 are not split, because tensor cores would round them. chunk: tokens of a chunk. least: tokens of the
    shortest run that is computed in chunks.
    """

    name: ClassVar[str] = "split-recurrence"
    ops: ClassVar[tuple[str, ...]] = ("row_recurrence", "row_recurrence_draft")
    chunk: int = 32
    least: int = 16

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite one node; return whether it was rewritten."""
        beta = n.operand("beta")
        q, k, v, decay, *states, rows, starts, positions = n.operands[: -1 if beta else None]
        channels = decay.type.shape[1] != v.type.shape[1]  # a decay for each channel of a key
        if q.type.dtype == "f32" or channels or q.type.shape[0] == rows.type.shape[0] or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        rest = [beta] if beta else []
        factors = b.chunk_factors(q, k, decay, rows, starts, *rest, chunk=self.chunk, least=self.least)
        build = b.chunk_recurrence if n.op.name == "row_recurrence" else b.chunk_recurrence_draft
        out = build(q, k, v, decay, factors, *states, rows, starts, positions, *rest, least=self.least)
        substitute(g, n, list(out), self.name)
        return True
