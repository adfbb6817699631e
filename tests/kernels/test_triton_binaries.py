"""Every Triton kernel as a binary for every GPU target, at the sizes of real models, without a GPU. Texts that the
interpreter runs may still not compile, or want more shared memory than a target has."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from random import Random
from typing import Any

import pytest
from kernels.real_sizes import REAL
from kernels.triton_harness import TARGETS
from models.cases import SEED

from llmc.codegen.kernel import Source
from llmc.codegen.triton.table import KERNELS
from llmc.codegen.triton.toolchain import compile_one
from llmc.extension import resolve
from llmc.targets.target import Target

TOKENS = {"T": 2048, "R": 16}
Work = tuple[str, Source, str, str, int]


def sources(name: str, target: Target, another: Random | None = None) -> Iterator[tuple[str, Source]]:
    """(what, text) of a kernel's nodes on the schedules that costs prefer; of the first on one that is drawn, too."""
    kernel = resolve(KERNELS[name])
    for text in REAL[name]:
        (node,) = text.graph().nodes
        why = kernel.reject(node, target)
        assert why is None, f"{name} rejects {text.call} for {target.name}: {why}"
        offered = kernel.schedules(node, target)
        best = min(offered, key=lambda s: kernel.cost_us(node, s, target, TOKENS))
        drawn = [another.choice(offered)] if another and text is REAL[name][0] else []
        for schedule in (best, *drawn):
            yield f"{name}, {text.call}, for {target.name} on {schedule}", kernel.emit(node, schedule, target)


def work() -> Iterator[tuple[Target, Work]]:
    rng = Random(SEED)
    for name in REAL:
        lucky = rng.choice(TARGETS)
        for target in TARGETS:
            for what, source in sources(name, target, rng if target is lucky else None):
                yield target, (what, source, target.family, target.arch, target.limits.warp)


def test_no_kernel_is_left_out() -> None:
    assert set(REAL) == set(KERNELS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_kernel_compiles_for_every_target() -> None:
    """One pool for all. What costs prefer, and for one target another schedule, a new draw in every run."""
    print(f"SEED={SEED}")
    jobs = {w[0]: (target, w) for target, w in work()}
    assert len(jobs) >= len(KERNELS) * len(TARGETS)
    failed: list[str] = []
    context: Any = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 1, mp_context=context) as pool:
        for what, found in pool.map(compile_one, [w for _, w in jobs.values()], chunksize=4):
            limit = jobs[what][0].limits.shared
            if isinstance(found, str):
                failed.append(f"{what}: {found}")
            elif not found.binary.startswith(b"\x7fELF"):
                failed.append(f"{what}: no binary")
            elif found.shared > limit:
                failed.append(f"{what}: {found.shared} bytes of shared memory, of {limit}")
    assert not failed, f"{len(failed)} of {len(jobs)}:\n" + "\n".join(failed)
