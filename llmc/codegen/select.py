"""The passes `select`, which chooses a kernel and schedule for every node, and `pack`, which packs weights for them.

A choice is based on measurements if there are any for the node, otherwise on the kernels' cost estimates. All entry
points use the same layout of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmc_runtime.format.nearest import did_you_mean

from llmc.codegen.fixed_order import agreed_orders, key_of, order_of
from llmc.codegen.kernel import Kernel, Schedule
from llmc.codegen.memory import WEIGHTS
from llmc.codegen.tuning_records import Tuning, node_text
from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.passes.analysis import weight_only
from llmc.passes.base import Ctx, Pass
from llmc.targets.target import Target

TYPICAL = (("T", 256), ("R", 8), ("P", 256))  # sizes at which candidates are compared, clamped to the symbols' bounds
COVERED = 1.25  # times the fastest: schedules that are not slower were probably measured
MIXED_ROWS = 96  # rows assumed in a step with prompts: a prompt and 64 decoding rows need more than one tile of 64


def typical(m: Module, g: Graph, n: Node | None = None) -> dict[str, int]:
    """Return the size of every symbol at which candidates are compared, within its bounds.

    A range that the graph is specialized for is represented by its upper end, the last range by twice its lower end.
    For a node of a graph with a token range, the number of rows is that of prompts mixed with decoding rows, because a
    tile that is too wide costs little.
    """
    sizes = dict(TYPICAL)
    out = {s: max(lo, min(hi, sizes.get(s, hi))) for s, (lo, hi) in m.symbols.items()}
    for s, (lo, hi) in g.ranges.items():
        out[s] = hi if hi < m.symbols[s][1] else max(lo, min(hi, 2 * lo))
    if n is not None and "T" in g.ranges:
        lo, hi = m.bounds(g).get("R", (1, 1))
        out["R"] = max(lo, min(hi, MIXED_ROWS))
    return out


@dataclass(frozen=True)
class Candidate:
    """A kernel and schedule that can run a node, with its measured or estimated time, and the order of its sums.

    leads: whether it precedes measured candidates (see `Kernel.leads`).
    """

    kernel: Kernel
    schedule: Schedule
    us: float
    measured: bool
    order: str = ""  # set for deterministic targets only
    leads: bool = False

    def layouts(self, node: Node, target: Target) -> dict[int, str]:
        """Return operand index -> packed layout, as `Kernel.layouts`."""
        with extension_code(f"kernel {self.kernel.name!r}", type(self.kernel), node):
            return self.kernel.layouts(node, self.schedule, target)


def candidates(
    node: Node, kernels: Mapping[str, Kernel], target: Target, env: Mapping[str, int], tuning: Tuning,
    prefer: Collection[str] = (),
) -> list[Candidate]:  # fmt: skip
    """Return all pairs of kernel and schedule that can run the node, best first.

    Kernels of `prefer` come first, then those that lead, then measured pairs, then the others by predicted time.
    Kernels with `opt_in` are included only if they are in `prefer`, lead or were measured. For deterministic targets,
    only kernels that name the order of their sums are included. The measured ones among these may be slow: a pair that
    is much slower than the fastest measured pair of the node ranks with the pairs that were not measured. Raises
    Diagnostic E430 with every kernel's reason if there is none.
    """
    out: list[Candidate] = []
    reasons: list[str] = []
    for name in kernels:
        kernel = kernels[name]
        if kernel.language not in target.languages or not kernel.claims(node):
            continue
        with extension_code(f"kernel {name!r}", type(kernel), node):
            why = kernel.reject(node, target)
            if not isinstance(why, str | None):
                raise TypeError(f"reject returned {why!r}, not None (supported) or the reason")
            scheduled: list[Candidate] = []
            if not (why := why or kernel.missing()):
                measured_only = kernel.opt_in and kernel.name not in prefer
                scheduled = list(_scheduled(kernel, node, target, env, tuning, measured_only))
                if target.deterministic and not scheduled:
                    why = "its results may depend on the batch"
        out += scheduled
        if why:
            reasons.append(f"{kernel.name}: {why}")
    if not out:
        raise _no_kernel(node, target, reasons)
    limit = COVERED * tuning.fastest(node, target, env) if target.deterministic else math.inf

    def rank(o: Candidate) -> tuple[bool, bool, bool, float]:
        return o.kernel.name not in prefer, not o.leads, not o.measured or o.us > limit, o.us

    return sorted(out, key=rank)


def _no_kernel(node: Node, target: Target, reasons: Sequence[str]) -> Diagnostic:
    """Return the error for a node without candidates; `reasons` has one for each kernel of its op."""
    why = "; ".join(reasons) or f"target {target.name} has no kernel for the op {node.op.name!r}"
    remedy = "write a Kernel for it (DEVELOPING.md), or choose another target"
    if target.deterministic:
        remedy = "compile without --deterministic, or leave out of --pipeline the pass that makes the op"
    return Diagnostic("E430", f"no kernel can run the node: {why}", remedy, node=node)


def _scheduled(
    kernel: Kernel, node: Node, target: Target, env: Mapping[str, int], tuning: Tuning, measured_only: bool
) -> Iterator[Candidate]:
    """Yield the kernel's schedules of a node with their times; raises ValueError if it offers none."""
    offered = kernel.schedules(node, target)
    if not offered:
        raise ValueError("schedules returned no schedule; return [{}] if there is nothing to choose")
    times = [tuning.lookup(node, kernel.name, schedule, target, env) for schedule in offered]
    leads = all(us is None for us in times) and kernel.leads(node, target, env)
    for schedule, us in zip(offered, times, strict=True):
        order = order_of(kernel, node, schedule, target) if target.deterministic else ""
        if order is None:
            continue
        if us is None and measured_only and not leads:
            continue
        predicted = kernel.cost_us(node, schedule, target, env) if us is None else us
        if not predicted >= 0:
            raise ValueError(f"cost_us returned {predicted!r}, not a number of microseconds")
        yield Candidate(kernel, schedule, predicted, us is not None, order, leads)


def refusals(
    node: Node, kernels: Mapping[str, Kernel], target: Target, found: Collection[Candidate] = ()
) -> dict[str, str]:  # fmt: skip
    """Return name -> reason of the kernels of the target that implement the node's op, but are not in `found`."""
    other = "its order of sums depends on the batch, or is not the one that all programs use"
    opt_in = "opt-in: neither measured for this node nor in select{prefer=[...]}"
    rest = (kernels[name] for name in kernels if name not in {o.kernel.name for o in found})
    ours = (k for k in rest if k.language in target.languages and k.claims(node))
    return {k.name: k.reject(node, target) or k.missing() or (opt_in if k.opt_in else other) for k in ours}


def launched_graphs(m: Module) -> Iterator[Graph]:
    """Yield the graphs that become programs."""
    return (g for name, g in m.graphs.items() if name != WEIGHTS)


class Choices:
    """Record of the choices and their alternatives, with one row per graph for equal nodes with equal choices.

    A row is {"graph", "node": its text, "loc": of the first node, "count", "kernel", "schedule", "us", "measured",
    "ways", "sizes": at which they were compared, "others": the best alternatives, "refused": name -> reason of the
    other kernels of the op}. `us` is measured or estimated.
    """

    OTHERS = 3

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, int], dict[str, Any]] = {}

    def add(
        self, g: Graph, n: Node, best: Candidate, alternatives: list[Candidate], env: Mapping[str, int],
        refused: Callable[[Node, list[Candidate]], Mapping[str, str]],
    ) -> None:  # fmt: skip
        """Count a node under its row."""
        key = (g.name, node_text(n), id(best))
        if key not in self.rows:
            rest = [_choice(o) for o in alternatives if o is not best]
            self.rows[key] = {
                "graph": g.name, "node": node_text(n), "loc": n.loc, "count": 0, **_choice(best),
                "ways": len(alternatives), "sizes": dict(env), "others": rest[: self.OTHERS],
                "refused": dict(refused(n, alternatives)),
            }  # fmt: skip
        self.rows[key]["count"] += 1


def _choice(o: Candidate) -> dict[str, Any]:
    return {"kernel": o.kernel.name, "schedule": dict(o.schedule), "us": round(o.us, 3), "measured": o.measured}


def _fastest(kernel: Kernel, n: Node, target: Target, env: Mapping[str, int], tuning: Tuning) -> bool:
    """Whether a schedule of the kernel is the fastest measured one of a node at the sizes `env`."""
    times = (tuning.lookup(n, kernel.name, s, target, env) for s in kernel.schedules(n, target))
    least = min((us for us in times if us is not None), default=math.inf)
    return least < math.inf and least <= tuning.fastest(n, target, env)


Ranked = tuple[Graph, Node, list[Candidate], dict[str, int]]  # candidates best first, compared at these sizes


@dataclass(frozen=True)
class Select(Pass):
    """Choose kernel and schedule of every launched node.

    tuning: a file of measurements to use instead of those shipped for the target. prefer: names of kernels to use for
    every node that they support.
    """

    tuning: str = ""
    prefer: tuple[str, ...] = ()
    name: ClassVar[str] = "select"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every launched graph; return the number of chosen nodes."""
        target = _target(ctx)
        if unknown := next((k for k in self.prefer if k not in ctx.kernels), None):
            remedy = did_you_mean(unknown, ctx.kernels, "use the name of an installed kernel")
            raise Diagnostic("E421", f"pass select: there is no kernel {unknown!r}", remedy)
        tuning = Tuning.load(Path(self.tuning)) if self.tuning else Tuning.shipped(target)
        choices = Choices()
        measured = open_ = 0
        ranked = list(self._ranked(m, ctx, target, tuning))
        if target.deterministic:
            ranked = in_agreed_order(ranked)
        agreed = common_layouts([(n, found) for _, n, found, _ in ranked], self.prefer, target)
        for g, n, found, env in ranked:
            best = _agreeing(n, found, agreed, target)
            choices.add(g, n, best, found, env, lambda n, found: refusals(n, ctx.kernels, target, found))
            n.choice = {"kernel": best.kernel.name, **best.schedule}
            measured, open_ = measured + best.measured, open_ + (len(found) > 1)
        if open_:
            ctx.notes[tuning.summary(measured, len(ranked), target)] = None
        ctx.choices += choices.rows.values()
        ctx.notes.update(dict.fromkeys(self._done_without(ranked, ctx, target, tuning)))
        return len(ranked)

    def _done_without(self, ranked: Sequence[Ranked], ctx: Ctx, target: Target, tuning: Tuning) -> Iterator[str]:
        """Yield a note about each kernel that would have been chosen, but whose package is not installed."""
        for name in ctx.kernels:
            kernel = ctx.kernels[name]
            if kernel.language not in target.languages or not kernel.missing():
                continue
            for _, n, _, env in ranked:
                if not kernel.claims(n) or kernel.reject(n, target) is not None:
                    continue
                if name in self.prefer or kernel.leads(n, target, env) or _fastest(kernel, n, target, env, tuning):
                    yield f"compiled without the kernel {name}: {kernel.missing()}"
                    break

    def _ranked(self, m: Module, ctx: Ctx, target: Target, tuning: Tuning) -> Iterator[Ranked]:
        """Yield each node to choose for, its candidates best first, and the sizes at which they were compared."""
        for g in launched_graphs(m):
            cache: dict[str, list[Candidate]] = {}
            weights = weight_only(g)
            for n in g.nodes:
                if n.choice or all(r in weights for r in n.results):
                    continue
                key, env = _key(n, g), typical(m, g, n)
                if key not in cache:
                    cache[key] = candidates(n, ctx.kernels, target, env, tuning, self.prefer)
                yield g, n, cache[key], env


def in_agreed_order(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Keep the candidates whose order of sums is the one that all entry points use (see `fixed_order`)."""
    members = []
    for g, n, found, _ in ranked:
        orders: dict[str, float] = {}
        for o in found:
            orders.setdefault(o.order, o.us / max(found[0].us, 1e-9))
        members.append((g, n, orders))
    agreed = agreed_orders(members)
    return [(g, n, [o for o in found if o.order == agreed[key_of(g, n)]], env) for g, n, found, env in ranked]


def _target(ctx: Ctx) -> Target:
    if ctx.target is None:
        raise Diagnostic("E431", "this pass needs a target", "pass --target, for example --target cpu:native")
    return ctx.target


def _key(n: Node, g: Graph) -> str:
    """Nodes with equal keys have equal candidates. Covers op, types, attributes, and which operands are weights."""
    from llmc.ir.digest import node_digest

    known = "".join("w" if v.weight or (v.node is not None and not v.node.choice) else "x" for v in n.operands)
    return node_digest(n) + known


Layouts = tuple[tuple[str, str], ...]  # (weight, its packed layout), sorted


def common_layouts(
    ranked: Sequence[tuple[Node, list[Candidate]]], prefer: Collection[str], target: Target
) -> dict[str, str]:
    """Return the layout of each weight that kernels would pack differently.

    Of the layouts that every user of a weight supports, it is the one with the smallest mean time of its users, each
    relative to the user's best candidate.
    """
    users: dict[frozenset[str], list[dict[Layouts, float]]] = {}  # by the weights that the user reads
    for n, candidates_of in ranked:
        times = _times_by_layouts(n, candidates_of, prefer, target)
        weights = frozenset(weight for layouts in times for weight, _ in layouts)
        if weights:
            users.setdefault(weights, []).append(times)
    agreed: dict[str, str] = {}
    for times_of_users in users.values():
        agreed.update(_fastest_layouts(times_of_users))
    return agreed


def _times_by_layouts(
    n: Node, candidates_of: list[Candidate], prefer: Collection[str], target: Target
) -> dict[Layouts, float]:
    """Return the time of the best candidate for each choice of layouts, relative to the best candidate of all.

    Candidates without packed weights have the empty choice. If there are kernels of `prefer`, only these count.
    """
    times: dict[Layouts, float] = {}
    for c in [c for c in candidates_of if c.kernel.name in prefer] or candidates_of:
        layouts = tuple(sorted((_origin(n.operands[i]), text) for i, text in c.layouts(n, target).items()))
        times.setdefault(layouts, c.us / max(candidates_of[0].us, 1e-9))
    return times


def _fastest_layouts(times_of_users: Sequence[Mapping[Layouts, float]]) -> Layouts:
    """Return the layouts with the smallest sum of times among those that all users support; () if there are none."""
    supported = [layouts for layouts in times_of_users[0] if all(layouts in times for times in times_of_users)]
    return min(supported, key=lambda layouts: sum(times[layouts] for times in times_of_users), default=())


def _agreeing(n: Node, ranked: list[Candidate], agreed: dict[str, str], target: Target) -> Candidate:
    """Return the best candidate whose layouts match those of earlier users of the same weights, and record its layouts.

    `agreed` maps weights to their layouts.
    """
    for o in ranked:
        layouts = {_origin(n.operands[i]): text for i, text in o.layouts(n, target).items()}
        if all(agreed.setdefault(w, text) == text for w, text in layouts.items()):
            return o
    return ranked[0]


def _origin(v: Value) -> str:
    """A weight's identity across entry points: its name, or the expression that computes it from weights."""
    if v.node is None:
        return v.name
    inner = ",".join(_origin(x) for x in v.node.operands)
    return f"{v.node.op.name}({inner}){sorted((k, str(a)) for k, a in v.node.attrs.items())}"


@dataclass(frozen=True)
class Pack(Pass):
    """Insert a layout op before every weight operand whose kernel requires a packed layout."""

    name: ClassVar[str] = "pack"

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every launched graph; return the number of changes."""
        target, count = _target(ctx), 0
        for g in launched_graphs(m):
            for n in list(g.nodes):
                kernel = ctx.kernels.get(n.choice.get("kernel", ""))
                if kernel is None:
                    continue
                schedule = {k: v for k, v in n.choice.items() if k != "kernel"}
                with extension_code(f"kernel {kernel.name!r}", type(kernel), n):
                    if kernel.layouts(n, schedule, target):
                        kernel.pack(g, n, schedule, target, ctx.opset)
                        count += 1
            weights = weight_only(g)
            count += sum(_share(g, n, weights, ctx) for n in list(g.nodes) if n.op.name in ("take", "take_part"))
        return count


def _share(g: Graph, n: Node, weights: Collection[Value], ctx: Ctx) -> bool:
    """Let an embedding, or a rank's part of one, whose weight is also packed (a tied output projection) read that.

    The weight is then stored only once. `weights`: the values that depend only on weights.
    """
    (table, idx), op = n.operands, ctx.opset[f"packed_{n.op.name}"]
    packed = next((u for u in table.uses if u.op.name == "pack_panel" and u.attrs["parts"] == 1), None)
    languages = _target(ctx).languages
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
