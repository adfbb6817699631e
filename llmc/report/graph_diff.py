"""Compares graphs given as text: added and removed nodes, kernel choices and wiring. Names of values are ignored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from llmc.passes.pass_report import pattern
from llmc.report.ir_lines import GraphText, Line

_ARENA = re.compile(r",? ?arena=\[[^\]]*\]")


def compare_graphs(a: Mapping[str, GraphText], b: Mapping[str, GraphText]) -> dict[str, Any]:
    """Return {"graphs", "choices"}: lists of rows, empty if the graphs are equal up to value names and arena offsets.

    A row of "graphs" is {"graph", "only": "a" or "b"} or {"graph", "changes": [{"side", "count", "node", "loc"}],
    "wiring": text}; a row of "choices" is {"graph", "node", "loc", "count", "a", "b"}.
    """
    rows: list[dict[str, Any]] = []
    choices: list[dict[str, Any]] = []
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            rows.append({"graph": name, "only": "a" if name in a else "b"})
            continue
        changes, pairs = _align(a[name], b[name])
        wiring = "" if changes else _wiring(a[name], b[name])
        if changes or wiring:
            rows.append({"graph": name, "changes": changes, "wiring": wiring})
        choices += [{"graph": name, **row} for row in _choices(pairs)]
    return {"graphs": rows, "choices": choices}


def _align(a: GraphText, b: GraphText) -> tuple[list[dict[str, Any]], list[tuple[Line, Line]]]:
    """Return the rows of inputs and nodes that only one side has, and the pairs of corresponding nodes."""
    counts: Counter[tuple[str, str, str]] = Counter()  # (side, text, loc) of what has no counterpart in its place
    inputs_a, inputs_b = Counter(a.inputs), Counter(b.inputs)
    for side, only_here in (("a", inputs_a - inputs_b), ("b", inputs_b - inputs_a)):
        counts.update((side, f"input {pattern_name(x)}", "") for x in only_here.elements())
    lines_a, lines_b = _lines(a), _lines(b)
    pairs: list[tuple[Line, Line]] = []
    for kind, a0, a1, b0, b1 in SequenceMatcher(None, lines_a, lines_b, autojunk=False).get_opcodes():
        if kind == "equal":
            pairs += zip(a.nodes[a0:a1], b.nodes[b0:b1], strict=True)
            continue
        counts.update(("a", text, pattern(loc)) for text, loc in lines_a[a0:a1])
        counts.update(("b", text, pattern(loc)) for text, loc in lines_b[b0:b1])
    rows = [
        {"side": side, "count": count, "node": text, "loc": loc} for (side, text, loc), count in _excess(counts).items()
    ]
    first_row = {loc: i for i, loc in enumerate(dict.fromkeys(row["loc"] for row in rows))}
    return sorted(rows, key=lambda row: (first_row[row["loc"]], row["side"])), pairs


def _lines(g: GraphText) -> list[tuple[str, str]]:
    """Return the text and location of each node."""
    return [(n.text, n.loc) for n in g.nodes]


def _excess(counts: Counter[tuple[str, str, str]]) -> dict[tuple[str, str, str], int]:
    """Subtract what both sides have: nodes that are only in a different order."""
    out = {}
    for (side, text, loc), n in counts.items():
        other = counts[("b" if side == "a" else "a"), text, loc]
        if n > other:
            out[side, text, loc] = n - other
    return out


def pattern_name(text: str) -> str:
    """Return a value's name and type with the numbers in its path replaced by stars."""
    name, _, kind = text.partition(": ")
    return f"{pattern(name.removeprefix('%'))}: {kind}"


def _wiring(a: GraphText, b: GraphText) -> str:
    """Describe the first node or output that reads different values, for graphs with the same nodes."""
    if _lines(a) != _lines(b):
        return "the same nodes in a different order"
    ours, theirs = _numbered(a), _numbered(b)
    for x, y in zip(a.nodes, b.nodes, strict=True):
        left = [ours.get(v, v) for v in x.operands]
        right = [theirs.get(v, v) for v in y.operands]
        if left != right:
            return f"{x.op} at {x.loc or '?'} reads {', '.join(left)} and {', '.join(right)}"
    left = [ours.get(v, v) for v in a.outputs]
    right = [theirs.get(v, v) for v in b.outputs]
    return "" if left == right else "the outputs are different values"


def _numbered(g: GraphText) -> dict[str, str]:
    """Map results to numbers in order of definition; inputs keep their names."""
    return {r: f"#{i}" for i, r in enumerate(r for n in g.nodes for r in n.results)}


def _choices(pairs: Sequence[tuple[Line, Line]]) -> list[dict[str, Any]]:
    rows: Counter[tuple[str, str, str, str]] = Counter()
    for line, other in pairs:
        left, right = _ARENA.sub("", line.choice), _ARENA.sub("", other.choice)
        if left != right:
            rows[line.text, pattern(line.loc), left, right] += 1
    return [
        {"node": node, "loc": loc, "count": count, "a": left, "b": right}
        for (node, loc, left, right), count in rows.items()
    ]
