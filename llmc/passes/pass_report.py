"""Records the changes and near misses of every pass of a compile, as data for report/passes.json."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from llmc.ir.graph import Module
from llmc.passes.base import Ctx, Pass, Place
from llmc.passes.pipeline import spell_pass

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Census = Counter[tuple[str, str]]


def pattern(loc: str) -> str:
    """Replace every number in a module path by a star: "model.layers.3.mlp" -> "model.layers.*.mlp"."""
    return _NUMBER.sub("*", loc)


def census(m: Module) -> Census:
    """Count the nodes by op and module path pattern."""
    return Counter((n.op.name, pattern(n.loc)) for g in m.graphs.values() for n in g.nodes)


class Record:
    """Observer of a pipeline. `data` has one entry per pass, in order; equal compiles give equal data.

    An entry is {"pass": its text, "changes", "graphs", "nodes", "applied", "missed", "made", "gone"}. "applied" and
    "missed" list rules as {"rule", "op", "loc", "count", "first"}, with "why" for misses; "made" and "gone" list ops
    that became more or fewer as {"op", "loc", "count"}. Module paths that differ only in numbers are counted together.
    """

    def __init__(self, m: Module, ctx: Ctx) -> None:
        """Start recording with the state of `m` before the first pass."""
        self.ctx, self.data = ctx, list[dict[str, Any]]()
        self.before = census(m)
        self.hits: Counter[Place] = Counter(ctx.hits)
        self.misses = len(ctx.misses)

    def observe(self, p: Pass, changes: int, m: Module) -> None:
        """Append the entry of pass `p`, which has just run on `m`."""
        after = census(m)
        self.data.append(
            {
                "pass": spell_pass(p),
                "changes": changes,
                "graphs": len(m.graphs),
                "nodes": sum(after.values()),
                "applied": _merged(self.ctx.hits - self.hits),
                "missed": _merged(Counter(list(self.ctx.misses)[self.misses :])),
                "made": _rows(after - self.before),
                "gone": _rows(self.before - after),
            }
        )
        self.before, self.hits, self.misses = after, Counter(self.ctx.hits), len(self.ctx.misses)

    def summary(self) -> str:
        """Summarize in one line: the passes with changes, and the number of near misses."""
        changes = [f"{r['pass'].partition('{')[0]} {r['changes']}" for r in self.data if r["changes"]]
        missed = sum(x["count"] for r in self.data for x in r["missed"])
        near = f"; {missed} near misses (reasons: llmc report)" if missed else ""
        return f"{len(self.data)} run: {', '.join(changes)}{near}"


def _rows(counts: Census) -> list[dict[str, Any]]:
    ranked = sorted(counts.items(), key=lambda kv: (-kv[1], kv[0]))
    return [{"op": op, "loc": loc, "count": count} for (op, loc), count in ranked]


def _merged(counts: Counter[Place]) -> list[dict[str, Any]]:
    """Return one row per rule, op, path pattern and reason, most frequent first."""
    rows: dict[Place, dict[str, Any]] = {}
    for place, count in counts.items():
        key = place._replace(loc=pattern(place.loc))
        row = rows.setdefault(key, {**key._asdict(), "count": 0, "first": place.loc})
        row["count"] += count
    ranked = sorted(rows.values(), key=lambda r: -r["count"])
    return [r if r["why"] else {k: v for k, v in r.items() if k != "why"} for r in ranked]
