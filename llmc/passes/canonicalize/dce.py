"""Dead code elimination: removes nodes without readers and unused weights. Other inputs of a graph are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Graph
from llmc.passes.base import Ctx, Pass


@dataclass(frozen=True)
class Dce(Pass):
    """Remove nodes whose results are not read, then weights that are not read. Graph outputs count as read."""

    name: ClassVar[str] = "dce"

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Remove what a graph does not read; return the number of changes."""
        return _nodes(g, ctx) + _weights(g, ctx)


def _nodes(g: Graph, ctx: Ctx) -> int:
    """Erase unused nodes, from the last to the first; return their number."""
    done = 0
    for n in reversed(g.nodes):
        if not g.is_used(n) and ctx.allows(n):
            if not ctx.spend():
                return done
            g.erase(n)
            done += 1
    return done


def _weights(g: Graph, ctx: Ctx) -> int:
    """Remove weights that nothing reads from the inputs; return their number."""
    done = 0
    for v in list(g.inputs):
        if v.weight and not v.uses and v not in g.outputs:
            if not ctx.spend():
                return done
            g.inputs.remove(v)
            done += 1
    return done
