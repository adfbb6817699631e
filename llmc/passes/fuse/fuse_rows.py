"""Fuses the ops that read the device rows at the beginning of a step into one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.base import Ctx, NodePass, NoMatch
from llmc.passes.rewrite import in_graph, substitute


@dataclass(frozen=True)
class FuseRows(NodePass):
    """Fuse row_spans with the row_ids and row_slots of its tokens into row_begin, if their states are inputs."""

    name: ClassVar[str] = "fuse-rows"
    ops: ClassVar[tuple[str, ...]] = ("row_spans",)

    def node(self, m: Module, g: Graph, spans: Node, ctx: Ctx) -> int:
        """Fuse one row_spans with its row_ids and row_slots; return 1."""
        ids, slots = (_reader(spans, op) for op in ("row_ids", "row_slots"))
        if ids is None or slots is None:
            missing = "row_ids" if ids is None else "row_slots"
            raise NoMatch(f"its results are not read by a {missing} of a graph input")
        if not ctx.spend():
            return 0
        b = Builder(g, ctx.opset, before=spans, loc=spans.loc)
        states = (ids.operands[0], slots.operands[0])
        new = b.row_begin(*spans.operands, *states, tokens=spans.attrs["tokens"], page=slots.attrs["page"])
        substitute(g, ids, new[3:4], self.name)
        substitute(g, slots, new[4:], self.name)
        if in_graph(g, spans):
            substitute(g, spans, new[:3], self.name)
        return 1


def _reader(spans: Node, op: str) -> Node | None:
    """Return the `op` that reads the tokens of `spans` and a state that is a graph input, or None."""
    _, token_row, positions = spans.results
    for n in token_row.uses:
        if n.op.name == op and n.operands[1:] == [token_row, positions] and n.operands[0].node is None:
            return n
    return None
