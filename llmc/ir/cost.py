"""Symbolic cost of nodes and graphs: flops, minimum bytes moved, and the roofline time that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.ir.dim import Dim
from llmc.ir.graph import Graph, Node


def node_cost(n: Node) -> tuple[Dim, Dim]:
    """Return a node's flops and minimum bytes moved, as Dims."""
    return n.op.cost([v.type for v in n.operands], [r.type for r in n.results], n.attrs)


def graph_cost(g: Graph) -> tuple[Dim, Dim]:
    """Return the sums of flops and bytes over a graph's nodes, as Dims."""
    flops, moved = Dim.of(0), Dim.of(0)
    for n in g.nodes:
        f, b = node_cost(n)
        flops, moved = flops + f, moved + b
    return flops, moved


@dataclass(frozen=True)
class Row:
    """A row of the roofline table. `seconds` is the larger of compute and memory time, as named by `bound`."""

    op: str
    loc: str
    flops: Dim
    bytes: Dim
    seconds: float
    bound: str


def rows(g: Graph, sizes: Mapping[str, int], peak: float, bandwidth: float) -> list[Row]:
    """Predict the time of every node at `sizes`, with `peak` in flop/s and `bandwidth` in byte/s.

    Raises ValueError if a cost depends on a symbol that `sizes` lacks.
    """
    out = []
    for n in g.nodes:
        f, b = node_cost(n)
        fc, bc = f.subs(sizes).const, b.subs(sizes).const
        if fc is None or bc is None:
            missing = sorted((f.symbols | b.symbols) - sizes.keys())
            raise ValueError(f"the cost of {n.op.name} depends on {', '.join(missing)}: bind it")
        compute, memory = fc / peak, bc / bandwidth
        bound = "compute" if compute > memory else "memory"
        out.append(Row(n.op.name, n.loc, f, b, max(compute, memory), bound))
    return out
