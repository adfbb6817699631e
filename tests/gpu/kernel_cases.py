"""The kernel cases that run on a GPU, and their binaries, which a pool of processes compiles without a GPU.

    SEED=1 python tests/gpu/kernel_cases.py [--target cuda:sm_90] [--sample N]      compiles them into build/gpu/kernels

A run of the tests with the same SEED finds these binaries; with another one, some of the cases have other kernels.

The cases are those that all languages share (tests/kernels/cases.py) and those of the tests of single Triton kernels.
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
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests")]

from draw import SEED  # noqa: E402
from gpu.borrowed import borrowed_cases  # noqa: E402
from gpu.compile_lock import alone  # noqa: E402
from kernels.cases import of_ops, of_random, of_texts  # noqa: E402
from kernels.harness import Case  # noqa: E402

from llmc.codegen.backends.triton.gemm_tma import has_maps  # noqa: E402
from llmc.codegen.backends.triton.triton_kernel import FLOAT8  # noqa: E402
from llmc.codegen.backends.triton.triton_toolchain import Compiled, TritonToolchain  # noqa: E402
from llmc.codegen.kernel import READ_BEFORE_WAIT, TRIGGER_AFTER_LOADS, TRIGGER_BEFORE_WAIT, Kernel, Schedule, Source  # noqa: E402
from llmc.codegen.kernel_table import TRITON  # noqa: E402
from llmc.diagnostics import Diagnostic  # noqa: E402
from llmc.extension import load, resolve  # noqa: E402
from llmc.targets.target import Target  # noqa: E402

T = TypeVar("T")
CACHE = ROOT / "build" / "gpu" / "kernels"
HALF = 1e-2
CHUNK_ERROR = 5e-3  # of recurrences in chunks of tokens, whose factors tensor cores round to TF32
GAINED = ("rms_norm", "layer_norm", "rope_append")  # ops whose vectors are weights


@dataclass(frozen=True)
class Job:
    """A case, its source and the key of its binary. settled: operands that the previous kernel does not write."""

    case: Case
    source: Source
    key: str
    settled: tuple[int, ...] = ()


def triton_kernels() -> Mapping[str, Kernel]:
    """Return the built-in Triton kernels by name."""
    return {name: resolve(where) for name, where in TRITON.items()}


def all_cases(target: Target) -> Iterator[Case]:
    """Yield the cases that all languages share, then those of the tests of single Triton kernels."""
    kernels = list(triton_kernels().values())
    for case in (*of_ops(kernels, target), *of_texts(kernels, target), *of_random(kernels, target)):
        if "attention" in case.node.op.name and case.node.results[0].type.dtype != "f32":
            case.atol = HALF  # tl.dot rounds the probabilities to the dtype of the values
        if case.node.op.name.startswith("chunk_"):
            case.rtol = case.atol = CHUNK_ERROR
        if case.node.op.name in GAINED:
            for v in case.graph.inputs:  # as in a model: weights are read before the wait
                v.weight = v.type.rank == 1 and not v.type.dtype.startswith("i")
        yield case
    for case in borrowed_cases():
        factor = next((v.type for v in case.node.operands), None)
        if factor and factor.dtype == "f8e4m3" and not factor.state:
            # Hopper's tensor cores keep about 14 bits of a sum of products of 8-bit floats, and an epilogue that
            # multiplies two sums, such as silu(a0) * a1, keeps 13.
            case.rtol, case.atol = 2.0**-10, 4 * case.atol
        if case.node.op.name.startswith("chunk_"):
            case.rtol = case.atol = CHUNK_ERROR
        yield case


def all_jobs(target: Target) -> list[Job]:
    """Return the jobs of all cases; a repeated case name gets a number."""
    toolchain = TritonToolchain.find(target)
    seen: dict[str, int] = {}
    jobs = []
    for case in all_cases(target):
        seen[case.name] = seen.get(case.name, 0) + 1
        if seen[case.name] > 1:
            case.name = f"{case.name}.{seen[case.name]}"
        if not runs_on(case, target):
            continue
        jobs += jobs_of(case, len(jobs), toolchain, target)
    return jobs


def by_op(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Return the jobs of each op, in order."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.case.node.op.name, []).append(job)
    return found


def sampled(cases: Sequence[T], every: int) -> Sequence[T]:
    """Return every Nth case, at least one, from one on that depends on SEED."""
    return cases[SEED % max(1, min(every, len(cases))) :: every]


def runs_on(case: Case, target: Target) -> bool:
    """Whether the target has the tensor maps and the 8-bit floats that a case needs."""
    if case.kernel.name.startswith("triton/gemm_tma") and not has_maps(target):
        return False
    values = (*case.node.operands, *case.node.results)
    dtypes = {v.type.dtype for v in values} | set(case.node.attrs.get("dtypes", ()))
    return all(d in target.peaks for d in dtypes & set(FLOAT8))


def jobs_of(case: Case, number: int, toolchain: TritonToolchain, target: Target) -> Iterator[Job]:
    """Yield the jobs of a case: without and with the options that depend on neighbouring launches."""
    for options in launch_options(case, number):
        source = case.kernel.emit(case.node, {**case.schedule, **options}, target)
        settled = case.kernel.reads_before_wait(case.node) if READ_BEFORE_WAIT in options else ()
        yield Job(case, source, toolchain.key(source), settled)


def launch_options(case: Case, number: int) -> Iterator[Schedule]:
    """Yield the options that code generation derives from neighbouring launches; some of them for every fourth case."""
    yield {}
    if case.kernel.reads_before_wait(case.node):
        yield {READ_BEFORE_WAIT: 1}
    if case.kernel.can_trigger_after_loads and number % 4 == 0:
        yield {TRIGGER_AFTER_LOADS: 1}
    if case.kernel.can_trigger_before_wait and number % 4 == 0:
        yield {TRIGGER_BEFORE_WAIT: 1}


def compile_jobs(jobs: Sequence[Job], target: Target, cache: Path = CACHE) -> dict[str, Compiled | str]:
    """Return key -> binary or error message; sources in the cache are not compiled again."""
    toolchain = TritonToolchain.find(target)
    sources = {j.key: j.source for j in jobs}
    with alone(cache):
        missing = {key: s for key, s in sources.items() if not toolchain.cached(key, cache)}
        compiled = dict(zip(missing, _compile_all(list(missing.values()), target, cache), strict=True))
    cached = [(source, "") for key, source in sources.items() if key not in compiled]
    return compiled | toolchain.compile(cached, cache, jobs=1)


def _compile_all(sources: Sequence[Source], target: Target, cache: Path) -> list[Compiled | str]:
    """Compile sources in as many processes as there are CPUs."""
    if not sources:
        return []
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [(source, target.name, cache) for source in sources]
        return list(pool.map(_one, work, chunksize=max(1, len(work) // (workers * 8))))


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
    ap.add_argument("--sample", type=int, default=1, metavar="N", help="only every Nth case of each op")
    args = ap.parse_args()
    target = load().target(args.target)
    jobs = [job for found in by_op(all_jobs(target)).values() for job in sampled(found, args.sample)]
    found = compile_jobs(jobs, target)
    bad = {k: v for k, v in found.items() if isinstance(v, str)}
    print(f"{len(jobs)} cases, {len(found)} binaries in {CACHE}, {len(bad)} failed")
    for why in bad.values():
        print(f"  {why}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
