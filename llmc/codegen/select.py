"""The pass `select`, which chooses a kernel and schedule for every node.

A choice is based on measurements if there are any for the node, otherwise on the kernels' cost estimates. All entry
points use the same layout of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from llmc_runtime.format.nearest import did_you_mean

from llmc.codegen.candidates import Candidate, candidates, precedes, refusals, typical
from llmc.codegen.fixed_order import agreed_orders, key_of
from llmc.codegen.tuning_records import Tuning, node_text
from llmc.diagnostics import Diagnostic
from llmc.ir.digest import node_digest
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.passes.analysis import launched_nodes
from llmc.passes.base import Ctx, Pass, target_of
from llmc.targets.target import Target

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
    """Return the layouts that all users support with the smallest sum of times; () if there are none."""
    supported = [layouts for layouts in times_of_users[0] if all(layouts in times for times in times_of_users)]
    return min(supported, key=lambda layouts: sum(times[layouts] for times in times_of_users), default=())


def agreeing(n: Node, ranked: list[Candidate], agreed: dict[str, str], target: Target) -> Candidate:
    """Return the best candidate whose layouts match those of earlier users of the same weights, and record its layouts.

    `agreed` maps weights to their layouts.
    """
    for o in ranked:
        layouts = {_origin(n.operands[i]): text for i, text in o.layouts(n, target).items()}
        if all(agreed.setdefault(w, text) == text for w, text in layouts.items()):
            return o
    return ranked[0]


def _origin(v: Value) -> str:
    """Return a weight's identity across entry points: its name, or the expression that computes it from weights."""
    if v.node is None:
        return v.name
    inner = ",".join(_origin(x) for x in v.node.operands)
    return f"{v.node.op.name}({inner}){sorted((k, str(a)) for k, a in v.node.attrs.items())}"


@dataclass(frozen=True)
class Ranked:
    """A node to choose for, its candidates, best first, and the sizes of symbols at which they were compared."""

    graph: Graph
    node: Node
    candidates: list[Candidate]
    sizes: dict[str, int]


class Choices:
    """Record of the choices and their alternatives, with one row per graph for equal nodes with equal choices.

    A row is {"graph", "node": its text, "loc": of the first node, "count", "kernel", "schedule", "us", "measured",
    "ways", "sizes": at which they were compared, "others": the best alternatives, "refused": name -> reason of the
    other kernels of the op}. `us` is measured or estimated.
    """

    MAX_ALTERNATIVES = 3

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, int], dict[str, Any]] = {}

    def add(self, r: Ranked, best: Candidate, refused: Callable[[Ranked], Mapping[str, str]]) -> None:
        """Count a node under the row of its choice `best`; `refused` returns the reasons of the other kernels."""
        graph, node = r.graph.name, node_text(r.node)
        key = (graph, node, id(best))
        if key not in self.rows:
            rest = [_choice(o) for o in r.candidates if o is not best]
            self.rows[key] = {
                "graph": graph, "node": node, "loc": r.node.loc, "count": 0, **_choice(best),
                "ways": len(r.candidates), "sizes": dict(r.sizes), "others": rest[: self.MAX_ALTERNATIVES],
                "refused": dict(refused(r)),
            }  # fmt: skip
        self.rows[key]["count"] += 1


def _choice(o: Candidate) -> dict[str, Any]:
    return {"kernel": o.kernel.name, "schedule": dict(o.schedule), "us": round(o.us, 3), "measured": o.measured}


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
        target = target_of(ctx)
        if unknown := next((k for k in self.prefer if k not in ctx.kernels), None):
            remedy = did_you_mean(unknown, ctx.kernels, "use the name of an installed kernel")
            raise Diagnostic("E421", f"pass select: there is no kernel {unknown!r}", remedy)
        tuning = Tuning.load(Path(self.tuning)) if self.tuning else Tuning.shipped(target)
        ranked = list(self._ranked(m, ctx, target, tuning))
        if target.deterministic:
            ranked = in_agreed_order(ranked)
        agreed = common_layouts([(r.node, r.candidates) for r in ranked], self.prefer, target)
        choices, chosen = Choices(), list[Candidate]()
        for r in ranked:
            best = agreeing(r.node, r.candidates, agreed, target)
            choices.add(r, best, lambda r: refusals(r.node, ctx.kernels, target, r.candidates))
            r.node.choice = {"kernel": best.kernel.name, **best.schedule}
            chosen.append(best)
        if any(len(r.candidates) > 1 for r in ranked):
            ctx.notes[tuning.summary(sum(c.measured for c in chosen), len(ranked), target)] = None
        ctx.choices += choices.rows.values()
        ctx.notes.update(dict.fromkeys(self._missing_kernels(ranked, ctx, target, tuning)))
        return len(ranked)

    def _missing_kernels(self, ranked: Sequence[Ranked], ctx: Ctx, target: Target, tuning: Tuning) -> Iterator[str]:
        """Yield a note about each kernel that would have been chosen, but whose package is not installed."""
        for name in ctx.kernels:
            kernel = ctx.kernels[name]
            if kernel.language not in target.languages or not kernel.missing():
                continue
            distinct = {id(r.candidates): r for r in ranked}  # equal nodes of a graph share their candidates
            for r in distinct.values():
                if not kernel.claims(r.node) or kernel.reject(r.node, target) is not None:
                    continue
                leads = name in self.prefer or kernel.leads(r.node, target, r.sizes)
                if leads or precedes(kernel, r.node, target, r.sizes, tuning, r.candidates[0]):
                    yield f"compiled without the kernel {name}: {kernel.missing()}"
                    break

    def _ranked(self, m: Module, ctx: Ctx, target: Target, tuning: Tuning) -> Iterator[Ranked]:
        """Yield each node to choose for. Nodes with equal keys have one list of candidates per graph."""
        for g in m.launched:
            cache: dict[str, list[Candidate]] = {}
            for n in launched_nodes(g):
                if n.choice:
                    continue
                key, sizes = _key(n), typical(m, g, n)
                if key not in cache:
                    cache[key] = candidates(n, ctx.kernels, target, sizes, tuning, self.prefer)
                yield Ranked(g, n, cache[key], sizes)


def in_agreed_order(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Keep the candidates whose order of sums is the one that all entry points use (see `fixed_order`)."""
    members = []
    for r in ranked:
        orders: dict[str, float] = {}
        for o in r.candidates:
            orders.setdefault(o.order, o.us / max(r.candidates[0].us, 1e-9))
        members.append((r.graph, r.node, orders))
    agreed = agreed_orders(members)

    def in_order(r: Ranked) -> list[Candidate]:
        return [o for o in r.candidates if o.order == agreed[key_of(r.graph, r.node)]]

    return [replace(r, candidates=in_order(r)) for r in ranked]


def _key(n: Node) -> str:
    """Return a key; nodes with equal keys have equal candidates. It covers op, types, attributes, and which operands
    are weights.
    """
    known = "".join("w" if v.weight or (v.node is not None and not v.node.choice) else "x" for v in n.operands)
    return node_digest(n) + known
