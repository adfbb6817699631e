"""Rows that decode beside prompts get an attention of their own: theirs reads, that of prompts multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node

from .base import Ctx, Pass
from .rewrite import substitute


@dataclass(frozen=True)
class SplitSingle(Pass):
    """In graphs of any tokens a row, paged_attention leaves out rows of one token, and a paged_attention_single puts
    theirs in place."""

    name: ClassVar[str] = "split-single"

    def run(self, m: Module, ctx: Ctx) -> int:
        found = [(g, n) for g in m.graphs.values() for n in list(g.nodes) if n.op.name == "paged_attention"]
        return sum(self.split(g, n, ctx) for g, n in found if _several(m, g, n))

    def split(self, g: Graph, n: Node, ctx: Ctx) -> bool:
        """Rewrite one node, unless every row has one token, or it is split already."""
        q, kv, pages, rows, starts, positions, *sinks = n.operands
        if q.type.shape[0] == rows.type.shape[0] or n.attrs["least"] > 1 or not ctx.allows(n) or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        many = b.paged_attention(q, kv, pages, rows, starts, positions, *sinks, **{**n.attrs, "least": 2})
        attrs = {key: n.attrs[key] for key in ("scale", "window", "softcap")}
        one = b.paged_attention_single(q, kv, pages, rows, starts, positions, many, *sinks, **attrs)
        substitute(g, n, [one], self.name)
        return True


def _several(m: Module, g: Graph, n: Node) -> bool:
    """Whether there can be a row beside a prompt."""
    return n.operands[3].type.shape[0].bounds(m.bounds(g))[1] > 1
