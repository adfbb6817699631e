"""Matches and near misses of every pass as HTML, from report/passes.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmc.report.formatting import many
from llmc.report.html import Html, code, dim, fold, join, number, table, tag

MOST = 200  # maximum rows of a table


def section(record: Sequence[Mapping[str, Any]]) -> Html:
    """Return the passes in order: a summary line each, which opens to the places."""
    return join(_pass(i, r) for i, r in enumerate(record))


def _pass(i: int, r: Mapping[str, Any]) -> Html:
    near = sum(x["count"] for x in r["missed"])
    words = [many(r["changes"], "change"), f"{many(r['nodes'], 'node')} in {many(r['graphs'], 'graph')} after it"]
    words += [many(near, "near miss", "near misses")] if near else []
    summary = join([f"{i}.", code(r["pass"]), dim(", ".join(words))], " ")
    parts = [
        _rules("matched", r["applied"]),
        _rules("nearly matched", r["missed"]),
        _ops("more nodes than before", r["made"]),
        _ops("fewer nodes than before", r["gone"]),
    ]
    shown = [p for p in parts if p]
    return fold(summary, *shown or [tag("p", dim("nothing in the graphs is different in kind"))])


def _rules(title: str, rows: Sequence[Mapping[str, Any]]) -> Html:
    if not rows:
        return Html("")
    why = any("why" in r for r in rows)
    heads = ("times", "rule", "op", "where", *(("why not",) if why else ()))
    found = ((number(r["count"]), r["rule"], r["op"], _place(r), *((r["why"],) if why else ())) for r in rows[:MOST])
    return join([tag("h3", title), table(heads, found), _more(rows)])


def _ops(title: str, rows: Sequence[Mapping[str, Any]]) -> Html:
    if not rows:
        return Html("")
    found = ((number(r["count"]), r["op"], _place(r)) for r in rows[:MOST])
    return join([tag("h3", title), table(("nodes", "op", "where"), found), _more(rows)])


def _place(r: Mapping[str, Any]) -> Any:
    return code(r["loc"]) if r["loc"] else dim("no module")


def _more(rows: Sequence[Any]) -> Html:
    return tag("p", dim(f"and {len(rows) - MOST} more")) if len(rows) > MOST else Html("")
