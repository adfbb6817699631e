"""An outside package: the op `softcap`, the pass that finds it in a model, a C++ kernel for it, and a target record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from llmc import Extension, Pass, Rewrite, Target, op
from llmc.codegen.cpu.base import CppKernel, Sizes
from llmc.ir.graph import Module, Node
from llmc.ir.scalar import arg, call
from llmc.passes.base import Ctx
from llmc.passes.rewrite import Match, Pat, apply, const
from llmc.targets.cpu import portable
from llmc.targets.target import Limits


# The op: type rule, reference, cost and documentation. With its scalar expression given, it fuses like any other.
@op(
    "(x: f[*s]) -> x[*s]",
    flops="4*s",
    scalar=lambda attrs: call("tanh", arg(0) / attrs["cap"]) * attrs["cap"],
    example=lambda rng: ([rng.standard_normal((3, 5)).astype(np.float32) * 40], {"cap": 30.0}),
)
def softcap(x: Any, *, cap: float) -> Any:
    """cap * tanh(x / cap): values are squeezed into (-cap, cap) (Gemma 2, arXiv 2408.00118)."""
    return np.tanh(x / cap) * cap


# The rewrite that introduces it, and the pass that runs the rewrite.
p = Pat()


def _same_number(m: Match) -> str | None:
    return None if m["cap"] == m["back"] else f"it divides by {m['cap']:g} and multiplies by {m['back']:g}"


SOFTCAP = Rewrite(
    "softcap",
    p.mul(p.tanh(p.div(p.x, const("cap"))), const("back")),
    lambda b, m: b.softcap(m["x"], cap=m["cap"]),
    when=_same_number,
)


@dataclass(frozen=True)
class FuseSoftcap(Pass):
    """cap * tanh(x / cap) -> softcap."""

    name: ClassVar[str] = "fuse-softcap"

    def run(self, m: Module, ctx: Ctx) -> int:
        return sum(apply(g, [SOFTCAP], ctx) for g in m.graphs.values())


# The kernel: which nodes it fits, and its text. Threads share the elements; sizes known later come by position.
class Softcap(CppKernel):
    """softcap of float32, one element at a time."""

    def reject(self, node: Node, target: Target) -> str | None:
        dtype = node.operands[0].type.dtype
        return None if dtype == "f32" else f"it computes float32, not {dtype}"

    def helpers(self, node: Node, schedule: dict[str, Any], target: Target) -> str:
        return "#include <math.h>\n"

    def body(self, node: Node, schedule: dict[str, Any], target: Target, sizes: Sizes) -> str:
        n, cap = sizes(node.operands[0].type.numel), f"{node.attrs['cap']!r}f"
        return f"""\
const float* x = (const float*)args[0];
float* y = (float*)args[1];
int64_t lo, hi;
llmc_split(ctx, {n}, 64, &lo, &hi);
for (int64_t i = lo; i < hi; i++) y[i] = {cap} * tanhf(x[i] / {cap});"""


KERNEL = Softcap("softcap/plain", ("softcap",))


def one_thread() -> Target:
    """A target is a record: the portable CPU, planned for a single thread."""
    return replace(portable(), name="cpu:one-thread", limits=Limits(threads=1))


EXTENSION = Extension(
    "llmc-softcap",
    ops={"softcap": "llmc_softcap:softcap"},
    passes={"fuse-softcap": "llmc_softcap:FuseSoftcap"},
    kernels={"softcap/plain": "llmc_softcap:KERNEL"},
    targets={"cpu:one-thread": "llmc_softcap:one_thread"},
)
