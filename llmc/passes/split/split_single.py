"""Moves the decoding rows of mixed batches to a separate attention op, because their attention is memory-bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.ir.ops.attention import SHARED_ATTRIBUTES
from llmc.passes.base import Ctx, NodePass, some_kernel_leads
from llmc.passes.rewrite import substitute

MIXED_TOKENS, MIXED_HEAD = 768, 128  # up to these sizes, one kernel computes prompts and decoding rows


def in_one_launch(n: Node, tokens: int, max_tokens: int = MIXED_TOKENS) -> bool:
    """Whether one kernel computes the prompts and decoding rows of this paged_attention in steps of `tokens` tokens.

    For large heads, its tiles would be too small.
    """
    q, rows = n.operands[0].type.shape, n.operands[3].type.shape[0]
    several = rows.const is None and q[0] != rows and n.attrs["least"] == 1
    return several and tokens <= max_tokens and (q[2].const or MIXED_HEAD + 1) <= MIXED_HEAD


@dataclass(frozen=True)
class SplitSingle(NodePass):
    """Compute single-token rows of mixed batches with paged_attention_single.

    Applies to graphs with any number of tokens per row; paged_attention then skips those rows. A kernel for single
    tokens takes about half the time for them, also compared with FlashAttention (H200).

    Graphs of at most `above` tokens remain as they are, because one launch computes both kinds of rows at the same time
    there (`triton/mixed_attention`). They are split nevertheless if heads are too large for that kernel, or if another
    kernel leads for the remaining rows, as FlashAttention does from 512 tokens on: on an H200, steps of 412 to 640
    tokens with 15 to 64 decoding rows then took 5 to 15 % less.
    """

    name: ClassVar[str] = "split-single"
    ops: ClassVar[tuple[str, ...]] = ("paged_attention",)

    above: int = MIXED_TOKENS

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite one node, unless it is split already or every row has one token; return whether it was rewritten."""
        q, kv, pages, rows, starts, positions, *rest = n.operands
        if not _several(m, g, n) or q.type.shape[0] == rows.type.shape[0] or n.attrs["least"] > 1:
            return False
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        many = b.paged_attention(q, kv, pages, rows, starts, positions, *rest, **{**n.attrs, "least": 2})
        sizes = {symbol: high for symbol, (_, high) in m.bounds(g).items()}
        few = in_one_launch(n, q.type.shape[0].bounds(m.bounds(g))[1], self.above)
        if (few and not some_kernel_leads(many.node, ctx, sizes)) or not ctx.spend():
            g.erase(many.node)
            return False
        attrs = {key: n.attrs[key] for key in SHARED_ATTRIBUTES}
        single = b.paged_attention_single(q, kv, pages, rows, starts, positions, many, *rest, **attrs)
        substitute(g, n, [single], self.name)
        return True


def _several(m: Module, g: Graph, n: Node) -> bool:
    """Whether a batch can have more than one row."""
    return n.operands[3].type.shape[0].bounds(m.bounds(g))[1] > 1
