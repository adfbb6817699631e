"""The kernel as a binary for every NVIDIA target, without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rms_norm_cuda.kernel import KERNEL

from llmc.extend import OPS, Target, gpu_targets
from llmc.testing import Case, case_of, compile_for, cubin_entry

sm_80, sm_90, sm_100 = gpu_targets.sm_80, gpu_targets.sm_90, gpu_targets.sm_100


def case(dtype: str, width: int, threads: int = 256) -> Case:
    """A node with five random rows of this width."""
    rng = np.random.default_rng(width)
    inputs = [rng.standard_normal((5, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)]
    return case_of(KERNEL, OPS["rms_norm"], inputs, {"eps": 1e-5}, dtype, {"threads": threads})


@pytest.mark.parametrize("target", [sm_80(), sm_90(), sm_100()], ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_the_kernel_becomes_a_binary(dtype: str, target: Target, tmp_path: Path) -> None:
    made = compile_for(case(dtype, 4097), target, tmp_path)
    entry = cubin_entry(made.binary, "rms_norm")
    assert (made.threads, entry.sizes, entry.max_threads) == (256, (8, 8, 8, 4), 256)


def test_the_text_holds_the_constants_of_its_node() -> None:
    source = KERNEL.emit(case("bf16", 33, 128).node, {"threads": 128}, sm_90())
    assert source.text.startswith(
        "// rms-norm/cuda: rms_norm(bf16[5, 33], bf16[33]) -> bf16[5, 33] eps=1e-05 threads=128\n"
    )
    for line in ("#define LLMC_PDL 1", "using X = bf16;", "constexpr int WIDTH = 33;"):
        assert line in source.text.splitlines()
    assert [p.json() for p in source.passes][3:] == [{"value": 1e-05, "type": "f32"}]
    assert "#define LLMC_PDL 0" in KERNEL.emit(case("bf16", 33).node, {"threads": 128}, sm_80()).text


def test_what_it_does_not_fit() -> None:
    node = case("bf16", 8).node
    assert KERNEL.reject(node, sm_90()) is None
    wide = case_of(KERNEL, OPS["rms_norm"], [np.ones((2, 4)), np.ones(4)], {"eps": 1e-5}, "f64")
    assert "f64[2, 4] is not among" in str(KERNEL.reject(wide.node, sm_90()))
