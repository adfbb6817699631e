"""A row's draw in two launches: the largest logit of every block by many programs, then one small program a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node, Value

from .base import Ctx, Pass
from .rewrite import Match, Pat, Rewrite, apply, substitute

p = Pat()

_STEP = (p.rows, p.qlens, p.length)
_PENALIZED = p.row_penalize(p.logits, p.rows, p.fparams, p.seen, p.counts)
_MASKED = p.row_mask_stops(_PENALIZED, *_STEP, p.iparams, p.stops)
_DRAWN = p.row_sample(_MASKED, *_STEP, p.fparams, p.iparams)
_OPERANDS = ("logits", "rows", "qlens", "length", "fparams", "iparams", "stops", "seen", "counts")


def _fixed(m: Match) -> str | None:
    v = m["logits"].type.shape[1]
    return None if v.const is not None else f"the vocabulary {v} has no fixed size"


@dataclass(frozen=True)
class SplitSample(Pass):
    """Make row_block_max and row_sample_blocks of row_penalize, row_mask_stops and row_sample: no penalised logits are
    written, greedy rows read the raw ones once. Then row_finish of row_sample_blocks, and the row_logprobs and
    row_commit that read its ids. block: ids of a block, a power of two."""

    name: ClassVar[str] = "split-sample"
    block: int = 1024

    def run(self, m: Module, ctx: Ctx) -> int:
        rule = Rewrite("split-sample", _DRAWN, self._build, _fixed, near=2)
        done = sum(apply(g, (rule,), ctx) for g in m.graphs.values())
        drawn = [(g, n) for g in m.graphs.values() for n in list(g.nodes) if n.op.name == "row_sample_blocks"]
        return done + sum(_finish(g, n, ctx) for g, n in drawn)

    def _build(self, b: Any, m: Match) -> Value:
        operands = [m[name] for name in _OPERANDS]
        found = b.row_block_max(*operands, block=self.block)
        out: Value = b.row_sample_blocks(*operands, *found, block=self.block)
        return out


def _finish(g: Graph, n: Node, ctx: Ctx) -> int:
    """Join a row_sample_blocks with the two nodes that alone read its ids, both of the same logits, rows and states."""
    readers = {r.op.name: r for r in n.result.uses}
    if set(readers) != {"row_logprobs", "row_commit"} or len(n.result.uses) != 2:
        ctx.miss("row-finish", n, "its ids are not read by row_logprobs and row_commit alone")
        return 0
    told, commit = readers["row_logprobs"], readers["row_commit"]
    logits, rows, qlens, length, _, iparams, _, _, counts = n.operands[:9]
    tokens, emit = commit.operands[0], commit.operands[5]
    same = told.operands == [logits, n.result, rows, iparams]
    if not same or commit.operands != [tokens, length, counts, rows, qlens, emit, n.result]:
        ctx.miss("row-finish", n, "row_logprobs and row_commit are not of the rows that it draws")
        return 0
    if not ctx.allows(n) or not ctx.spend():
        return 0
    b = Builder(g, ctx.opset, before=commit, loc=n.loc)
    new = b.row_finish(*n.operands, tokens, emit, block=n.attrs["block"], k=told.attrs["k"])
    substitute(g, commit, new[5:], "row-finish")
    substitute(g, told, new[1:5], "row-finish")
    substitute(g, n, new[:1], "row-finish")
    return 1
