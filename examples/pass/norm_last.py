"""A pass from an outside package: moves take before rms_norm, so that a prompt's last norm applies to one row only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.extend import Ctx, Extension, Graph, Match, Pass, Pat, Rewrite, apply

p = Pat()


def _fewer_rows(m: Match) -> str | None:
    """Return None if the rewrite saves work, else the reason against it, which --explain prints."""
    return "no row is left out" if m.root.result.type == m["x"].type else None


# Each row is normalized on its own, and a row of zeros (from a negative index) stays zero: the result is bit-identical.
NORM_LAST = Rewrite(
    "norm-last",
    p.take(p.rms_norm(p.x, p.w, eps=p.eps), p.rows),
    lambda b, m: b.rms_norm(b.take(m["x"], m["rows"]), m["w"], eps=m["eps"]),
    when=_fewer_rows,
)


@dataclass(frozen=True)
class NormLast(Pass):
    """Rewrite take(rms_norm(x, w), rows) to rms_norm(take(x, rows), w)."""

    name: ClassVar[str] = "norm-last"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        return apply(g, [NORM_LAST], ctx)


EXTENSION = Extension("norm-last", passes={"norm-last": "norm_last:NormLast"})
