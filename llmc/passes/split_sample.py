"""A row's draw in two launches: the largest logit of every block by many programs, then one small program a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Module, Value

from .base import Ctx, Pass
from .rewrite import Match, Pat, Rewrite, apply

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
    written, greedy rows read the raw ones once. block: ids of a block, a power of two."""

    name: ClassVar[str] = "split-sample"
    block: int = 1024

    def run(self, m: Module, ctx: Ctx) -> int:
        rule = Rewrite("split-sample", _DRAWN, self._build, _fixed, near=2)
        return sum(apply(g, (rule,), ctx) for g in m.graphs.values())

    def _build(self, b: Any, m: Match) -> Value:
        operands = [m[name] for name in _OPERANDS]
        found = b.row_block_max(*operands, block=self.block)
        out: Value = b.row_sample_blocks(*operands, *found, block=self.block)
        return out
