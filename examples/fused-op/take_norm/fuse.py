"""The pass that fuses rms_norm and take into the op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.extend import Ctx, Graph, Pass, Pat, Rewrite, apply

p = Pat()
TAKE_NORM = Rewrite(
    "take-norm",
    p.take(p.rms_norm(p.x, p.w, eps=p.eps), p.rows),
    lambda b, m: b.take_norm(m["x"], m["rows"], m["w"], eps=m["eps"]),
)


@dataclass(frozen=True)
class FuseTakeNorm(Pass):
    """take(rms_norm(x, w), rows) -> take_norm(x, rows, w)."""

    name: ClassVar[str] = "fuse-take-norm"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        return apply(g, [TAKE_NORM], ctx)
