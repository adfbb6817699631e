"""The recurrent kernels in Triton's interpreter compared with their references, on random steps and dirty states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.harness import Case
from kernels.recurrent_cases import (
    ROWS,
    Shape,
    Step,
    conv_graph,
    conv_inputs,
    random_step,
    recurrence_graph,
    recurrence_inputs,
)
from kernels.triton_harness import INTERPRETED, run_case

from llmc.codegen.backends.triton.recurrent import CHUNK_FACTORS, ROW_CONV, ROW_LOG, ROW_RECURRENCE
from llmc.codegen.kernel import Kernel
from llmc.ir.dim import Dim
from llmc.ir.graph import Graph

SHAPES = (
    Shape("delta", "bf16", 2, 4, 16, 16),
    Shape("sum", "f16", 1, 3, 20, 37, delta=False, n=1),
    Shape("exact", "f32", 3, 3, 8, 5, n=2),
    Shape("tall", "bf16", 1, 1, 100, 33, chunk=16),
    Shape("wide", "bf16", 1, 2, 33, 128),
    Shape("kimi", "bf16", 2, 2, 20, 37, channels=True),
    Shape("mamba1", "f16", 1, 5, 12, 1, delta=False, n=2, channels=True),
)
CONVOLUTIONS = (("f32", 37, 4, 4, True), ("bf16", 300, 3, 6, False), ("f16", 8, 2, 2, True), ("bf16", 5, 1, 1, False))
OPS: dict[str, Kernel] = {"row_recurrence": ROW_RECURRENCE, "row_recurrence_draft": ROW_RECURRENCE, "row_log": ROW_LOG}
CHUNK_OPS: dict[str, Kernel] = {
    "chunk_factors": CHUNK_FACTORS, "chunk_recurrence": ROW_RECURRENCE, "chunk_recurrence_draft": ROW_RECURRENCE
}  # fmt: skip


def single_tokens(g: Graph) -> Graph:
    """Return the graph of steps whose entries have one token each."""
    for v in (*g.inputs, *g.outputs):
        v.type = replace(v.type, shape=tuple(Dim.of("R") if d == Dim.of("T") else d for d in v.type.shape))
    return g


def decode_step(rng: np.random.Generator) -> Step:
    """Runs of one entry and of up to 40, each of which has one token, and padding."""
    runs = rng.choice([1, 1, 2, 4, 40], rng.integers(1, 5))
    rows = np.repeat(rng.permutation(ROWS)[: len(runs)], runs)
    first = {int(row): int(rng.choice([0, 1, rng.integers(1, 99)])) for row in rows}
    positions = np.concatenate([first[int(rows[sum(runs[:i])])] + np.arange(n) for i, n in enumerate(runs)])
    padding = int(rng.integers(0, 3))
    starts = np.minimum(np.arange(len(rows) + padding + 1), len(rows))
    operands = [np.pad(x, (0, padding), constant_values=-1) for x in (rows, positions)]
    return Step([x.astype(np.int32) for x in (operands[0], starts, operands[1])], first, len(rows) + padding)


def _graphs() -> Iterator[tuple[str, Kernel, Graph, Any]]:
    """Yield (name, kernel, graph, a function that draws the operands of a step)."""
    for sizes in CONVOLUTIONS:
        yield f"row_conv-{sizes[0]}-{sizes[1]}", ROW_CONV, conv_graph(*sizes), conv_inputs
    for shape in SHAPES:
        for op, kernel in (OPS if shape.channels else {**OPS, **CHUNK_OPS}).items():
            graph = recurrence_graph(shape, op)
            yield f"{op}-{shape.name}", kernel, graph, lambda g, step, rng, s=shape: recurrence_inputs(g, s, step, rng)


def _cases() -> Iterator[Any]:
    """Yield the graphs under all schedules, for any steps and for steps of single tokens."""
    for draw in (random_step, decode_step):
        for name, kernel, graph, inputs in _graphs():
            of_steps = single_tokens(graph) if draw is decode_step else graph
            for i, schedule in enumerate(kernel.schedules(next(iter(of_steps.nodes)), INTERPRETED)):
                yield pytest.param(kernel, of_steps, draw, inputs, schedule, id=f"{name}-{draw.__name__}-{i}")


@pytest.mark.drawn
@pytest.mark.parametrize(("kernel", "graph", "draw", "inputs", "schedule"), list(_cases()))
def test_recurrent(kernel: Kernel, graph: Graph, draw: Any, inputs: Any, schedule: dict[str, Any]) -> None:
    rng = generator()
    error = 1e-4 if "chunk" in next(iter(graph.nodes)).op.name else 2e-5
    operands = inputs(graph, draw(rng), rng)
    run_case(Case(f"{next(iter(graph.nodes)).op.name}", graph, kernel, schedule, operands, rtol=error, atol=error))
