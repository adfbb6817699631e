"""Fuses a norm into the product that reads it, if recomputing the norm costs less than a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.dim import product
from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.base import Ctx, Pass

NAME = "fuse-norm-linear"


@dataclass(frozen=True)
class FuseNormLinear(Pass):
    """Fuse rms_norm into a linear or linear_map that is its only reader, in graphs of at most `rows` tokens.

    Every program of the product then computes the norm's sum itself.
    """

    rows: int = 4
    name: ClassVar[str] = NAME

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every graph; return the number of changes."""
        return sum(self._graph(g, m, ctx) for g in m.graphs.values())

    def _graph(self, g: Graph, m: Module, ctx: Ctx) -> int:
        done = 0
        for n in list(g.nodes):
            if n.op.name != "rms_norm" or not ctx.allows(n):
                continue
            if why := self._why_not(g, m, n):
                ctx.miss(NAME, n, why)
            elif ctx.spend():
                _fuse(g, n, ctx)
                done += 1
        return done

    def _why_not(self, g: Graph, m: Module, n: Node) -> str | None:
        readers = n.result.uses
        if len(readers) != 1 or any(v is n.result for v in g.outputs):
            return f"its result has {len(readers)} users"
        if readers[0].op.name not in ("linear", "linear_map") or readers[0].operands[0] is not n.result:
            return f"its reader is {readers[0].op.name}"
        if f := readers[0].operands[1].type.format:
            return f"the weight is quantised ({f.name}); no kernel fuses a norm into such a product"
        tokens = product(n.result.type.shape[:-1]).bounds(m.bounds(g))[1]
        return f"the graph has up to {tokens} tokens, more than {self.rows}" if tokens > self.rows else None


def _fuse(g: Graph, norm: Node, ctx: Ctx) -> None:
    into_product(g, norm, norm.result.uses[0], ctx)
    g.erase(norm)


def into_product(g: Graph, norm: Node, n: Node, ctx: Ctx) -> None:
    """Replace a linear or linear_map that reads a norm by norm_linear, which computes the norm; the norm remains."""
    x, gain = norm.operands
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    attrs = {**n.attrs, "eps": norm.attrs["eps"]}
    out = b.emit(ctx.opset["norm_linear"], [x, n.operands[1], gain, *n.operands[2:]], attrs)
    out.name = n.result.name
    g.replace(n.result, out)
    g.erase(n)
