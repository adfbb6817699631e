"""Structural digests of nodes and graphs. Names, locations and declaration order do not affect them."""

from __future__ import annotations

import hashlib

from llmc.ir.graph import Graph, Node, Value
from llmc.ir.text import show_attr


def node_digest(n: Node) -> str:
    """Return the sha256 (hex) of a node's op, types, attributes and kernel choice: equal nodes share a kernel."""
    return _sha(_node_key(n, lambda v: str(v.type)))


def digest(g: Graph) -> str:
    """Return the sha256 (hex) of a graph. Values are numbered in order of definition, so names do not matter."""
    number: dict[Value, int] = {v: i for i, v in enumerate(g.inputs)}
    lines = [f"{'weight ' if v.weight else ''}{v.type}" for v in g.inputs]
    for n in g.nodes:
        lines.append(_node_key(n, lambda v: f"%{number[v]}"))
        for r in n.results:
            number[r] = len(number)
    lines.append(",".join(str(number[v]) for v in g.outputs))
    lines += [f"{s} in {bounds}" for s, bounds in sorted(g.ranges.items())]
    return _sha("\n".join(lines))


def _node_key(n: Node, operand: object) -> str:
    args = ",".join(operand(v) for v in n.operands)  # type: ignore[operator]
    attrs = ",".join(f"{k}={show_attr(v)}" for k, v in (*n.attrs.items(), *sorted(n.choice.items())))
    return f"{n.op.name}({args}){{{attrs}}}:{','.join(str(r.type) for r in n.results)}"


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
