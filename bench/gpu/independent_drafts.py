"""A pass for benchmarks of draft models with random weights: drafts that do not depend on the model's samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Builder, Module
from llmc.passes.base import Ctx, Pass
from llmc.passes.lower.page_attention import DRAFT


@dataclass(frozen=True)
class IndependentDrafts(Pass):
    """Let the draft model sample with separate random numbers, those of positions far after every sequence.

    In an engine it samples with the number of the position, as the model does. Both would then draw the same one of two
    ids, whatever their weights.
    """

    name: ClassVar[str] = "independent-drafts"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to @draft; return the number of changes."""
        g = m.graphs.get(DRAFT)
        nodes = [n for n in g.nodes if n.op.name in ("row_mask", "row_sample")] if g else []
        if g is None or not nodes:
            return 0
        b: Any = Builder(g, ctx.opset, before=nodes[0], loc="bench")
        positions = nodes[0].operands[3]
        moved = b.add(positions, b.broadcast(b.constant(1 << 20, "i32"), shape=list(positions.type.shape)))
        for n in nodes:
            g.set_operands(n, [moved if v is positions else v for v in n.operands])
        return len(nodes)
