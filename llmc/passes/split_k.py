"""Products of many tokens that have too few tiles for a GPU, in parts of their depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node

from .base import Ctx, Pass
from .rewrite import substitute

TILE = 128  # tokens and weight rows of a large tile
LEAST = 1024  # columns of a part
CROWD = 1.1  # rounds of tiles over the multiprocessors: a few more than one do no harm
WIDE = ("bf16", "f16")


@dataclass(frozen=True)
class SplitK(Pass):
    """linear and linear_map of one part become linear_split and linear_combine in graphs of more than `above` tokens at
    most, where their tiles would leave multiprocessors idle. With fewer tokens the weights are what takes the time, and
    narrow tiles read them well. splits: the parts (0: as many, a power of two, as keep all multiprocessors busy)."""

    name: ClassVar[str] = "split-k"
    splits: int = 0
    above: int = 128

    def run(self, m: Module, ctx: Ctx) -> int:
        done = 0
        for g in m.graphs.values():
            found = [n for n in list(g.nodes) if n.op.name in ("linear", "linear_map") and n.attrs.get("parts", 1) == 1]
            done += sum(self.split(g, n, self.most(m, g, n), ctx) for n in found)
        return done

    def most(self, m: Module, g: Graph, n: Node) -> int:
        """The most tokens that a product has."""
        tokens = 1
        for d in n.operands[0].type.shape[:-1]:
            tokens *= d.bounds(m.bounds(g))[1]
        return tokens

    def split(self, g: Graph, n: Node, tokens: int, ctx: Ctx) -> bool:
        """Rewrite one node where it pays."""
        x, w, *extras = n.operands
        rows, depth = (d.const for d in w.type.shape)
        if tokens <= self.above or not rows or not depth or w.type.format or not ctx.allows(n):
            return False
        parts = self.splits or self.choose(n, tokens, rows, depth, ctx)
        if parts < 2 or depth % parts or not x.type.dtype == w.type.dtype in WIDE or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        body, dtype = n.attrs.get("body", "a0"), n.result.type.dtype
        partial = b.linear_split(x, w, splits=parts)
        substitute(g, n, [b.linear_combine(partial, *extras, dtype=dtype, body=body)], self.name)
        return True

    def choose(self, n: Node, tokens: int, rows: int, depth: int, ctx: Ctx) -> int:
        """The largest power of two whose tiles do not crowd the multiprocessors."""
        units = ctx.target.limits.units if ctx.target else 0
        if not units:
            ctx.miss(self.name, n, "the target does not say how many multiprocessors it has")
            return 1
        blocks, parts = -(-tokens // TILE) * -(-rows // TILE), 1
        while 2 * parts * blocks <= CROWD * units and depth % (2 * parts) == 0 and depth // (2 * parts) >= LEAST:
            parts *= 2
        return parts
