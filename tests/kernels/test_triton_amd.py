"""Triton kernels with the schedules of AMD's GPUs, in the interpreter beside the reference: products and attention,
which have schedules of their own there; and which GPUs multiply 8-bit floats.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from draw import of_test
from kernels.harness import Case
from kernels.test_triton_attention import MIXED, PINNED
from kernels.test_triton_linear import SHAPES, draw
from kernels.triton_harness import run_case

from llmc.codegen.backends.triton.decode_attention import DECODE_ATTENTION
from llmc.codegen.backends.triton.gemm_small import GEMM, GEMM_SMALL, LARGE_AMD
from llmc.codegen.backends.triton.prefill_attention import PREFILL_ATTENTION
from llmc.codegen.backends.triton.triton_kernel import INTERPRET, TritonKernel
from llmc.targets.gpu_targets import gfx90a, gfx942, gfx950, sm_80
from llmc.targets.target import Target

GPUS = (gfx90a(), gfx942(), gfx950())
INTERPRETED = tuple(replace(t, features=frozenset({INTERPRET})) for t in GPUS)
F8 = "f8e4m3"


@pytest.mark.drawn
@pytest.mark.parametrize("kernel", [GEMM_SMALL, GEMM], ids=lambda k: k.name)
@pytest.mark.parametrize("target", INTERPRETED, ids=lambda t: t.name)
def test_products(target: Target, kernel: TritonKernel) -> None:
    """Each shape under a schedule that is drawn, for a few tokens or many."""
    rng = Random(of_test())
    for s in SHAPES:
        g, rows = s.graph(), rng.choice((1, 5, 17, 130))
        (node,) = g.nodes
        schedule = rng.choice(kernel.schedules(node, target))
        assert schedule["stages"] == 2 and min(schedule["bm"], schedule["bn"]) >= 16 and schedule["split"] == 1
        atol = 2e-3 if {"f16", "bf16", F8} & {s.x, s.dtype} else 2e-5
        inputs = draw(g, rows)
        run_case(Case(f"{s.name} {rows} {schedule}", g, kernel, schedule, inputs, atol=atol, sizes={"T": rows}), target)


@pytest.mark.drawn
@pytest.mark.parametrize("target", INTERPRETED, ids=lambda t: t.name)
def test_attention(target: Target) -> None:
    rng = np.random.default_rng(of_test())
    single, mixed = PINNED[rng.integers(len(PINNED))], MIXED[rng.integers(len(MIXED))]
    for splits in (0, 3):
        run_case(single.case(DECODE_ATTENTION, rng, int(rng.integers(99)), splits, on=target), target)
    run_case(mixed.case(PREFILL_ATTENTION, rng, int(rng.integers(99)), on=target), target)


def test_large_tiles_fit() -> None:
    node = next(s for s in SHAPES if s.name == "head").graph().nodes.head
    assert node is not None
    for target in GPUS:
        assert [tuple(s.values())[:5] for s in GEMM.schedules(node, target)] == list(LARGE_AMD)


def test_8_bit_floats() -> None:
    """Those of checkpoints are OCP's: of CDNA 4, not those of CDNA 3, of which the error tells."""
    node = next(s for s in SHAPES if s.name == "f8").graph().nodes.head
    assert node is not None and GEMM.reject(node, gfx950()) is None
    assert GEMM.reject(node, gfx942()) == "hip:gfx942 has no instructions for f8e4m3 (its 8-bit floats are fnuz)"
    assert GEMM.reject(node, gfx90a()) == "hip:gfx90a has no instructions for f8e4m3"
    assert GEMM.reject(node, sm_80()) == "cuda:sm_80 has no instructions for f8e4m3"
