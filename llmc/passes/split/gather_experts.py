"""Splits a mixture of experts for few tokens, whose (token, expert) pairs need no sorting and fill no tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node
from llmc.ir.ops.moe import parts
from llmc.passes.analysis import only_reader
from llmc.passes.base import Ctx, NodePass, NoMatch
from llmc.passes.fuse.fuse_norm_linear import into_product
from llmc.passes.rewrite import substitute


@dataclass(frozen=True)
class GatherExperts(NodePass):
    """Replace moe and the addition of its result by moe_gather_up and moe_gather_down, for at most `tokens` tokens.

    An RMS norm before moe is fused into all of its readers, if these are the first product of the experts and linear
    layers, such as the router: a launch costs more than repeating the norm.
    """

    tokens: int = 1
    name: ClassVar[str] = "gather-experts"
    ops: ClassVar[tuple[str, ...]] = ("moe",)

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Split one mixture; return whether it was split."""
        self._check_sizes(g, m, n)
        add = _addition(g, n)
        if not ctx.spend():
            return False
        x, idx, weights, gate_up, down, *biases = n.operands
        residual = next(v for v in add.operands if v is not n.result)
        norm = _norm(g, n)
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        if norm is None:
            h = b.moe_gather_up(x, idx, gate_up, *biases[:1], body=n.attrs["body"])
        else:
            for reader in [r for r in norm.result.uses if r is not n]:
                into_product(g, norm, reader, ctx)
            attrs = {"body": n.attrs["body"], "eps": norm.attrs["eps"]}
            h = b.norm_moe_gather_up(norm.operands[0], idx, gate_up, norm.operands[1], *biases[:1], **attrs)
        b = Builder(g, ctx.opset, before=add, loc=n.loc)
        y = b.moe_gather_down(h, idx, down, weights, residual, *biases[1:])
        substitute(g, add, [y], self.name)
        return True

    def _check_sizes(self, g: Graph, m: Module, n: Node) -> None:
        """Raise NoMatch for too many tokens, and for experts that no kernel reads in this way."""
        tokens = n.result.type.shape[0].bounds(m.bounds(g))[1]
        if tokens > self.tokens:
            raise NoMatch(f"the graph has up to {tokens} tokens, more than {self.tokens}")
        if parts(n.attrs["body"]) == 1:
            raise NoMatch("the experts have no gate")
        if f := next((v.type.format for v in n.operands[3:] if v.type.format), None):
            raise NoMatch(f"the experts are quantised ({f.name})")
        fixed = [n.operands[1].type.shape[1], *(d for v in n.operands[3:5] for d in v.type.shape)]
        if any(d.const is None for d in fixed):
            raise NoMatch("the experts' sizes and their number per token are not constant")


def _addition(g: Graph, n: Node) -> Node:
    """Return the addition that is the only reader of a mixture; raises NoMatch if there is none."""
    add = only_reader(g, n.result)
    if add is None or add.op.name != "add":
        users = ", ".join(u.op.name for u in n.result.uses) or "none"
        raise NoMatch(f"its result has the users {users}, not one addition")
    if any(v.type.shape != n.result.type.shape for v in add.operands):
        raise NoMatch("its result is added to another shape")
    return add


def _norm(g: Graph, n: Node) -> Node | None:
    """Return the norm that `n` reads, if all of its readers can compute it."""
    x = n.operands[0]
    norm = x.node
    if norm is None or norm.op.name != "rms_norm" or x in g.outputs:
        return None
    others = [r for r in x.uses if r is not n]
    products = all(r.op.name in ("linear", "linear_map") and r.operands[0] is x for r in others)
    is_read_once = all(sum(v is x for v in r.operands) == 1 for r in x.uses)
    quantized = any(v.type.format for r in others for v in r.operands)
    return norm if products and is_read_once and not quantized else None
