"""Attention with a bias by distance in Triton beside the reference: mixtures of rows over pages, and packed prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kernels.test_triton_attention import F8, Paged, drawn, fresh, prompt
from kernels.triton_harness import ONE_TARGET, compile_for, run_case

from llmc.codegen.backends.triton.prefill_attention import PACKED_ATTENTION, PREFILL_ATTENTION
from llmc.codegen.backends.triton.triton_kernel import float8
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
ALIBI = (
    Paged((8, 8, 80), [(1, 40), (35, 35), (1, 1), (20, 70), None, (1, 129)], dtype="bf16", behind=3, alibi=True),
    Paged((6, 2, 40), [None, (33, 33), (17, 80)], page=4, alibi=True),
    Paged((71, 1, 64), [(3, 20), (1, 5)], dtype="f16", alibi=True),
    Paged((8, 2, 128), [(1, 40), (20, 70), None], dtype="bf16", pool=F8, behind=2, alibi=True),
    Paged((4, 4, 64), [(1, 200), (1, 3)], dtype="bf16", alibi=True, dynamic=False),
)


@pytest.mark.parametrize("i", range(len(ALIBI)))
def test_bias_by_distance(i: int) -> None:
    rng = fresh()
    for schedule in range(3):
        run_case(ALIBI[i].case(PREFILL_ATTENTION, rng, schedule))


@pytest.mark.parametrize("_", range(3))
def test_bias_by_distance_of_drawn_steps(_: int) -> None:
    rng = fresh()
    step = replace(drawn(rng, bool(rng.integers(2))), sinks=False, attrs={}, alibi=True)
    run_case(step.case(PREFILL_ATTENTION, rng, int(rng.integers(8))))


PROMPTS = ([3, 140], (4, 1, 16, 24), "bf16", 1), ([70, 2, 30], (3, 3, 40, 40), "f32", 0)


@pytest.mark.parametrize(("lengths", "heads", "dtype", "at"), PROMPTS)
def test_prompts(lengths: list[int], heads: tuple[int, int, int, int], dtype: str, at: int) -> None:
    run_case(prompt(fresh(), lengths, heads, dtype, True, at, kernel=PACKED_ATTENTION))


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_compiles(target: Target, tmp_path: Path) -> None:
    rng = fresh()
    step = ALIBI[int(rng.integers(len(ALIBI)))]
    pool = (float8(target) or "bf16") if step.pool else ""
    cases = [
        replace(step, pool=pool).case(PREFILL_ATTENTION, rng, int(rng.integers(6)), on=target),
        prompt(rng, [3, 140], (4, 1, 16, 24), "bf16", True, 1, target, PACKED_ATTENTION),
    ]
    for case in cases:
        assert compile_for(case, target, tmp_path).shared <= target.limits.shared, case.name
