"""Triton kernels as binaries at the sizes of real models, without a GPU: by this file as a program all of them for
every target or a share of the targets (a step of CI), in the tests half of them, each for one target, all drawn. Texts
that the interpreter runs may still not compile, or want more shared memory or registers than a target has.

    python tests/kernels/test_triton_binaries.py [--share X]    with --share each for this share of the targets
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "runtime"), str(root / "tests")]

from draw import SEED
from kernels.cases import COLLECTIVES, Text
from kernels.real_sizes import REAL
from kernels.triton_harness import TARGETS
from kernels.triton_order import memory_order, ttir

from llmc.codegen.backends.triton.gemm_tma import has_maps
from llmc.codegen.backends.triton.triton_kernel import float8
from llmc.codegen.backends.triton.triton_toolchain import Compiled, Job, compile_one
from llmc.codegen.code_object import read_kernel
from llmc.codegen.kernel import TRIGGER_BEFORE_WAIT, Source
from llmc.codegen.kernel_table import TRITON
from llmc.extension import resolve
from llmc.targets.target import PDL, Target

TOKENS = {"T": 2048, "R": 16}
MAPPED = ("gemm_tma", "gemm_tma_splitk", "scaled_gemm_tma")
CODED = ("scaled_gemm", "scaled_gemm_small", "round_groups", "scaled_moe_up", "scaled_moe_down")  # of 8-bit floats
NEWER = {f"triton/{name}": tuple(t for t in TARGETS if has_maps(t)) for name in MAPPED} | {
    f"triton/{name}": tuple(t for t in TARGETS if float8(t)) for name in CODED
}
RANKS = (*COLLECTIVES, "all_reduce_norm")
NVIDIA = {f"triton/{name}": tuple(t for t in TARGETS if t.family == "cuda") for name in RANKS}
PRIVATE = 64  # bytes of memory of a thread's own: the largest tiles spill a few registers
F8 = "f8e4m3"
VGPRS = 512  # vector registers that a thread can have, accumulation registers among them


def own(text: Text, target: Target) -> Text:
    """The node with the 8-bit floats of the target, if it has any."""
    f8 = float8(target) or F8
    changed = (part.replace(F8, f8) for part in (text.types, text.call, text.results))
    return replace(text, **dict(zip(("types", "call", "results"), changed, strict=True)))


def sources(name: str, target: Target, another: Random | None = None) -> Iterator[tuple[str, Source]]:
    """(what, text) of a kernel's nodes on the schedules that costs prefer; of the first on one that is drawn, too."""
    kernel = resolve(TRITON[name])
    for text in (own(text, target) for text in REAL[name]):
        (node,) = text.graph().nodes
        why = kernel.reject(node, target)
        assert why is None, f"{name} rejects {text.call} for {target.name}: {why}"
        offered = kernel.schedules(node, target)
        best = min(offered, key=lambda s: kernel.cost_us(node, s, target, TOKENS))
        drawn = [another.choice(offered)] if another and text == own(REAL[name][0], target) else []
        for schedule in (best, *drawn):
            yield f"{name}, {text.call}, for {target.name} on {schedule}", kernel.emit(node, schedule, target)


def work(names: Sequence[str], share: float, rng: Random) -> Iterator[tuple[Target, Job]]:
    """Yield the best schedules of the kernels for a share of their targets, at least one, and one random schedule."""
    for name in names:
        able = (NEWER | NVIDIA).get(name, TARGETS)
        for i, target in enumerate(rng.sample(able, max(1, round(share * len(able))))):
            for what, source in sources(name, target, None if i else rng):
                yield target, Job.of(what, source, target)


def failures(work: Sequence[tuple[Target, Job]]) -> Iterator[str]:
    """Compile the jobs, in a pool for each target as `TritonToolchain` does; yield why some are not usable."""
    context: Any = multiprocessing.get_context("spawn")
    for target in TARGETS:
        jobs = {job.key: job for job_target, job in work if job_target == target}
        with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=context) as pool:
            for what, found in pool.map(compile_one, jobs.values(), chunksize=4):
                if isinstance(found, str):
                    yield f"{what}: {found}"
                elif not found.binary.startswith(b"\x7fELF"):
                    yield f"{what}: no binary"
                elif why := excess(target, jobs[what].source.entry, found):
                    yield f"{what}: {why}"


def excess(target: Target, entry: str, found: Compiled) -> str:
    """Return which resource of the target or which limit the binary exceeds; "" if none."""
    shared = found.shared
    if target.family == "hip":
        kernel = read_kernel(found.binary, entry)
        shared += kernel.shared
        if kernel.private > PRIVATE:
            return f"{kernel.private} bytes of memory a thread, {kernel.vgpr_spills} registers spilled"
        if kernel.vgprs > VGPRS or kernel.wavefront != target.limits.warp or found.threads > kernel.max_threads:
            return f"{kernel}, {found.threads} threads"
    return f"{shared} bytes of shared memory, of {target.limits.shared}" if shared > target.limits.shared else ""


def test_no_kernel_is_left_out() -> None:
    assert set(REAL) == set(TRITON)


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRITON)
def test_kernels_that_wait_first_do(name: str) -> None:
    """Otherwise a later launch could read data that a launch before this one still writes."""
    assert resolve(TRITON[name]).waits_first
    target = next(t for t in TARGETS if t.has(PDL) and t in NEWER.get(name, TARGETS))
    text = ttir(next(source for _, source in sources(name, target)), target)
    assert 0 <= text.index("griddepcontrol.wait") < text.index("griddepcontrol.launch_dependents")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["triton/rows", "triton/attention_combine", "triton/topk_map", "triton/moe_route"])
def test_eager_kernels_wait_before_they_touch_operands(name: str) -> None:
    kernel, target = resolve(TRITON[name]), next(t for t in TARGETS if t.has(PDL))
    assert kernel.can_trigger_before_wait
    (node,) = REAL[name][0].graph().nodes
    schedule = {**kernel.schedules(node, target)[0], TRIGGER_BEFORE_WAIT: 1}
    order = memory_order(kernel.emit(node, schedule, target), target)
    weights = {f"load x{i}" for i, v in enumerate(node.operands) if v.weight}
    before, behind = order[: order.index("wait")], order[order.index("wait") :]
    assert "launch_dependents" in before and set(before) <= {"launch_dependents", *weights}
    assert "load x0" in behind and any(event.startswith("store") for event in behind)


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kernels_compile() -> None:
    print(f"SEED={SEED}")
    rng = Random(SEED)
    drawn = list(work(rng.sample(list(REAL), len(REAL) // 2), 0.0, rng))
    assert len(drawn) >= len(TRITON) // 2
    failed = list(failures(drawn))
    assert not failed, f"{len(failed)} of {len(drawn)}:\n" + "\n".join(failed)


def main() -> int:
    parser = ArgumentParser(description="compile all kernels at the sizes of real models, and check their resources")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="of the targets of each kernel")
    share = parser.parse_args().share
    jobs = list(work(list(REAL), share, Random(SEED)))
    assert len(jobs) > len(TRITON) * len(TARGETS) * share * 0.9
    failed = list(failures(jobs))
    summary = f"{len(jobs)} binaries for {len(TARGETS)} targets, {len(failed)} failed"
    print("\n".join([f"SEED={SEED}", *failed, summary]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
