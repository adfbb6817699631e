"""Quantises the weights of matrix products, and the experts of mixtures, by rounding to nearest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.qformat import QFormat
from llmc.passes.analysis import weight_only
from llmc.passes.base import Ctx, Pass
from llmc.passes.fuse.fuse_linear import PRODUCTS
from llmc.quant.make.recipes import NONE, RECIPES, ROUNDED, Recipe

STACKS = (3, 4)  # the operands of moe that are stacks of experts
ROUTING = ("topk", "softmax", "experts", "moe_route")  # a product whose result one of these ops reads is a router


@dataclass(frozen=True)
class Quantize(Pass):
    """Quantise the weights of matrix products and the experts of mixtures, rounding to nearest.

    weights: the recipe of the weights' format (int8, int4, fp8, ...: `llmc quantize --help` lists them), or none.
    group: columns that share a scale; 0 for the recipe's number. head: the recipe of the output projection, which is
    the last product of a graph. Router products, which choose experts, and weights that are quantised already are left
    unchanged.
    """

    name: ClassVar[str] = "quantize"
    weights: str = NONE
    group: int = 0
    head: str = NONE

    @property
    def columns(self) -> int:
        """The number of columns that share a scale in the weights other than the head's.

        0 if a row has a single scale, or if scales belong to tiles.
        """
        recipe = _recipe(self.weights, self.group)
        rows, columns = recipe.block if recipe else (1, 0)
        return columns if rows == 1 else 0

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every launched graph; return the number of changes."""
        if self.weights == self.head == NONE:
            return 0
        body, head = _recipe(self.weights, self.group), _recipe(self.head, 0)
        return sum(self._graph(g, body, head, ctx) for g in m.launched)

    def _graph(self, g: Graph, body: Recipe | None, head: Recipe | None, ctx: Ctx) -> int:
        """Quantise the weights of a graph's products: that of the last one by `head`, the others by `body`.

        Return the number of weights that change; a weight of several products is quantised once.
        """
        known = weight_only(g)
        products = [n for n in g.nodes if n.op.name in PRODUCTS and n.operands[1] in known]
        done: dict[tuple[Value, QFormat], Value] = {}
        uneven: dict[Value, str] = {}  # weights that are not whole groups, and the reasons
        for n in products:
            recipe = head if n is products[-1] else body
            if recipe is None or not ctx.allows(n):
                continue
            format = recipe.weight_format(n.operands[1].type.dtype)
            if why := _refuse(n, format):
                ctx.miss("quantize", n, why)
                if why == _uneven_groups(n.operands[1], format):
                    uneven[n.operands[1]] = why
                continue
            if not ctx.spend():
                break
            w = n.operands[1]
            if (w, format) not in done:
                done[w, format] = _quantized(g, n, w, format, ctx)
            g.set_operands(n, [n.operands[0], done[w, format], *n.operands[2:]])
        for why, count in Counter(uneven.values()).items():
            ctx.notes[f"{count} weights are not quantised: {why}; --group-size sets the size of groups"] = None
        return len(done) + (self._experts(g, known, body, ctx) if body else 0)

    def _experts(self, g: Graph, known: set[Value], recipe: Recipe, ctx: Ctx) -> int:
        """Quantise the expert stacks of a graph, those of each product separately; return their number."""
        done, refused = 0, Counter[str]()
        for n in [n for n in g.nodes if n.op.name == "moe" and ctx.allows(n)]:
            operands = list(n.operands)
            for i in STACKS:
                w = operands[i]
                format = recipe.weight_format(w.type.dtype)
                if why := "its weight is not constant" if w not in known else _refuse_weight(w, format):
                    ctx.miss(self.name, n, why)
                    refused[why] += w.type.format is None
                elif ctx.spend():
                    operands[i] = _quantized(g, n, w, format, ctx)
                    done += 1
            g.set_operands(n, operands)
        for why, count in (+refused).items():
            ctx.notes[f"{count} stacks of experts are not quantised: {why}"] = None
        return done


def _quantized(g: Graph, n: Node, w: Value, f: QFormat, ctx: Ctx) -> Value:
    b: Any = Builder(g, ctx.opset, before=n, loc=n.loc)
    return b.quantize(w, code=f.code, block=f.block, scale=f.scale, zero=f.zero, act=f.act)


def _refuse(n: Node, f: QFormat) -> str | None:
    """Return the reason why the weight of a product is not quantised, or None."""
    if any(u.op.name in ROUTING for u in n.result.uses):
        return "it chooses experts"
    return _refuse_weight(n.operands[1], f)


def _refuse_weight(w: Value, f: QFormat) -> str | None:
    """Return the reason why a weight [*stack, n, k] is not quantised, or None."""
    if w.type.format is not None:
        return f"its weight is quantised already ({w.type.format.name})"
    return _uneven_groups(w, f)


def _uneven_groups(w: Value, f: QFormat) -> str | None:
    """Return the reason why the columns of a weight are not whole groups of one row, or None."""
    columns = w.type.shape[-1]
    if f.block[0] == 1 and f.block[1] and not columns.divisible(f.block[1]):
        return f"{columns} columns are not groups of {f.block[1]}"
    return None


def _recipe(name: str, group: int) -> Recipe | None:
    """Return the recipe of that name, with another group size unless it is 0; Diagnostic E421 if it is unknown."""
    if name == NONE:
        return None
    if name not in ROUNDED:
        raise Diagnostic("E421", f"pass quantize: there is no recipe {name!r}", f"use one of {', '.join(ROUNDED)}")
    return RECIPES[name].grouped(group) if group else RECIPES[name]
