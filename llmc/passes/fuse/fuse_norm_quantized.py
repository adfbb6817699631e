"""Fuses a norm into a product with quantised weights, if a kernel of the target supports that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.dim import product
from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.passes.analysis import only_reader
from llmc.passes.base import Ctx, NodePass, NoMatch, rejected


@dataclass(frozen=True)
class FuseNormQuantized(NodePass):
    """Fuse rms_norm into a quantized_linear that is its only reader, in graphs of at most `rows` tokens.

    Runs after `lower-quantized`. A norm remains a separate launch if no kernel of the target supports the product.
    """

    rows: int = 16
    name: ClassVar[str] = "fuse-norm-quantized"
    ops: ClassVar[tuple[str, ...]] = ("rms_norm",)

    def node(self, m: Module, g: Graph, norm: Node, ctx: Ctx) -> int:
        """Fuse one norm; return whether it was fused."""
        n = only_reader(g, norm.result)
        if n is None or n.op.name != "quantized_linear" or n.operands[0] is not norm.result or n.attrs["act"]:
            return False
        tokens = product(norm.result.type.shape[:-1]).bounds(m.bounds(g))[1]
        if tokens > self.rows:
            raise NoMatch(f"up to {tokens} tokens run, more than {self.rows}")
        if not ctx.spend():
            return False
        (x, gain), (_, code, scale, *rest) = norm.operands, n.operands
        attrs = {k: v for k, v in n.attrs.items() if k not in ("act", "act_block")} | {"eps": norm.attrs["eps"]}
        out = Builder(g, ctx.opset, before=n, loc=n.loc).norm_quantized_linear(x, code, scale, gain, *rest, **attrs)
        if why := rejected(out.node, ctx):
            g.erase(out.node)
            raise NoMatch(why)
        g.replace_node(n, out)
        g.erase(norm)
        return True
