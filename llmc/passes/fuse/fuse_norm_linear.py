"""Fuses a norm into the product that reads it, if recomputing the norm costs less than a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.dim import product
from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.analysis import only_reader
from llmc.passes.base import Ctx, NodePass, NoMatch


@dataclass(frozen=True)
class FuseNormLinear(NodePass):
    """Fuse rms_norm into a linear or linear_map that is its only reader, in graphs of at most `rows` tokens.

    Every program of the product then computes the norm's sum itself.
    """

    rows: int = 4
    name: ClassVar[str] = "fuse-norm-linear"
    ops: ClassVar[tuple[str, ...]] = ("rms_norm",)

    def node(self, m: Module, g: Graph, norm: Node, ctx: Ctx) -> int:
        """Fuse one norm; return whether it was fused."""
        reader = only_reader(g, norm.result)
        if reader is None:
            raise NoMatch(f"its result has {len(norm.result.uses)} users")
        if reader.op.name not in ("linear", "linear_map") or reader.operands[0] is not norm.result:
            raise NoMatch(f"its reader is {reader.op.name}")
        if f := reader.operands[1].type.format:
            raise NoMatch(f"the weight is quantised ({f.name}); no kernel fuses a norm into such a product")
        tokens = product(norm.result.type.shape[:-1]).bounds(m.bounds(g))[1]
        if tokens > self.rows:
            raise NoMatch(f"the graph has up to {tokens} tokens, more than {self.rows}")
        if not ctx.spend():
            return False
        into_product(g, norm, reader, ctx)
        g.erase(norm)
        return True


def into_product(g: Graph, norm: Node, n: Node, ctx: Ctx) -> None:
    """Replace a linear or linear_map that reads a norm by norm_linear, which computes the norm; the norm remains."""
    x, gain = norm.operands
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    attrs = {**n.attrs, "eps": norm.attrs["eps"]}
    out = b.emit(ctx.opset["norm_linear"], [x, n.operands[1], gain, *n.operands[2:]], attrs)
    g.replace_node(n, out)
