"""One way of writing each thing, so that later patterns have one form to look for; it fuses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Graph, Module

from .algebra import ACTIVATIONS, SIMPLE, constant_rule, pointwise_names
from .base import Ctx, Pass
from .batch import drop_unit_batch
from .dce import Dce
from .rewrite import Misses, Rule, apply
from .shape_rules import MOVES, broadcast_rule

ROUNDS = 4  # a value may have several unit axes in front; each round removes one


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Drop moves and arithmetic that do nothing, join chains of moves, remove the unit batch axis, call activations by
    name, fold constants, and forget what nobody reads."""

    name: ClassVar[str] = "canonicalize"
    batch: bool = True

    def run(self, m: Module, ctx: Ctx) -> int:
        done = Dce().run(m, ctx)
        done += sum(self.graph(g, ctx) for g in m.graphs.values())
        return done + Dce().run(m, ctx)

    def graph(self, g: Graph, ctx: Ctx) -> int:
        by_op = (constant_rule(ctx.opset), broadcast_rule(pointwise_names(ctx.opset)))
        rules: list[Rule] = [*MOVES, *SIMPLE, *by_op, *ACTIVATIONS]
        misses = Misses()
        done = apply(g, rules, ctx, misses)
        for _ in range(ROUNDS if self.batch else 0):
            dropped = drop_unit_batch(g, ctx)
            done += dropped + apply(g, rules, ctx, misses)
            if not dropped:
                break
        misses.tell(g, ctx)
        return done
