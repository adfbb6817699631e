"""The kernels of models that pool compared with their references: first tokens, last positions, means, new lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels import harness, triton_harness
from kernels.harness import Case
from kernels.test_triton_state import drawn_rows

from llmc.codegen.backends.cpp.state import POOLING
from llmc.codegen.backends.triton.row_state import ROW_ADVANCE, ROW_FIRST, ROW_MEAN, ROW_REACH
from llmc.extension import load
from llmc.ir.example import example_graph
from llmc.ir.ops import OPS

TRITON = {"row_first": ROW_FIRST, "row_reach": ROW_REACH, "row_mean": ROW_MEAN, "row_advance": ROW_ADVANCE}


def operands(entries: int, most: int, padding: int, spare: int) -> dict[str, list[Any]]:
    """The operands of each op for a step with entries without tokens, padding, and `spare` tokens after the last."""
    rng = generator()
    rows, qlens, length = drawn_rows(rng, entries, most, padding)
    rows[: entries - padding] = np.arange(entries - padding)  # a prompt has one entry
    qlens[0] = max(qlens[0], 1)
    starts, _, positions = OPS["row_spans"].ref(rows, qlens, length, tokens=int(qlens.sum()) + spare)
    x = rng.standard_normal((len(positions), 150)).astype(np.float32)
    return {
        "row_first": [starts], "row_reach": [starts, positions], "row_mean": [x, starts],
        "row_advance": [length, rows, starts, positions],
    }  # fmt: skip


def case(op: str, kernel: Any, arrays: list[Any]) -> Case:
    return Case(op, example_graph(OPS[op], arrays, {}).graphs["main"], kernel, {}, arrays)


@pytest.mark.parametrize("level", ["cpu:native", "cpu:portable"])
def test_cpu(level: str, tmp_path: Path) -> None:
    cases = [case(op, POOLING, arrays) for op, arrays in operands(40, 30, 3, 2).items()]
    compiled = harness.compile_cases(cases, load().target(level), tmp_path)
    for c in cases:
        harness.run_case(c, *compiled[c.name])


@pytest.mark.parametrize(("entries", "most", "padding", "spare"), [(1, 1, 0, 0), (7, 40, 2, 5), (300, 2, 20, 0)])
@pytest.mark.parametrize("op", TRITON)
def test_triton(op: str, entries: int, most: int, padding: int, spare: int) -> None:
    """More entries than one look takes, and prompts longer than a tile."""
    triton_harness.run_case(case(op, TRITON[op], operands(entries, most, padding, spare)[op]))
