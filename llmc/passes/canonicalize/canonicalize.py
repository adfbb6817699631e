"""Canonicalization: rewrites equivalent forms into a single one, the only one that later patterns have to match.

The unit batch axis is removed: a traced graph computes on [1, T, ...]; values become [T, ...].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.passes.analysis import is_pointwise
from llmc.passes.base import Ctx, Pass
from llmc.passes.canonicalize.algebra import ACTIVATIONS, SIMPLE, constant_rule, pointwise_names
from llmc.passes.canonicalize.dce import Dce
from llmc.passes.canonicalize.shape_rules import MOVES, broadcast_rule
from llmc.passes.rewrite import Misses, Rule, apply, sweep

MAX_ROUNDS = 4  # a value may have several leading unit axes; each round removes one


def drop_unit_batch(g: Graph, ctx: Ctx) -> int:
    """Rebuild the nodes whose results are [1, ...] without that axis; return the number of rebuilt nodes that compute.

    Every rebuilt value is followed by a reshape to its old shape, for readers that still need the axis. The reshape is
    removed once all of its readers are rebuilt, too.
    """
    without: dict[Value, Value] = {}  # value [1, ...] -> the same value without the axis
    done = 0
    for n in list(g.nodes):
        if not all(r.type.rank >= 2 and r.type.shape[0].const == 1 and not r.type.state for r in n.results):
            continue
        if n.op.name == "reshape" and n.operands[0].type.shape == n.result.type.shape[1:]:
            without[n.result] = n.operands[0]
            continue
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        plan = _Plan(b, without).of(n)
        if plan is None or not ctx.allows(n):
            continue
        if not ctx.spend():
            break
        _rebuild(g, n, b, plan, without)
        if n.op.name not in ("reshape", "broadcast"):
            done += 1
    for v in without:
        if v.node is not None:
            sweep(g, v.node)
    return done


def _rebuild(g: Graph, n: Node, b: Builder, plan: tuple[list[Value], Mapping[str, Any]], without: dict) -> None:
    """Replace a node by the planned one, followed by a reshape to the old shape."""
    operands, attrs = plan
    new = g.add(n.op, operands, attrs, before=n, loc=n.loc, names=[r.name for r in n.results])
    for old, r in zip(n.results, new.results, strict=True):
        assert r.type.shape == old.type.shape[1:], f"{n.op.name}: {old.type} became {r.type}"
        reshaped = b.reshape(r, shape=old.type.shape)
        g.replace(old, reshaped)
        without[reshaped] = r
    g.erase(n)


class _Plan:
    """Rules that rebuild a node without the axis: (operands, attributes), or None if the op depends on the axis."""

    def __init__(self, b: Builder, without: Mapping[Value, Value]) -> None:
        self.b, self.without = b, without

    def of(self, n: Node) -> tuple[list[Value], Mapping[str, Any]] | None:
        """Return the operands and attributes of the rebuilt node, or None."""
        rank = n.results[0].type.rank
        if is_pointwise(n):  # operands of lower rank are broadcast
            return [self.drop(v) if v.type.rank == rank else v for v in n.operands], n.attrs
        if n.op.elementwise:
            return [self.drop(v) for v in n.operands], n.attrs
        if n.op.row_wise:
            has_rows = [bool(n.op.leading(slot)) for slot in n.op.operands]
            operands = [self.drop(v) if rows else v for v, rows in zip(n.operands, has_rows, strict=True)]
            return (operands, n.attrs) if rank >= 3 else None
        if "axis" in n.op.attrs:
            return self.of_axis(n)
        rule = getattr(self, f"of_{n.op.name}", None)
        return rule(n) if rule else None

    def of_axis(self, n: Node) -> Any:
        """Move the axis by one, unless it is counted from the end. Ops along the dropped axis stay unchanged."""
        axis, x = n.attrs["axis"], n.operands[0].type
        if axis % x.rank == 0 or (x.rank < 3 and n.op.name != "concat"):
            return None
        return [self.drop(v) for v in n.operands], {**n.attrs, "axis": axis - 1 if axis > 0 else axis}

    def drop(self, v: Value) -> Value:
        """Return a value without its first axis."""
        if v in self.without:
            return self.without[v]
        return self.b.reshape(v, shape=v.type.shape[1:])

    def of_reshape(self, n: Node) -> Any:
        v = n.operands[0]
        return [self.without.get(v, v)], {"shape": n.attrs["shape"][1:]}

    def of_broadcast(self, n: Node) -> Any:
        v = n.operands[0]
        return [self.drop(v) if v.type.rank == n.result.type.rank else v], {"shape": n.attrs["shape"][1:]}

    def of_transpose(self, n: Node) -> Any:
        perm = n.attrs["perm"]
        if perm[0] != 0:
            return None
        return [self.drop(n.operands[0])], {"perm": tuple(q - 1 for q in perm[1:])}

    def of_take(self, n: Node) -> Any:
        x, idx = n.operands
        return ([x, self.drop(idx)], n.attrs) if idx.type.rank >= 2 else None


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Rewrite to canonical form.

    Removes redundant moves and arithmetic, merges chains of moves, drops the unit batch axis, names activations, folds
    constants, and removes dead code.

    batch: whether to drop the unit batch axis.
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
