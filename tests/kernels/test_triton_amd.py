"""Triton kernels with the schedules of AMD GPUs, in the interpreter, compared with the reference: products and
attention, which have other schedules there, and 8-bit floats, whose formats differ between CDNA 3 and CDNA 4.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from draw import of_test
from kernels import test_triton_scaled
from kernels.cases import Text
from kernels.expert_codes import QUANTIZED, SCALED
from kernels.harness import Case
from kernels.test_triton_attention import MIXED, PINNED
from kernels.test_triton_linear import SHAPES, Shape, draw
from kernels.test_triton_moe import ROUTINGS
from kernels.test_triton_rope import APPENDS, append, coded
from kernels.test_triton_rows import case as row_case
from kernels.triton_harness import run_case

from llmc.codegen.backends.triton.decode_attention import DECODE_ATTENTION
from llmc.codegen.backends.triton.gemm_small import GEMM, GEMM_SMALL, LARGE_AMD_TILES
from llmc.codegen.backends.triton.prefill_attention import PREFILL_ATTENTION
from llmc.codegen.backends.triton.round_groups import ROUND_GROUPS
from llmc.codegen.backends.triton.row_kernels import ROWS
from llmc.codegen.backends.triton.scaled_gemm import SCALED_GEMM, SCALED_GEMM_SMALL
from llmc.codegen.backends.triton.triton_kernel import FLOAT8, INTERPRET, TritonKernel, float8
from llmc.ir.ops.quantize import FLOAT_CODES
from llmc.targets.gpu_targets import gfx90a, gfx942, gfx950, sm_80, sm_90
from llmc.targets.target import Target

GPUS = (gfx90a(), gfx942(), gfx950())
INTERPRETED = tuple(replace(t, features=frozenset({INTERPRET})) for t in GPUS)
CODED = INTERPRETED[1:]  # GPUs with instructions for 8-bit floats
F8 = "f8e4m3"


def own(s: Shape, target: Target) -> Shape:
    """The product with 8-bit floats of the target, or with i8 if it has none."""
    dtype = float8(target) or "i8"
    return replace(s, x=dtype, w=dtype) if s.x == F8 else s


@pytest.mark.drawn
@pytest.mark.parametrize("kernel", [GEMM_SMALL, GEMM], ids=lambda k: k.name)
@pytest.mark.parametrize("target", INTERPRETED, ids=lambda t: t.name)
def test_products(target: Target, kernel: TritonKernel) -> None:
    """Each shape under a schedule that is drawn, for a few tokens or many."""
    rng = Random(of_test())
    for s in (own(s, target) for s in SHAPES):
        g, rows = s.graph(), rng.choice((1, 5, 17, 130))
        (node,) = g.nodes
        schedule = rng.choice(kernel.schedules(node, target))
        assert schedule["stages"] == 2 and min(schedule["bm"], schedule["bn"]) >= 16 and schedule["split"] == 1
        atol = 2e-3 if {"f16", "bf16", *FLOAT8} & {s.x, s.dtype} else 2e-5
        inputs = draw(g, rows)
        run_case(Case(f"{s.name} {rows} {schedule}", g, kernel, schedule, inputs, atol=atol, sizes={"T": rows}), target)


@pytest.mark.drawn
@pytest.mark.parametrize("target", INTERPRETED, ids=lambda t: t.name)
def test_attention(target: Target) -> None:
    rng = np.random.default_rng(of_test())
    cases = [[p for p in pool if float8(target) or not p.pool] for pool in (PINNED, MIXED)]
    single, mixed = (replace(p, pool=p.pool and float8(target)) for p in (c[rng.integers(len(c))] for c in cases))
    for splits in (0, 3):
        run_case(single.case(DECODE_ATTENTION, rng, int(rng.integers(99)), splits, on=target), target)
    run_case(mixed.case(PREFILL_ATTENTION, rng, int(rng.integers(99)), on=target), target)


@pytest.mark.drawn
@pytest.mark.parametrize("target", CODED, ids=lambda t: t.name)
def test_pools_of_8_bit_floats(target: Target) -> None:
    """Appends, rounded exactly, and attention over them."""
    rng, pool = np.random.default_rng(of_test()), float8(target)
    for dtype in ("f32", "f16", "bf16"):
        run_case(coded(rng, dtype, 0, target, pool), target)
        run_case(append(rng, int(rng.integers(len(APPENDS))), dtype, pool, int(rng.integers(2)), target), target)
    for p in (p for p in (*PINNED, *MIXED) if p.pool):
        kernel = DECODE_ATTENTION if p in PINNED else PREFILL_ATTENTION
        run_case(replace(p, pool=pool).case(kernel, rng, int(rng.integers(99)), on=target), target)


@pytest.mark.drawn
@pytest.mark.parametrize("target", CODED, ids=lambda t: t.name)
def test_products_of_8_bit_floats_with_scales_of_tiles(target: Target) -> None:
    """And the rounding of activations, in groups and as rows."""
    rng, dtype = Random(of_test()), float8(target)
    for rounding in (replace(r, dtype=dtype) for r in test_triton_scaled.ROUNDINGS):
        (node,) = rounding.graph().nodes
        test_triton_scaled.check_rounding(rounding, 5, rng.choice(ROUND_GROUPS.schedules(node, target)), target)
    for kernel in (SCALED_GEMM_SMALL, SCALED_GEMM):
        for s in (replace(s, code=dtype) for s in rng.sample(test_triton_scaled.SHAPES, 4)):
            schedule = rng.choice(kernel.schedules(s.node, target))
            test_triton_scaled.check(kernel, s, rng.choice((1, 5, 33)), schedule, target)
    whole = Text(
        "bf16[T, 301]", f'fused {{body=["mul(a0, div({FLOAT_CODES[dtype]}, row_max(abs(a0))))"], dtypes=["{dtype}"]}}',
        f"{dtype}[T, 301]",
    )  # fmt: skip
    for schedule in ROWS.schedules(row_case(whole).node, target):
        run_case(row_case(whole, schedule, rtol=0.0, atol=0.0), target)


@pytest.mark.drawn
@pytest.mark.parametrize("up", (True, False))
@pytest.mark.parametrize("target", CODED, ids=lambda t: t.name)
def test_experts_of_8_bit_floats(target: Target, up: bool) -> None:
    rng, dtype = Random(of_test()), float8(target)
    for s, columns in (*QUANTIZED.values(), *SCALED.values()):
        if s.code == F8:
            s, routing = replace(s, code=dtype), rng.choice(ROUTINGS[:4])
            (node,) = s.graph(up, *routing, 22, columns).nodes
            schedule = rng.choice(s.kernels[up].schedules(node, target))
            run_case(s.case(up, *routing, 22, columns, schedule), target)


def test_large_tiles_fit() -> None:
    node = next(s for s in SHAPES if s.name == "head").graph().nodes.head
    assert node is not None
    for target in GPUS:
        assert [tuple(s.values())[:5] for s in GEMM.schedules(node, target)] == list(LARGE_AMD_TILES)


def test_which_8_bit_floats() -> None:
    """Those of checkpoints are OCP's. CDNA 4 has these, and CDNA 3 others, which a GPU of NVIDIA lacks."""
    node, other = (
        replace(next(s for s in SHAPES if s.name == "f8"), x=dtype, w=dtype).graph().nodes.head for dtype in FLOAT8
    )
    assert node is not None and other is not None
    assert GEMM.reject(node, gfx950()) is GEMM.reject(other, gfx942()) is GEMM.reject(node, sm_90()) is None
    assert GEMM.reject(node, gfx942()) == "hip:gfx942 has no instructions for f8e4m3, only for f8e4m3fnuz"
    assert GEMM.reject(other, gfx950()) == "hip:gfx950 has no instructions for f8e4m3fnuz, only for f8e4m3"
    assert GEMM.reject(other, sm_90()) == "cuda:sm_90 has no instructions for f8e4m3fnuz, only for f8e4m3"
    assert GEMM.reject(node, gfx90a()) == "hip:gfx90a has no instructions for f8e4m3"
    assert GEMM.reject(node, sm_80()) == "cuda:sm_80 has no instructions for f8e4m3"
