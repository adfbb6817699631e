"""The candidates for a node: pairs of kernel and schedule that can run it, with their measured or estimated times."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmc.codegen.fixed_order import order_of
from llmc.codegen.kernel import Kernel, Schedule
from llmc.codegen.tuning_records import Tuning
from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Graph, Module, Node
from llmc.passes.base import claiming
from llmc.targets.target import Target

# Sizes at which candidates are compared, clamped to the symbols' bounds.
TYPICAL_SIZES = (("T", 256), ("R", 8), ("P", 256))
MAX_SLOWDOWN = 1.25  # times the fastest: schedules that are not slower were probably measured
MIXED_ROWS = 96  # rows assumed in a step with prompts: a prompt and 64 decoding rows need more than one tile of 64


def typical(m: Module, g: Graph, n: Node | None = None) -> dict[str, int]:
    """Return the size of every symbol at which candidates are compared, within its bounds.

    A range that the graph is specialized for is represented by its upper end, and the last range by twice the upper end
    of the range before it: its lower end, one token more than that, would fill a last tile with a single token. For a
    node of a graph with a token range, the number of rows is that of prompts mixed with decoding rows, because a tile
    that is too wide costs little.
    """
    sizes = dict(TYPICAL_SIZES)
    out = {s: max(lo, min(hi, sizes.get(s, hi))) for s, (lo, hi) in m.symbols.items()}
    for s, (lo, hi) in g.ranges.items():
        out[s] = hi if hi < m.symbols[s][1] else max(lo, min(hi, 2 * max(1, lo - 1)))
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

    Order: kernels of `prefer`, kernels that lead, measured pairs, and the others by predicted time. Kernels with
    `opt_in` are included only if they are in `prefer`, lead or were measured. For deterministic targets, only kernels
    that name the order of their sums are included. The measured ones among these may be slow: a pair that is much
    slower than the fastest measured pair of the node ranks with the pairs that were not measured. Raises Diagnostic
    E430 with every kernel's reason if there is none.
    """
    out: list[Candidate] = []
    reasons: list[str] = []
    for kernel in claiming(node, kernels, target):
        measured_only = kernel.opt_in and kernel.name not in prefer
        with extension_code(f"kernel {kernel.name!r}", type(kernel), node):
            scheduled = _scheduled_or_reason(kernel, node, target, env, tuning, measured_only)
        if isinstance(scheduled, str):
            reasons.append(f"{kernel.name}: {scheduled}")
        else:
            out += scheduled
    if not out:
        raise _no_kernel(node, target, reasons)
    limit = MAX_SLOWDOWN * tuning.fastest(node, target, env) if target.deterministic else math.inf

    def rank(candidate: Candidate) -> tuple[bool, bool, bool, float]:
        measured = candidate.measured and candidate.us <= limit
        return candidate.kernel.name not in prefer, not candidate.leads, not measured, candidate.us

    return sorted(out, key=rank)


def _no_kernel(node: Node, target: Target, reasons: Sequence[str]) -> Diagnostic:
    """Return the error for a node without candidates; `reasons` has one for each kernel of its op."""
    why = "; ".join(reasons) or f"target {target.name} has no kernel for the op {node.op.name!r}"
    remedy = "write a kernel for it (docs/howto-op.md), or choose another target"
    if target.deterministic:
        remedy = "compile without --deterministic, or leave out of --pipeline the pass that makes the op"
    return Diagnostic("E430", f"no kernel can run the node: {why}", remedy, node=node)


def _scheduled_or_reason(
    kernel: Kernel, node: Node, target: Target, env: Mapping[str, int], tuning: Tuning, measured_only: bool
) -> list[Candidate] | str:
    """Return the kernel's candidates for a node, or the reason why it cannot run the node."""
    why = kernel.reject(node, target)
    if not isinstance(why, str | None):
        raise TypeError(f"reject returned {why!r}, not None (supported) or the reason")
    if why := why or kernel.missing():
        return why
    scheduled = list(_scheduled(kernel, node, target, env, tuning, measured_only))
    if target.deterministic and not scheduled:
        return "its results may depend on the batch"
    return scheduled


def _scheduled(
    kernel: Kernel, node: Node, target: Target, env: Mapping[str, int], tuning: Tuning, measured_only: bool
) -> Iterator[Candidate]:
    """Yield the kernel's schedules of a node with their times; raises ValueError if it offers none."""
    offered = kernel.schedules(node, target)
    if not offered:
        raise ValueError("schedules returned no schedule; return [{}] if there is nothing to choose")
    times = tuning.lookup(node, kernel.name, offered, target, env)
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
    node: Node, kernels: Mapping[str, Kernel], target: Target, selected: Collection[Candidate] = ()
) -> dict[str, str]:  # fmt: skip
    """Return name -> reason of the kernels of the target that implement the node's op, but are not in `selected`."""
    not_same_order = "its order of sums depends on the batch, or is not the one that all programs use"
    opt_in = "opt-in: neither measured for this node nor in select{prefer=[...]}"
    names = {o.kernel.name for o in selected}
    rest = (k for k in claiming(node, kernels, target) if k.name not in names)
    return {k.name: k.reject(node, target) or k.missing() or (opt_in if k.opt_in else not_same_order) for k in rest}


def precedes(kernel: Kernel, n: Node, target: Target, env: Mapping[str, int], tuning: Tuning, best: Candidate) -> bool:
    """Return whether a kernel that is not installed would precede `best`, the first candidate of a node at the sizes
    `env`: one of its schedules is the fastest measured one, or nothing was measured and it is predicted to be faster.
    """
    times = tuning.lookup(n, kernel.name, kernel.schedules(n, target), target, env)
    fastest = min((us for us in times if us is not None), default=math.inf)
    if fastest < math.inf and fastest <= tuning.fastest(n, target, env):
        return True
    if kernel.opt_in or best.measured or best.leads:
        return False
    return any(c.us < best.us for c in _scheduled(kernel, n, target, env, tuning, measured_only=False))
