"""Compares both kernels with the op's reference on random operands. The harness is in `tests` of a checkout of llmc.

The C++ kernel is compiled and runs with three threads. The Triton kernel runs in Triton's interpreter, and is compiled
for GPUs. Outputs are poisoned beforehand, and the bytes around them are checked afterwards.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernels import harness, triton_harness
from take_norm import cpp, triton
from take_norm.op import take_norm

from llmc.codegen.kernel import Kernel
from llmc.ir.example import example_graph
from llmc.targets.cpu_targets import native


def case(kernel: Kernel, schedule: dict[str, int], dtype: str, width: int) -> harness.Case:
    """Rows in arbitrary order, one of them twice, and one negative index."""
    rng = np.random.default_rng(width)
    x, w = rng.standard_normal((7, width)), rng.standard_normal(width)
    graph = example_graph(take_norm, [x, np.array([6, 0, -1, 6, 3], np.int32), w], {"eps": 1e-5}, dtype).graphs["main"]
    return harness.Case(f"{dtype}-{width}", graph, kernel, schedule, [x, np.array([6, 0, -1, 6, 3], np.int32), w])


def test_the_cpp_kernel(tmp_path: Path) -> None:
    cases = [case(cpp.KERNEL, {}, dtype, width) for dtype in ("f32", "bf16", "f16") for width in (1, 33)]
    found = harness.compile_cases(cases, native(), tmp_path)
    for c in cases:
        harness.run_case(c, *found[c.name])


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("width", [1, 33])
def test_the_triton_kernel(dtype: str, width: int) -> None:
    triton_harness.run_case(case(triton.KERNEL, {"warps": 4}, dtype, width))


def test_the_triton_kernel_becomes_a_binary(tmp_path: Path) -> None:
    c = case(triton.KERNEL, {"warps": 8}, "bf16", 4096)
    for target in triton_harness.TARGETS:
        assert triton_harness.compile_for(c, target, tmp_path).binary[:4] == b"\x7fELF"


def test_what_the_triton_kernel_does_not_fit() -> None:
    wide = case(triton.KERNEL, {}, "bf16", triton.WIDEST + 1)
    assert triton.KERNEL.reject(wide.node, triton_harness.TARGETS[0]) == "a row has 16385 elements, at most 16384 fit"
