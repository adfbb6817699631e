"""A pass from outside: rows are taken before they are normed, so that a prompt's last norm is of one row alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc import Extension, Pass, Rewrite
from llmc.ir.graph import Module
from llmc.passes.base import Ctx
from llmc.passes.rewrite import Match, Pat, apply

p = Pat()


def _fewer_rows(m: Match) -> str | None:
    """None where the rewrite is a gain; else the reason not to make it, which --explain prints."""
    return "no row is left out" if m.root.result.type == m["x"].type else None


# A norm is of each row by itself, and a row of zeros (what a negative index takes) stays zero: no bit changes.
NORM_LAST = Rewrite(
    "norm-last",
    p.take(p.rms_norm(p.x, p.w, eps=p.eps), p.rows),
    lambda b, m: b.rms_norm(b.take(m["x"], m["rows"]), m["w"], eps=m["eps"]),
    when=_fewer_rows,
)


@dataclass(frozen=True)
class NormLast(Pass):
    """Make rms_norm(take(x, rows), w) of take(rms_norm(x, w), rows)."""

    name: ClassVar[str] = "norm-last"

    def run(self, m: Module, ctx: Ctx) -> int:
        return sum(apply(g, [NORM_LAST], ctx) for g in m.graphs.values())


EXTENSION = Extension("norm-last", passes={"norm-last": "norm_last:NormLast"})
