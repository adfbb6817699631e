"""The kernel cases that run on a GPU, and their binaries: made in a pool, here or on a machine without a GPU.

    python tests/gpu/kernel_cases.py [--target cuda:sm_90]      compiles them all into build/gpu/kernels

Triton kernels run the cases of every other language (tests/kernels/cases.py) and those of their own tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from gpu.borrowed import borrowed_cases  # noqa: E402
from kernels.cases import of_ops, of_random, of_texts  # noqa: E402
from kernels.harness import Case  # noqa: E402

from llmc.codegen.backends.triton.gemm_tma import has_maps  # noqa: E402
from llmc.codegen.backends.triton.kernel_table import KERNELS  # noqa: E402
from llmc.codegen.backends.triton.triton_toolchain import Compiled, TritonToolchain  # noqa: E402
from llmc.codegen.kernel import LATE, SETTLED, Kernel, Schedule, Source  # noqa: E402
from llmc.diagnostics import Diagnostic  # noqa: E402
from llmc.extension import load, resolve  # noqa: E402
from llmc.targets.target import Target  # noqa: E402

CACHE = ROOT / "build" / "gpu" / "kernels"
HALF = 1e-2
# Products of 8-bit floats. Hopper's tensor cores keep about 14 bits of a sum, and an epilogue that multiplies two sums,
# such as silu(a0) * a1, keeps 13.
SCALED = ("block_scaled_linear", "scaled_moe_up", "scaled_moe_down")
GAINED = ("rms_norm", "layer_norm", "rope_append")  # ops whose vectors are weights


@dataclass(frozen=True)
class Job:
    """A case, its text, the key of its binary, and the operands that are there before the launch in front has ended."""

    case: Case
    source: Source
    key: str
    settled: tuple[int, ...] = ()


def triton_kernels() -> Mapping[str, Kernel]:
    """Every Triton kernel of ours by name."""
    return {name: resolve(where) for name, where in KERNELS.items()}


def all_cases(target: Target) -> Iterator[Case]:
    """The cases that every language runs, then those of the Triton tests themselves."""
    kernels = list(triton_kernels().values())
    for case in (*of_ops(kernels, target), *of_texts(kernels, target), *of_random(kernels, target)):
        if "attention" in case.node.op.name and case.node.results[0].type.dtype != "f32":
            case.atol = HALF  # the matrix units take the probabilities in the values' own dtype
        if case.node.op.name in GAINED:
            for v in case.graph.inputs:  # as in a model, so that they are read before the wait
                v.weight = v.type.rank == 1 and not v.type.dtype.startswith("i")
        yield case
    for case in borrowed_cases():
        if case.node.op.name in SCALED:
            case.rtol, case.atol = 2.0**-10, 2 * case.atol
        yield case


def all_jobs(target: Target) -> list[Job]:
    """Every case with its source, and with what it becomes between other launches; a name that comes twice gets a
    number."""
    toolchain = TritonToolchain.find(target)
    seen: dict[str, int] = {}
    jobs = []
    for case in all_cases(target):
        seen[case.name] = seen.get(case.name, 0) + 1
        if seen[case.name] > 1:
            case.name = f"{case.name}.{seen[case.name]}"
        if not has_maps(target) and case.kernel.name.startswith("triton/gemm_tma"):
            continue
        jobs += jobs_of(case, len(jobs), toolchain, target)
    return jobs


def jobs_of(case: Case, number: int, toolchain: TritonToolchain, target: Target) -> Iterator[Job]:
    """A case with its source, alone and with the options that depend on the launches around it."""
    for options in launch_options(case, number):
        source = case.kernel.emit(case.node, {**case.schedule, **options}, target)
        settled = case.kernel.early(case.node) if SETTLED in options else ()
        yield Job(case, source, toolchain.key(source), settled)


def launch_options(case: Case, number: int) -> Iterator[Schedule]:
    """The options that code generation sets because of the launches around a kernel; LATE for every fourth case."""
    yield {}
    if case.kernel.early(case.node):
        yield {SETTLED: 1}
    if case.kernel.yields and number % 4 == 0:
        yield {LATE: 1}


def compile_jobs(jobs: Sequence[Job], target: Target, cache: Path = CACHE) -> dict[str, Compiled | str]:
    """Key -> binary, or why there is none; what the cache holds is not compiled again."""
    distinct = {j.key: (j.source, target.name, cache) for j in jobs}
    workers = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        found = pool.map(_one, distinct.values(), chunksize=max(1, len(distinct) // (workers * 8)))
        return dict(zip(distinct, found, strict=True))


def _one(work: tuple[Source, str, Path]) -> Compiled | str:
    source, target, cache = work
    toolchain = TritonToolchain.find(load().target(target))
    try:
        return toolchain.compile([(source, "")], cache, jobs=1)[toolchain.key(source)]
    except Diagnostic as e:
        return e.cause


def main() -> None:
    ap = argparse.ArgumentParser(description="compile the GPU tests' kernels, without a GPU")
    ap.add_argument("--target", default="cuda:sm_90")
    args = ap.parse_args()
    target = load().target(args.target)
    jobs = all_jobs(target)
    found = compile_jobs(jobs, target)
    bad = {k: v for k, v in found.items() if isinstance(v, str)}
    print(f"{len(jobs)} cases, {len(found)} binaries in {CACHE}, {len(bad)} failed")
    for why in bad.values():
        print(f"  {why}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
