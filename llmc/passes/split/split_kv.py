"""Flash-decoding: splits decode attention along the keys, so that a few long rows occupy a whole GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.dim import Bounds
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.ops.attention import SHARED_ATTRIBUTES
from llmc.passes.base import Ctx, NodePass
from llmc.passes.rewrite import substitute

MAX_PARTS = 64  # maximum number of parts, all read at once by the combining program
NARROW_HEAD = 64  # heads of up to this many elements need twice the programs to read at the full bandwidth
LATENT_HEADS = 64  # heads of a program of latent attention
PART_TOKENS = 512  # tokens of a fixed part, a multiple of every kernel's tile of keys


def fixed_part(kv: Value, pages: Value) -> int:
    """Return the tokens of a fixed part: PART_TOKENS, doubled until the longest row has at most MAX_PARTS."""
    part = PART_TOKENS
    longest = (pages.type.shape[1].const or 0) * int(kv.type.shape[3])
    while part * MAX_PARTS < longest:
        part *= 2
    return part


@dataclass(frozen=True)
class SplitKv(NodePass):
    """Split paged_attention into paged_attention_split and attention_combine in graphs of one token per row.

    paged_latent_attention is split in the same way. The number of parts is constant, so that one launch list serves any
    mixture of lengths.

    splits: number of parts. 1: do not split. 0: a power of two that gives every multiprocessor about `fill` programs,
      or twice as many if heads are narrow. In latent attention, each block of 64 heads is a program of its own.
    fixed: make parts of a fixed number of tokens instead (`fixed_part`), as many as the longest row has, in graphs
      whose rows and key heads are fewer than the multiprocessors.
    """

    name: ClassVar[str] = "split-kv"
    ops: ClassVar[tuple[str, ...]] = ("paged_attention", "paged_latent_attention")
    splits: int = 0
    fill: float = 1.5
    fixed: bool = False

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite one node if more parts are needed to occupy the GPU; return whether it was rewritten."""
        split = self.split if n.op.name == "paged_attention" else self.split_latent
        return g.name.startswith("decode") and split(g, n, m.bounds(g), ctx)

    def split(self, g: Graph, n: Node, bounds: Bounds, ctx: Ctx) -> bool:
        """Split a paged_attention; return whether it was split."""
        q, kv, pages, rows, _, positions, *_ = n.operands
        if q.type.shape[0] != rows.type.shape[0]:
            return False
        parts = self.splits or (self.count(n, bounds, ctx) if self.fixed else self.choose(n, bounds, ctx))
        if parts < 2 or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        attrs = {key: n.attrs[key] for key in SHARED_ATTRIBUTES} | {"splits": parts}
        scales, sinks = ([v] if (v := n.operand(name)) else [] for name in ("scales", "sinks"))
        operands = (q, kv, pages, rows, positions, *scales)
        if self.fixed:
            partial, lse = b.paged_attention_parts(*operands, part=fixed_part(kv, pages), **attrs)
        else:
            partial, lse = b.paged_attention_split(*operands, **attrs)
        substitute(g, n, [b.attention_combine(partial, lse, *sinks, dtype=q.type.dtype)], self.name)
        return True

    def split_latent(self, g: Graph, n: Node, bounds: Bounds, ctx: Ctx) -> bool:
        """Split a paged_latent_attention, which has no fixed parts; return whether it was split."""
        q, rotary, pool, pages, rows, _, positions = n.operands
        if self.fixed:
            return False
        blocks = -(-int(q.type.shape[1]) // LATENT_HEADS)
        # A program of 64 heads fills a multiprocessor.
        fill = 1.0 if int(q.type.shape[1]) > LATENT_HEADS // 2 else self.fill
        parts = self.splits or self.parts(n, rows.type.shape[0].bounds(bounds), blocks, pages, fill, ctx)
        if parts < 2 or not ctx.spend():
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        operands = (q, rotary, pool, pages, rows, positions)
        partial, lse = b.paged_latent_attention_split(*operands, scale=n.attrs["scale"], splits=parts)
        substitute(g, n, [b.attention_combine(partial, lse, dtype=q.type.dtype)], self.name)
        return True

    def count(self, n: Node, bounds: Bounds, ctx: Ctx) -> int:
        """Return the number of fixed parts of the longest row; 1 if there are enough programs without parts."""
        _, kv, pages, rows, *_ = n.operands
        units, longest = ctx.target.limits.units if ctx.target else 0, pages.type.shape[1].const
        if not units or not longest:
            ctx.miss(self.name, n, "the number of multiprocessors or the maximum length is not known")
            return 1
        programs = rows.type.shape[0].bounds(bounds)[1] * int(kv.type.shape[2])
        return -(-longest * int(kv.type.shape[3]) // fixed_part(kv, pages)) if programs < units else 1

    def choose(self, n: Node, bounds: Bounds, ctx: Ctx) -> int:
        """Choose the number of parts of paged_attention; unsplit, there are rows x key heads programs."""
        fill = self.fill * (2 if int(n.operands[1].type.shape[4]) <= NARROW_HEAD else 1)
        rows = n.operands[3].type.shape[0].bounds(bounds)
        heads = int(n.operands[1].type.shape[2])
        return self.parts(n, rows, heads, n.operands[2], fill, ctx)

    def parts(self, n: Node, rows: tuple[int, int], blocks: int, pages: Value, fill: float, ctx: Ctx) -> int:
        """Choose the number of parts if there are `blocks` programs a row.

        Rows are estimated as the geometric mean of their bounds. `pages` is the page table.
        """
        units = ctx.target.limits.units if ctx.target else 0
        if not units:
            ctx.miss(self.name, n, "the target does not declare its number of multiprocessors")
            return 1
        programs = math.sqrt(max(1, rows[0]) * max(1, rows[1])) * blocks
        table = pages.type.shape[1].const or MAX_PARTS
        parts = min(fill * units / programs, MAX_PARTS, table)
        if parts >= 2:
            return 1 << int(math.log2(parts))
        return min(2, table) if programs < 2 * units else 1  # unsplit rows are slow if too few hide latency
