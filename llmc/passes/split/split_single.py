"""Moves the decoding rows of mixed batches to a separate attention op, because their attention is memory-bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.base import Ctx, Pass
from llmc.passes.rewrite import substitute


@dataclass(frozen=True)
class SplitSingle(Pass):
    """Compute single-token rows of mixed batches with paged_attention_single.

    Applies to graphs with any number of tokens per row; paged_attention then skips those rows.
    """

    name: ClassVar[str] = "split-single"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every graph; return the number of changes."""
        return sum(self.split(g, n, ctx) for g, n in m.find("paged_attention") if _several(m, g, n))

    def split(self, g: Graph, n: Node, ctx: Ctx) -> bool:
        """Rewrite one node, unless it is split already or every row has one token; return whether it was rewritten."""
        q, kv, pages, rows, starts, positions, *rest = n.operands
        if q.type.shape[0] == rows.type.shape[0] or n.attrs["least"] > 1 or not ctx.allows(n) or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        many = b.paged_attention(q, kv, pages, rows, starts, positions, *rest, **{**n.attrs, "least": 2})
        attrs = {key: n.attrs[key] for key in ("scale", "window", "softcap")}
        one = b.paged_attention_single(q, kv, pages, rows, starts, positions, many, *rest, **attrs)
        substitute(g, n, [one], self.name)
        return True


def _several(m: Module, g: Graph, n: Node) -> bool:
    """Whether a batch can have more than one row."""
    return n.operands[3].type.shape[0].bounds(m.bounds(g))[1] > 1
