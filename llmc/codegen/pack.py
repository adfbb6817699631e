"""The pass `pack`, which replaces weights by packed ones where the selected kernels require it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from llmc.codegen.memory import schedule_of
from llmc.diagnostics import extension_code
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.passes.analysis import weight_only
from llmc.passes.base import Ctx, Pass, target_of
from llmc.targets.target import Target


@dataclass(frozen=True)
class Pack(Pass):
    """Insert a layout op before every weight operand whose kernel requires a packed layout."""

    name: ClassVar[str] = "pack"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every launched graph; return the number of changes."""
        target, count = target_of(ctx), 0
        for g in m.launched:
            count += sum(_pack(g, n, ctx, target) for n in list(g.nodes))
            weights = weight_only(g)
            count += sum(_share(g, n, weights, ctx) for n in list(g.nodes) if n.op.name in ("take", "take_part"))
        return count


def _pack(g: Graph, n: Node, ctx: Ctx, target: Target) -> bool:
    """Let the kernel of a node replace it by one that reads weights in the kernel's layouts; False if it has none."""
    kernel = ctx.kernels.get(n.choice.get("kernel", ""))
    if kernel is None:
        return False
    schedule = schedule_of(n)
    with extension_code(f"kernel {kernel.name!r}", type(kernel), n):
        if not kernel.layouts(n, schedule, target):
            return False
        kernel.pack(g, n, schedule, target, ctx.opset)
    return True


def _share(g: Graph, n: Node, weights: Collection[Value], ctx: Ctx) -> bool:
    """Let an embedding, or a rank's part of one, whose weight is also packed (a tied output projection) read that.

    The weight is then stored only once. `weights`: the values that depend only on weights.
    """
    (table, idx), op = n.operands, ctx.opset[f"packed_{n.op.name}"]
    packed = next((u for u in table.uses if u.op.name == "pack_panel" and u.attrs["parts"] == 1), None)
    languages = target_of(ctx).languages
    takers = (k for k, x in ctx.kernels.items() if op.name in x.ops and x.language in languages)
    name = next(takers, "")
    only = all(u is n or u is packed for u in table.uses) and not any(table is o for o in g.outputs)
    if not (table in weights and table.type.rank == 2 and packed and name and only):
        return False
    g.move_before(packed, n)
    new = g.add(op, [packed.result, idx], {**n.attrs, "k": table.type.shape[1]}, before=n, loc=n.loc)
    new.choice = {"kernel": name}
    g.replace(n.result, new.result)
    g.erase(n)
    return True
