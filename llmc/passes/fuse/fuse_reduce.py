"""Fuses the addition of a residual into the sum over the ranks before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Graph
from llmc.passes.base import Ctx, Pass
from llmc.passes.rewrite import Match, Pat, Rewrite, apply

p = Pat()


def _same_type(m: Match) -> str | None:
    x, r = m["x"].type, m["r"].type
    return None if x == r else f"the other operand is {r}, the sum {x}"


RULES = (
    Rewrite(
        "all-reduce-add",
        p.add(p.all_reduce(p.x, ranks=p.ranks), p.r),
        lambda b, m: b.all_reduce_add(m["x"], m["r"], ranks=m["ranks"]),
        _same_type,
        near=2,
    ),
)


@dataclass(frozen=True)
class FuseReduce(Pass):
    """Replace add(all_reduce(x), r) by all_reduce_add, which saves a launch. The pass runs after `shard`."""

    name: ClassVar[str] = "fuse-reduce"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Replace the sums of a graph; return the number of changes."""
        return apply(g, RULES, ctx)
