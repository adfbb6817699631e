"""The recurrent kernels in Triton's interpreter compared with their references, on random steps and dirty states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from draw import generator
from kernels.harness import Case
from kernels.recurrent_cases import Shape, conv_graph, conv_inputs, random_step, recurrence_graph, recurrence_inputs
from kernels.triton_harness import INTERPRETED, run_case

from llmc.codegen.backends.triton.recurrent import ROW_CONV, ROW_LOG, ROW_RECURRENCE
from llmc.codegen.kernel import Kernel
from llmc.ir.graph import Graph

SHAPES = (
    Shape("delta", "bf16", 2, 4, 16, 16),
    Shape("sum", "f16", 1, 3, 20, 37, delta=False, n=1),
    Shape("exact", "f32", 3, 3, 8, 5, n=2),
    Shape("tall", "bf16", 1, 1, 100, 33),
)
CONVOLUTIONS = (("f32", 37, 4, 4, True), ("bf16", 300, 3, 6, False), ("f16", 8, 2, 2, True), ("bf16", 5, 1, 1, False))
OPS = {"row_recurrence": ROW_RECURRENCE, "row_recurrence_draft": ROW_RECURRENCE, "row_log": ROW_LOG}
ERROR = 5e-3  # of chunks, whose factors tensor cores round to TF32


def _graphs() -> Iterator[tuple[str, Kernel, Graph, Any]]:
    """Yield (name, kernel, graph, a function that draws the operands of a step)."""
    for sizes in CONVOLUTIONS:
        graph = conv_graph(*sizes)
        yield f"row_conv-{sizes[0]}-{sizes[1]}", ROW_CONV, graph, conv_inputs
    for shape in SHAPES:
        for op, kernel in OPS.items():
            graph = recurrence_graph(shape, op)
            yield f"{op}-{shape.name}", kernel, graph, lambda g, step, rng, s=shape: recurrence_inputs(g, s, step, rng)


def _cases() -> Iterator[Any]:
    """Yield the graphs under all schedules that they have on GPUs."""
    for name, kernel, graph, inputs in _graphs():
        for i, schedule in enumerate(kernel.schedules(next(iter(graph.nodes)), INTERPRETED)):
            yield pytest.param(kernel, graph, inputs, schedule, id=f"{name}-{i}")


@pytest.mark.drawn
@pytest.mark.parametrize(("kernel", "graph", "inputs", "schedule"), list(_cases()))
def test_recurrent(kernel: Kernel, graph: Graph, inputs: Any, schedule: dict[str, Any]) -> None:
    rng = generator()
    step = random_step(rng, 150)
    error = ERROR if schedule.get("chunk") else 2e-5
    run_case(Case("recurrent", graph, kernel, schedule, inputs(graph, step, rng), rtol=error, atol=error))
