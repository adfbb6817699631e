"""Recurrent layers on device rows, on all CPU levels, compared with the reference: random runs, dirty states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from draw import generator
from kernels.harness import Case, compile_cases, run_case
from kernels.recurrent_cases import (
    Shape,
    conv_graph,
    conv_inputs,
    random_step,
    recurrence_graph,
    recurrence_inputs,
)
from kernels.test_cpu_linear import LEVELS, target_here

from llmc.codegen.backends.cpp.recurrent import ROW_CONV, ROW_LOG, ROW_RECURRENCE
from llmc.ir.graph import Graph

pytestmark = pytest.mark.drawn
SHAPES = (
    Shape("qwen3_next", "bf16", 2, 4, 128, 128),
    Shape("odd", "f32", 3, 6, 7, 5),
    Shape("mamba2", "f32", 1, 3, 16, 64, delta=False, n=5),
    Shape("one", "f16", 1, 1, 33, 17, n=1),
    Shape("wide", "bf16", 2, 2, 20, 150, delta=False),
    Shape("kimi", "bf16", 4, 4, 20, 24, channels=True),
    Shape("mamba1", "f32", 1, 37, 16, 1, delta=False, channels=True),
)
CONVS = (
    ("bf16", 96, 4, 4, False), ("f32", 37, 3, 7, True), ("f16", 5, 2, 3, True), ("f32", 64, 1, 1, False),
    ("bf16", 131, 16, 20, True),
)  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_convolutions_of_rows(level: str, tmp_path: Path) -> None:
    target, rng = target_here(level), generator()
    graphs = {f"conv{i}": conv_graph(*sizes) for i, sizes in enumerate(CONVS)}
    cases = [Case(name, g, ROW_CONV, {}, []) for name, g in graphs.items()]
    compiled = compile_cases(cases, target, tmp_path)
    for case in cases:
        assert ROW_CONV.reject(case.node, target) is None
        for _ in range(6):
            inputs = conv_inputs(case.graph, random_step(rng), rng)
            for threads in (1, 3):
                run_case(replace(case, inputs=inputs), *compiled[case.name], threads)


@pytest.mark.parametrize("level", LEVELS)
def test_recurrences_of_rows(level: str, tmp_path: Path) -> None:
    target, rng = target_here(level), generator()
    kernels = {"row_recurrence": ROW_RECURRENCE, "row_recurrence_draft": ROW_RECURRENCE, "row_log": ROW_LOG}
    made: dict[str, tuple[Shape, Graph]] = {
        f"{op}-{s.name}": (s, recurrence_graph(s, op)) for op in kernels for s in SHAPES
    }
    cases = [Case(name, g, kernels[name.split("-")[0]], {}, [], 2e-5, 2e-5) for name, (_, g) in made.items()]
    compiled = compile_cases(cases, target, tmp_path)
    for case in cases:
        assert case.kernel.reject(case.node, target) is None
        for _ in range(5):
            inputs = recurrence_inputs(case.graph, made[case.name][0], random_step(rng, 40), rng)
            for threads in (1, 3):
                run_case(replace(case, inputs=inputs), *compiled[case.name], threads)
