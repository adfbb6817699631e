"""The CUDA C++ kernels as binaries on the GPU beside their ops' references, as test_kernels.py runs Triton's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernel_cases import Job
from gpu.launcher import Card
from gpu.test_kernels import failures
from kernels.harness import Case

from llmc.codegen.cuda.linear import LINEAR
from llmc.codegen.cuda.toolchain import NvrtcToolchain
from llmc.codegen.kernel import Schedule
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.targets.gpu import sm_90

pytestmark = pytest.mark.gpu
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
    return Case(name, parse(text, OPS).graphs["main"], LINEAR, schedule, inputs, atol=1e-2)


@pytest.mark.parametrize("schedule", LINEAR.ways(), ids=str)
def test_linear(schedule: Schedule, card: Card, tmp_path: Path) -> None:
    target = sm_90()
    tool = NvrtcToolchain.find(target)
    jobs = []
    for size in SIZES:
        case = product(*size, schedule)
        source = LINEAR.emit(case.node, schedule, target)
        jobs.append(Job(case, source, tool.key(source)))
    binaries: dict[str, Any] = dict(tool.compile([(j.source, "") for j in jobs], tmp_path))
    found = failures(card, jobs, binaries)
    assert not found, "\n".join(found)
