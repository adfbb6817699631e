"""Split-k: divides the depth of products that would have too few tiles to occupy a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.base import Ctx, NodePass
from llmc.passes.rewrite import substitute

TILE = 128  # tokens, and weight rows, of a large tile
MIN_DEPTH = 1024  # minimum columns of a part
MAX_WAVES = 1.1  # maximum waves of tiles; slightly more than one wave costs little
DTYPES = ("bf16", "f16", "f8e4m3", "f8e4m3fnuz", "i8")


def max_tokens(m: Module, g: Graph, n: Node) -> int:
    """Return the maximum number of tokens (rows of x) of a product."""
    return math.prod(d.bounds(m.bounds(g))[1] for d in n.operands[0].type.shape[:-1])


@dataclass(frozen=True)
class SplitK(NodePass):
    """Split linear, and linear_map with one part, along the depth into linear_split and linear_combine.

    Applies in graphs of more than `above` tokens if the product's tiles would leave multiprocessors idle. With fewer
    tokens, the product is memory-bound, and narrow tiles read weights fast enough. splits: number of parts (0: the
    largest power of two whose tiles run in one wave).
    """

    name: ClassVar[str] = "split-k"
    ops: ClassVar[tuple[str, ...]] = ("linear", "linear_map")
    splits: int = 0
    above: int = 128

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite one node if more parts are needed to occupy the GPU; return whether it was rewritten."""
        if n.attrs.get("parts", 1) != 1:
            return False
        x, w, *extras = n.operands
        tokens, (rows, depth) = max_tokens(m, g, n), (d.const for d in w.type.shape)
        if tokens <= self.above or not rows or not depth or w.type.format:
            return False
        parts = self.splits or self.choose(n, tokens, rows, depth, ctx)
        if parts < 2 or depth % parts or not x.type.dtype == w.type.dtype in DTYPES or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        body, dtype = n.attrs.get("body", "a0"), n.result.type.dtype
        partial = b.linear_split(x, w, splits=parts)
        substitute(g, n, [b.linear_combine(partial, *extras, dtype=dtype, body=body)], self.name)
        return True

    def choose(self, n: Node, tokens: int, rows: int, depth: int, ctx: Ctx) -> int:
        """Return the largest power of two whose tiles run in about one wave; parts have at least MIN_DEPTH columns."""
        units = ctx.target.limits.units if ctx.target else 0
        if not units:
            ctx.miss(self.name, n, "the target does not declare its number of multiprocessors")
            return 1
        blocks, parts = -(-tokens // TILE) * -(-rows // TILE), 1
        while (
            2 * parts * blocks <= MAX_WAVES * units and depth % (2 * parts) == 0 and depth // (2 * parts) >= MIN_DEPTH
        ):
            parts *= 2
        return parts
