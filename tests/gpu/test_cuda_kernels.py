"""The CUDA C++ kernels as binaries on the GPU beside their ops' references, as test_kernels.py runs Triton's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernel_cases import Job
from gpu.launcher import Card
from gpu.test_kernels import failures
from kernels.harness import Case

from llmc.codegen.backends.cuda.gemm_wgmma import GEMM_WGMMA
from llmc.codegen.backends.cuda.nvrtc_toolchain import NvrtcToolchain
from llmc.codegen.kernel import Kernel, Schedule
from llmc.extension import resolve
from llmc.ir.example import example_graph
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cuda-kernel"
# Tokens, columns and depth: one of each, tiles that are cut in every direction, depths below and above the ring's.
SIZES = ((1, 8, 8), (3, 264, 72), (128, 256, 64), (130, 520, 1032), (300, 1536, 1024), (2100, 640, 320))


def product(m: int, n: int, k: int, schedule: Schedule) -> Case:
    """y[m, n] = x[m, k] @ w[n, k].T, the tokens a size that is known when it runs."""
    text = f"""
sym T in [1, 4096]
graph @main(%x: bf16[T, {k}], %w: weight bf16[{n}, {k}]) {{
  %y = linear(%x, %w) : bf16[T, {n}]
  return %y
}}
"""
    rng = np.random.default_rng(m + n + k)
    inputs = [rng.standard_normal(s).astype(np.float32) for s in ((m, k), (n, k))]
    name = f"{m}x{n}x{k}-{schedule}"
    return Case(name, parse(text, OPS).graphs["main"], GEMM_WGMMA, schedule, inputs, atol=1e-2)


def norm(rows: int, width: int, dtype: str, kernel: Kernel, schedule: Schedule) -> Case:
    """rms_norm of drawn rows."""
    rng = np.random.default_rng(width)
    inputs = [rng.standard_normal(s).astype(np.float32) for s in ((rows, width), (width,))]
    graph = example_graph(OPS["rms_norm"], inputs, {"eps": 1e-5}, dtype).graphs["main"]
    return Case(f"{dtype}-{rows}x{width}-{schedule}", graph, kernel, schedule, inputs)


def check(cases: Sequence[Case], card: Card, cache: Path) -> None:
    """Run every case alone and behind a launch that brings its operands late."""
    target = sm_90()
    tool = NvrtcToolchain.find(target)
    sources = [c.kernel.emit(c.node, c.schedule, target) for c in cases]
    jobs = [Job(c, s, tool.key(s)) for c, s in zip(cases, sources, strict=True)]
    binaries: dict[str, Any] = dict(tool.compile([(s, "") for s in sources], cache))
    found = failures(card, jobs, binaries)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("schedule", GEMM_WGMMA.all_schedules(), ids=str)
def test_linear(schedule: Schedule, card: Card, tmp_path: Path) -> None:
    check([product(*size, schedule) for size in SIZES], card, tmp_path)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_example_package(dtype: str, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    kernel = resolve("rms_norm_cuda.kernel:KERNEL")
    ways = kernel.schedules(norm(1, 1, dtype, kernel, {}).node, sm_90())
    check([norm(r, w, dtype, kernel, s) for r, w in ((1, 1), (7, 333), (64, 4096)) for s in ways], card, tmp_path)
