"""Canonicalization: rewrites equivalent forms into a single one, the only one that later patterns have to match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.graph import Graph, Module
from llmc.passes.base import Ctx, Pass
from llmc.passes.canonicalize.algebra import ACTIVATIONS, SIMPLE, constant_rule, pointwise_names
from llmc.passes.canonicalize.dce import Dce
from llmc.passes.canonicalize.drop_batch_dim import drop_unit_batch
from llmc.passes.canonicalize.shape_rules import MOVES, broadcast_rule
from llmc.passes.rewrite import Misses, Rule, apply

MAX_ROUNDS = 4  # a value may have several leading unit axes; each round removes one


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Rewrite to canonical form.

    Removes redundant moves and arithmetic, merges chains of moves, drops the unit batch axis, names activations, folds
    constants, and removes dead code.
    """

    name: ClassVar[str] = "canonicalize"
    batch: bool = True

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every graph; return the number of changes."""
        done = Dce().run(m, ctx)
        done += sum(self.graph(g, ctx) for g in m.graphs.values())
        return done + Dce().run(m, ctx)

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Canonicalize one graph; return the number of changes."""
        by_op = (constant_rule(ctx.opset), broadcast_rule(pointwise_names(ctx.opset)))
        rules: list[Rule] = [*MOVES, *SIMPLE, *by_op, *ACTIVATIONS]
        misses = Misses()
        done = apply(g, rules, ctx, misses)
        for _ in range(MAX_ROUNDS if self.batch else 0):
            dropped = drop_unit_batch(g, ctx)
            done += dropped + apply(g, rules, ctx, misses)
            if not dropped:
                break
        misses.report(g, ctx)
        return done
