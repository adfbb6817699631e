"""Latent attention over pages on all CPU levels compared with the reference: random spans, shuffled pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draw import SEED
from kernels.harness import Case, compile_cases, run_case
from kernels.latent_cases import Shape, build, draw, steps
from kernels.test_cpu_linear import LEVELS, target_here

from llmc.codegen.backends.cpp.attention import LATENT_ATTENTION
from llmc.extension import load

pytestmark = pytest.mark.drawn
SHAPES = (
    Shape("deepseek", "bf16", "bf16", 16, 512, 64),
    Shape("minicpm3", "f32", "f32", 40, 256, 32),
    Shape("odd", "bf16", "bf16", 5, 33, 7, 5),
    Shape("odd-latent", "f32", "bf16", 3, 17, 10, 7),
    Shape("mixed", "bf16", "f32", 7, 48, 9),
    Shape("widest", "bf16", "bf16", 2, 960, 64, 8),
)


@pytest.mark.parametrize("s", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("level", LEVELS)
def test_latent_attention_agrees_with_the_reference(level: str, s: Shape, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    target, rng = target_here(level), np.random.default_rng(SEED)
    g = build(s)
    (node,) = g.nodes
    assert LATENT_ATTENTION.reject(node, target) is None
    low = "bf16" in (s.q, s.pool)  # weights of the sum are rounded to bf16 as well
    schedule = LATENT_ATTENTION.schedules(node, target)[0]
    case = Case(s.name, g, LATENT_ATTENTION, schedule, [], atol=2e-2 if low else 2e-5)
    compiled = compile_cases([case], target, tmp_path)[s.name]
    for step in steps(rng, s.page, 2):
        for threads in (1, 3):
            run_case(replace(case, inputs=draw(s, step, rng)), *compiled, threads)


def test_rejected_nodes() -> None:
    (node,) = build(Shape("wide", "f32", "f32", 2, 1024, 1)).nodes
    assert "above 1024" in str(LATENT_ATTENTION.reject(node, load().target("cpu:x86-64-v3")))
