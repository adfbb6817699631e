"""Splits sampling into two launches: per-block maxima by many programs, then one small program per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.passes.base import Ctx, Pass
from llmc.passes.rewrite import Match, Pat, Rewrite, apply, substitute

p = Pat()

_STEP, _PARAMS = (p.rows, p.starts, p.positions), (p.fparams, p.iparams)
_PENALIZED = p.row_penalize(p.logits, p.rows, *_PARAMS, p.seen, p.counts, p.bias_ids, p.biases)
_MASKED = p.row_mask(_PENALIZED, *_STEP, p.iparams, p.stops, p.allowed)
_DRAWN = p.row_sample(_MASKED, *_STEP, p.tokens, *_PARAMS)
_OPERANDS = (
    "logits", "rows", "starts", "positions", "fparams", "iparams", "stops", "seen", "counts", "bias_ids", "biases",
    "allowed",
)  # fmt: skip


def _fixed(m: Match) -> str | None:
    v = m["logits"].type.shape[1]
    return None if v.const is not None else f"the size {v} of the vocabulary is not constant"


@dataclass(frozen=True)
class SplitSample(Pass):
    """Split sampling into row_block_max and row_finish.

    First row_penalize, row_mask and row_sample become row_block_max and row_sample_blocks, so that penalized logits are
    never written and greedy rows read the raw logits once. Then row_sample_blocks and the row_logprobs and row_commit
    that read its ids become row_finish. block: ids per block, a power of two.
    """

    name: ClassVar[str] = "split-sample"
    block: int = 1024

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every graph; return the number of changes."""
        rule = Rewrite("split-sample", _DRAWN, self._build, _fixed, near=2)
        done = sum(apply(g, (rule,), ctx) for g in m.graphs.values())
        return done + sum(_finish(g, n, ctx) for g, n in m.find("row_sample_blocks"))

    def _build(self, b: Any, m: Match) -> Value:
        operands = [m[name] for name in _OPERANDS]
        maxima = b.row_block_max(*operands, block=self.block)
        return b.row_sample_blocks(*operands, m["tokens"], *maxima, block=self.block)


def _finish(g: Graph, n: Node, ctx: Ctx) -> int:
    """Merge a row_sample_blocks with row_logprobs and row_commit, if only these read it and their operands match."""
    readers = {r.op.name: r for r in n.result.uses}
    if set(readers) != {"row_logprobs", "row_commit"} or len(n.result.uses) != 2:
        ctx.miss("row-finish", n, "its ids have other readers than one row_logprobs and one row_commit")
        return 0
    logprobs, commit = readers["row_logprobs"], readers["row_commit"]
    logits, rows, starts, positions, _, iparams, _, _, counts, _, _, _, tokens = n.operands[:13]
    length, emit = commit.operands[1], commit.operands[6]
    same = logprobs.operands == [logits, n.result, rows, iparams]
    if not same or commit.operands != [tokens, length, counts, rows, starts, positions, emit, n.result]:
        ctx.miss("row-finish", n, "the operands of row_logprobs or row_commit do not match")
        return 0
    if not ctx.allows(n) or not ctx.spend():
        return 0
    b = Builder(g, ctx.opset, before=commit, loc=n.loc)
    new = b.row_finish(*n.operands, length, emit, block=n.attrs["block"], k=logprobs.attrs["k"])
    substitute(g, commit, new[5:], "row-finish")
    substitute(g, logprobs, new[1:5], "row-finish")
    substitute(g, n, new[:1], "row-finish")
    return 1
