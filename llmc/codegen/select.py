"""Choosing kernels: the pass `select` writes kernel and schedule on nodes, `pack` gives weights the layout they want.

Neither emits code. The choice is by measurement where a tuning record has one, else by each kernel's cost rule; all
entry points agree on one layout a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from llmc.codegen.kernel import Kernel, Schedule
from llmc.codegen.memory import WEIGHTS
from llmc.codegen.tuning import Tuning, node_text
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.passes.base import Ctx, Pass
from llmc.targets.target import Target

TYPICAL = (("T", 256), ("R", 8), ("P", 256))  # sizes that the cost rule prices nodes at, inside their bounds

BESIDE = 96  # rows of a step of prompts: tiles for 64 would read a head twice for 64 streams and a prompt


def depends_on(g: Graph) -> tuple[set[Value], set[Value]]:
    """(values made from weights alone, values that need an input of the step). Constants are in neither."""
    weights, inputs = set[Value](), set[Value]()
    for v in g.inputs:
        (weights if v.weight else inputs).add(v)
    for n in g.nodes:
        if any(v in inputs for v in n.operands):
            inputs.update(n.results)
        elif any(v in weights for v in n.operands):
            weights.update(n.results)
    return weights, inputs


def typical(m: Module, g: Graph, n: Node | None = None) -> dict[str, int]:
    """A size for every symbol: inside its bounds, and the upper end of a range that the graph is for. For a node of a
    graph of so many tokens: prompts come beside rows that decode, and too wide a tile costs little."""
    want = dict(TYPICAL)
    out = {s: max(lo, min(hi, want.get(s, hi))) for s, (lo, hi) in m.symbols.items()}
    for s, (lo, hi) in g.ranges.items():
        out[s] = hi if hi < m.symbols[s][1] else max(lo, min(hi, 2 * lo))
    if n is not None and "T" in g.ranges:
        lo, hi = m.bounds(g).get("R", (1, 1))
        out["R"] = max(lo, min(hi, BESIDE))
    return out


@dataclass(frozen=True)
class Offer:
    """One way to run a node."""

    kernel: Kernel
    schedule: Schedule
    us: float
    measured: bool

    def layouts(self, node: Node, target: Target) -> dict[int, str]:
        return self.kernel.layouts(node, self.schedule, target)


def offers(
    node: Node, kernels: Mapping[str, Kernel], target: Target, env: Mapping[str, int], tuning: Tuning,
    prefer: Collection[str] = (),
) -> list[Offer]:  # fmt: skip
    """Every kernel x schedule that fits: kernels of `prefer` first, then measured ones, then by predicted time.

    Kernels with `opt_in` are offered only if they are in `prefer` or measured. Raises Diagnostic E430 with every
    kernel's reason if none fits.
    """
    out: list[Offer] = []
    reasons: list[str] = []
    for name in kernels:
        kernel = kernels[name]
        if kernel.language not in target.languages or not kernel.claims(node):
            continue
        if why := kernel.reject(node, target):
            reasons.append(f"{kernel.name}: {why}")
            continue
        for schedule in kernel.schedules(node, target):
            us = tuning.lookup(node, kernel.name, schedule, target, env)
            if us is None and kernel.opt_in and kernel.name not in prefer:
                continue
            guess = kernel.cost_us(node, schedule, target, env) if us is None else us
            out.append(Offer(kernel, schedule, guess, us is not None))
    if not out:
        found = "; ".join(reasons) or f"no kernel of target {target.name} is for the op {node.op.name!r}"
        remedy = "write a Kernel for it (DEVELOPING.md), or choose another target"
        raise Diagnostic("E430", f"no kernel fits: {found}", remedy, node=node)
    return sorted(out, key=lambda o: (o.kernel.name not in prefer, not o.measured, o.us))


def launched_graphs(m: Module) -> Iterator[Graph]:
    """The graphs that become programs."""
    return (g for name, g in m.graphs.items() if name != WEIGHTS)


class Choices:
    """What was chosen, and among what, as data: one row for all nodes of a graph that are alike and chose alike.

    A row is {"graph", "node": its text, "loc": of the first, "count", "kernel", "schedule", "us", "measured", "ways",
    "sizes": that they were compared at, "others": the best ways not taken}; `us` is measured or by the cost rule.
    """

    OTHERS = 3

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, int], dict[str, Any]] = {}

    def add(self, g: Graph, n: Node, best: Offer, offered: list[Offer], env: Mapping[str, int]) -> None:
        key = (g.name, node_text(n), id(best))
        if key not in self.rows:
            rest = [_way(o) for o in offered if o is not best]
            self.rows[key] = {
                "graph": g.name, "node": node_text(n), "loc": n.loc, "count": 0, **_way(best), "ways": len(offered),
                "sizes": dict(env), "others": rest[: self.OTHERS],
            }  # fmt: skip
        self.rows[key]["count"] += 1


def _way(o: Offer) -> dict[str, Any]:
    return {"kernel": o.kernel.name, "schedule": dict(o.schedule), "us": round(o.us, 3), "measured": o.measured}


@dataclass(frozen=True)
class Select(Pass):
    """Write kernel and schedule on every node that runs. tuning: a file of measurements that decide where they can, in
    place of those that come with us for the target. prefer: names of kernels to take wherever they fit."""

    tuning: str = ""
    prefer: tuple[str, ...] = ()
    name: ClassVar[str] = "select"

    def run(self, m: Module, ctx: Ctx) -> int:
        target = _target(ctx)
        if unknown := next((k for k in self.prefer if k not in ctx.kernels), None):
            raise Diagnostic("E421", f"pass select: there is no kernel {unknown!r}", _near(unknown, ctx.kernels))
        tuning = Tuning.load(Path(self.tuning)) if self.tuning else Tuning.shipped(target)
        agreed: dict[str, str] = {}
        told = Choices()
        count = measured = open_ = 0
        for g in launched_graphs(m):
            cache: dict[str, list[Offer]] = {}
            weights, _ = depends_on(g)
            for n in g.nodes:
                if n.choice or all(r in weights for r in n.results):
                    continue
                key, env = _key(n, g), typical(m, g, n)
                if key not in cache:
                    cache[key] = offers(n, ctx.kernels, target, env, tuning, self.prefer)
                best = _agreeing(n, cache[key], agreed, target)
                told.add(g, n, best, cache[key], env)
                n.choice = {"kernel": best.kernel.name, **best.schedule}
                count, measured, open_ = count + 1, measured + best.measured, open_ + (len(cache[key]) > 1)
        if open_:
            ctx.told[tuning.decided(measured, count, target)] = None
        ctx.choices += told.rows.values()
        return count


def _near(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown kernel's name."""
    near = get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else "name one that an installed extension offers"


def _target(ctx: Ctx) -> Target:
    if ctx.target is None:
        raise Diagnostic("E431", "this pass needs a target", "name one: --target cpu:native")
    return ctx.target


def _key(n: Node, g: Graph) -> str:
    """Nodes with equal keys have equal offers: op, types, attributes, and which operands are weights."""
    from llmc.ir.digest import node_digest

    known = "".join("w" if v.weight or (v.node is not None and not v.node.choice) else "x" for v in n.operands)
    return node_digest(n) + known


def _agreeing(n: Node, found: list[Offer], agreed: dict[str, str], target: Target) -> Offer:
    """The best offer whose layouts are those that earlier users of the same weights chose; it sets them for later."""
    for o in found:
        wants = {_origin(n.operands[i]): text for i, text in o.layouts(n, target).items()}
        if all(agreed.setdefault(w, text) == text for w, text in wants.items()):
            return o
    return found[0]


def _origin(v: Value) -> str:
    """A weight's identity across entry points: its name, or that of the value computed from weights."""
    if v.node is None:
        return v.name
    inner = ",".join(_origin(x) for x in v.node.operands)
    return f"{v.node.op.name}({inner}){sorted((k, str(a)) for k, a in v.node.attrs.items())}"


@dataclass(frozen=True)
class Pack(Pass):
    """Put a layout op in front of every weight operand whose kernel wants one."""

    name: ClassVar[str] = "pack"

    def run(self, m: Module, ctx: Ctx) -> int:
        target, count = _target(ctx), 0
        for g in launched_graphs(m):
            for n in list(g.nodes):
                kernel = ctx.kernels.get(n.choice.get("kernel", ""))
                if kernel is None:
                    continue
                schedule = {k: v for k, v in n.choice.items() if k != "kernel"}
                if kernel.layouts(n, schedule, target):
                    kernel.pack(g, n, schedule, target, ctx.opset)
                    count += 1
            count += sum(_share(g, n, ctx) for n in list(g.nodes) if n.op.name == "take")
        return count


def _share(g: Graph, n: Node, ctx: Ctx) -> bool:
    """An embedding whose weight is also in panels (a tied head) reads the panels: the weight is kept once."""
    table, idx = n.operands
    packed = next((u for u in table.uses if u.op.name == "pack_panel" and u.attrs["parts"] == 1), None)
    name = next((k for k in ctx.kernels if k.endswith("/packed_take")), "")
    only = all(u is n or u is packed for u in table.uses) and not any(table is o for o in g.outputs)
    if not (table.weight and table.type.rank == 2 and packed and name and only):
        return False
    g.move_before(packed, n)
    new = g.add(ctx.opset["packed_take"], [packed.result, idx], {"k": table.type.shape[1]}, before=n, loc=n.loc)
    new.choice = {"kernel": name}
    g.replace(n.result, new.result)
    g.erase(n)
    return True
