"""Every Triton kernel on an AMD GPU against the reference of its op: odd shapes, poisoned outputs, guard zones.

    python tests/gpu/hip_kernels.py [--target hip:gfx942] [--sample N]

It compiles the cases first. The last line is JSON: the numbers of cases and kernels, and a line for each failure. The
exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "runtime"), str(root / "tests")]

from gpu.hip_card import HipCard
from gpu.kernel_cases import Job, all_cases, compile_jobs, jobs_of
from gpu.test_kernels import failures
from kernels.harness import Case

from llmc.codegen.backends.triton.triton_kernel import FLOAT8, float8
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.extension import load
from llmc.ir.graph import Module
from llmc.ir.ops import OPS
from llmc.ir.text import parse, show
from llmc.targets.target import Target

F8 = FLOAT8[0]


def own(case: Case, target: Target) -> Case | None:
    """The case with the target's 8-bit floats and one of its schedules; None if the target has no such kernel."""
    dtypes = {v.type.dtype for v in [*case.node.operands, *case.node.results]}
    changed = case
    if (f8 := float8(target)) and dtypes & {*FLOAT8}:
        text = show(Module({"main": case.graph}))
        m = parse(text.replace(next(d for d in reversed(FLOAT8) if d in dtypes), f8), OPS)
        (graph,) = m.graphs.values()
        limited = [
            np.clip(x, -240, 240) if v.type.dtype in FLOAT8 else x
            for v, x in zip(graph.inputs, case.inputs, strict=True)
        ]
        changed = replace(case, graph=graph, inputs=limited)
    if changed.kernel.reject(changed.node, target) is not None:
        return None
    offered = changed.kernel.schedules(changed.node, target)
    if changed.schedule not in offered:
        changed = replace(changed, schedule=offered[len(changed.name) % len(offered)])
    return changed


def jobs(target: Target, sample: int) -> Iterator[Job]:
    """Every `sample`-th case that the target has."""
    toolchain = TritonToolchain.find(target)
    for i, case in enumerate(all_cases(target)):
        if i % sample == 0 and (mine := own(case, target)) is not None:
            yield next(jobs_of(mine, i, toolchain, target))


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the cases, run them, and print the results."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--target", default="hip:gfx942", help="target of the GPU (hip:gfx942)")
    ap.add_argument("--sample", type=int, default=1, metavar="N", help="run every N-th case (1: all)")
    args = ap.parse_args(argv)
    target = load().target(args.target)
    found = list(jobs(target, args.sample))
    binaries = compile_jobs(found, target)
    card = HipCard()
    if card.arch != target.arch:
        print(f"this GPU is {card.arch}, not {target.arch}", file=sys.stderr)
        return 1
    try:
        failed = failures(card, found, binaries)
    finally:
        card.close()
    kernels = {job.case.kernel.name for job in found}
    print(json.dumps({"cases": len(found), "kernels": len(kernels), "failed": failed}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
