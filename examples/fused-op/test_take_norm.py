"""Compares both kernels with the op's reference, on drawn operands and on chosen ones.

The C++ kernel is compiled and runs with three threads. The Triton kernel runs in Triton's interpreter, and is compiled
for GPUs. Outputs are poisoned beforehand, and the bytes around them are checked afterwards.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from take_norm import cpp, triton
from take_norm.op import take_norm

from llmc.extend import Kernel, gpu_targets
from llmc.testing import Case, case_of, check_case, check_kernel, compile_for

TARGETS = (gpu_targets.sm_80(), gpu_targets.sm_90(), gpu_targets.sm_100(), gpu_targets.gfx942())


def case(kernel: Kernel, dtype: str, width: int, **schedule: int) -> Case:
    """Rows in arbitrary order, one of them twice, and one negative index."""
    rng = np.random.default_rng(width)
    operands = [rng.standard_normal((7, width)), np.array([6, 0, -1, 6, 3], np.int32), rng.standard_normal(width)]
    return case_of(kernel, take_norm, operands, {"eps": 1e-5}, dtype, schedule)


@pytest.mark.parametrize("kernel", [cpp.KERNEL, triton.KERNEL], ids=lambda k: k.name)
def test_every_schedule_on_drawn_operands(kernel: Kernel) -> None:
    assert check_kernel(kernel, take_norm) == 3 * (1 if kernel is cpp.KERNEL else 3)  # dtypes times schedules


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("width", [1, 33])
def test_chosen_rows(dtype: str, width: int) -> None:
    check_case(case(cpp.KERNEL, dtype, width))
    check_case(case(triton.KERNEL, dtype, width, warps=4))


def test_the_triton_kernel_becomes_a_binary(tmp_path: Path) -> None:
    for target in TARGETS:
        binary = compile_for(case(triton.KERNEL, "bf16", 4096, warps=8), target, tmp_path).binary
        assert binary[:4] == b"\x7fELF"


def test_what_the_triton_kernel_does_not_fit() -> None:
    wide = case(triton.KERNEL, "bf16", triton.WIDEST + 1)
    assert triton.KERNEL.reject(wide.node, TARGETS[0]) == "a row has 16385 elements, at most 16384 fit"
