"""Triton kernels that move, fold, scan and select: the shared cases, dtypes, sizes beyond a tile, a few binaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from draw import SEED, generator
from kernels import triton_harness
from kernels.cases import SIZES, Text, of_ops, of_texts
from kernels.harness import Case
from kernels.triton_harness import INTERPRETED, ONE_TARGET, compile_for, run_case

from llmc.codegen.backends.triton.reduce import ARGMAX, CUMSUM, REDUCE, SOFTMAX, TOPK
from llmc.codegen.backends.triton.shape import CONCAT, COPY, GATHER, IOTA, PACKED_TAKE, TAKE
from llmc.codegen.kernel import Kernel
from llmc.ir.dtype import DTYPES

KERNELS: tuple[Kernel, ...] = (
    COPY, CONCAT, TAKE, PACKED_TAKE, GATHER, IOTA, REDUCE, ARGMAX, CUMSUM, SOFTMAX, TOPK,
)  # fmt: skip
STORED = ("f32", "bf16", "f16", "f64", "i64", "i32", "i16", "i8", "u32", "u16", "u8", "bool")
NUMBERS = ("f32", "bf16", "f16", "i64", "i32", "i16", "i8", "u32", "u16", "u8")
# numpy says what overflows and what is no number
pytestmark = [pytest.mark.drawn, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def case(
    kernel: Kernel, t: Text, inputs: Sequence[np.ndarray] = (), schedule: dict[str, Any] | None = None, **options: Any
) -> Case:
    g = t.graph()
    (node,) = g.nodes
    drawn = list(inputs) or t.inputs(g, generator())
    given = schedule or kernel.schedules(node, INTERPRETED)[0]
    return Case(t.call, g, kernel, given, drawn, **{"sizes": SIZES, "rtol": 2e-5, "atol": 2e-5, **options})


def values(dtype: str, *shape: int) -> np.ndarray:
    """Values over the whole range of a dtype."""
    rng, np_type = generator(), DTYPES[dtype].np
    if DTYPES[dtype].kind == "i":
        return rng.integers(np.iinfo(np_type).min, np.iinfo(np_type).max, shape, np_type, endpoint=True)
    return rng.random(shape) > 0.5 if dtype == "bool" else rng.standard_normal(shape)


@pytest.fixture(scope="module")
def shared() -> list[Case]:
    """The cases of every language, under every schedule."""
    return [*of_ops(list(KERNELS), INTERPRETED), *of_texts(list(KERNELS), INTERPRETED)]


def test_shared_cases(shared: list[Case]) -> None:
    assert {c.kernel.name for c in shared} == {k.name for k in KERNELS}
    for c in shared:
        triton_harness.run_case(c)


@pytest.mark.parametrize("dtype", STORED)
def test_every_element_moves_unchanged(dtype: str) -> None:
    x = values(dtype, 5, 6, 7)
    run_case(case(COPY, Text(f"{dtype}[5, 6, 7]", "transpose {perm=[2, 0, 1]}", f"{dtype}[7, 5, 6]"), [x]))
    run_case(case(COPY, Text(f"{dtype}[5, 6, 7]", "reshape {shape=[30, 7]}", f"{dtype}[30, 7]"), [x]))
    t = Text(f"{dtype}[5, 6, 7]", "slice {axis=1, start=1, stop=6, step=2}", f"{dtype}[5, 3, 7]")
    run_case(case(COPY, t, [x]))
    t = Text(f"{dtype}[5, 6, 7]; {dtype}[5, 2, 7]", "concat {axis=1}", f"{dtype}[5, 8, 7]")
    run_case(case(CONCAT, t, [x, values(dtype, 5, 2, 7)]))
    idx = np.array([[4, -1, 0], [2, 2, -7]], np.int32)
    run_case(case(TAKE, Text(f"{dtype}[5, 6, 7]; i32[2, 3]", "take", f"{dtype}[2, 3, 6, 7]"), [x, idx]))


@pytest.mark.parametrize("perm", [(1, 0), (2, 1, 0), (0, 2, 1), (1, 2, 0), (3, 1, 0, 2), (0, 3, 2, 1)])
def test_transposes_beyond_a_tile(perm: tuple[int, ...]) -> None:
    shape = [(70, 33), (3, 40, 70), (3, 2, 40, 35)][len(perm) - 2]
    text = [", ".join(map(str, s)) for s in (shape, [shape[p] for p in perm])]
    for schedule in range(2):
        t = Text(f"bf16[{text[0]}]", f"transpose {{perm={list(perm)}}}", f"bf16[{text[1]}]")
        (node,) = t.graph().nodes
        offered = COPY.schedules(node, INTERPRETED)
        run_case(case(COPY, t, schedule=offered[schedule]))


def test_beyond_a_tile() -> None:
    run_case(case(COPY, Text("bf16[T, 3000]", "slice {axis=1, start=7, stop=2999}", "bf16[T, 2992]")))
    run_case(case(CONCAT, Text("bf16[2, 2500]; bf16[2, 3]; bf16[2, 1025]", "concat {axis=1}", "bf16[2, 3528]")))
    run_case(case(CONCAT, Text("f32[T, 300]; f32[R, 300]", "concat {axis=0}", "f32[T+R, 300]")))
    run_case(case(TAKE, Text("bf16[40, 2600]; i64[T]", "take", "bf16[T, 2600]", ints=40)))
    run_case(case(GATHER, Text("f32[3, 500, 4]; i64[3, 400, 4]", "gather {axis=1}", "f32[3, 400, 4]", ints=500)))
    run_case(case(IOTA, Text("", 'iota {size=2100, dtype="i32"}', "i32[2100]")))


@pytest.mark.parametrize("start", (0, 40, 80))
def test_rows_of_a_part_of_a_table(start: int) -> None:
    """Zeros for the rows of other parts, and for padding."""
    text = Text("bf16[40, 700]; i32[T]", f"take_part {{start={start}}}", "bf16[T, 700]", ints=120)
    run_case(case(TAKE, text))
    x = np.random.default_rng(0).standard_normal((40, 700))
    idx = np.array([-1, 0, 1, 38, 39, 40, 41, 79, 80, 119, 120], np.int64)
    run_case(case(TAKE, text, [x, idx]))
    panels = Text("bf16[5, 350, 8, 2]; i32[T]", f"packed_take_part {{k=700, start={start}}}", "bf16[T, 700]", ints=120)
    run_case(case(PACKED_TAKE, panels))
    run_case(case(PACKED_TAKE, panels, [x.reshape(5, 350, 8, 2), idx]))


def test_one_row_by_index() -> None:
    """The step of one sequence: sizes are constants, nothing is divided."""
    for idx in (5, -1):
        t = Text("bf16[40, 96]; i32[1]", "take", "bf16[1, 96]")
        run_case(case(TAKE, t, [values("bf16", 40, 96), np.array([idx], np.int32)]))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_folds_of_every_dtype(dtype: str, axis: int) -> None:
    """Integers wrap as their dtype does; extremes are exact."""
    x = values(dtype, 5, 37, 6)
    left = ", ".join(str(n) for i, n in enumerate(x.shape) if i != axis)
    ops = ["sum", "amax", "amin"] + ["mean"] * (DTYPES[dtype].kind == "f")
    for op in ops:
        run_case(case(REDUCE, Text(f"{dtype}[5, 37, 6]", f"{op} {{axis={axis}}}", f"{dtype}[{left}]"), [x]))
    run_case(case(ARGMAX, Text(f"{dtype}[5, 37, 6]", f"argmax {{axis={axis}}}", f"i64[{left}]"), [x]))
    run_case(case(CUMSUM, Text(f"{dtype}[5, 37, 6]", f"cumsum {{axis={axis}}}", f"{dtype}[5, 37, 6]"), [x]))


def test_folds_beyond_a_tile() -> None:
    for t in (
        Text("i32[3, 5000]", "sum {axis=1}", "i32[3]", ints=1000),
        Text("i32[2, 700, 9]", "amax {axis=1}", "i32[2, 9]", ints=9999),
        Text("f32[2, 700, 90]", "mean {axis=1}", "f32[2, 90]"),
        Text("i32[2, T, R]", "amin {axis=1}", "i32[2, R]", ints=99),
    ):
        run_case(case(REDUCE, t))
    run_case(case(ARGMAX, Text("bf16[2, 5000]", "argmax {axis=1}", "i64[2]")))
    run_case(case(CUMSUM, Text("i64[2, 4500]", "cumsum {axis=1}", "i64[2, 4500]", ints=99)))
    run_case(case(SOFTMAX, Text("bf16[2, 300, 9]", "softmax {axis=1}", "bf16[2, 300, 9]")))


def test_ties_and_not_a_number() -> None:
    """The first of equals; NaN is the largest to argmax and amax, and the last to topk, as in numpy."""
    x = generator().integers(-2, 3, (6, 300)).astype(np.float32)
    x[1, 100] = x[1, 200] = np.nan
    x[2] = -np.inf
    x[3, 50] = np.inf
    x[4] = np.where(np.arange(300) % 2, -0.0, 0.0)
    run_case(case(ARGMAX, Text("f32[6, 300]", "argmax {axis=1}", "i64[6]"), [x]))
    run_case(case(ARGMAX, Text("f32[300, 6]", "argmax {axis=0}", "i64[6]"), [x.T.copy()]))
    run_case(case(REDUCE, Text("f32[300, 6]", "amax {axis=0}", "f32[6]"), [x.T.copy()]))
    run_case(case(TOPK, Text("f32[6, 300]", "topk {k=299}", "f32[6, 299], i64[6, 299]"), [x]))


def test_topk_of_rows_that_do_not_fit() -> None:
    x = generator().integers(-20, 20, (2, 300)).astype(np.float32)
    t = Text("f16[2, 300]", "topk {k=9}", "f16[2, 9], i64[2, 9]")
    run_case(case(TOPK, t, [x], {"rows": 1, "cols": 64, "warps": 1}))
    run_case(case(TOPK, Text("f32[3, T]", "topk {k=4}", "f32[3, 4], i64[3, 4]")))


def test_a_sample_compiles(shared: list[Case], tmp_path: Path) -> None:
    """Of the cases, for a GPU target."""
    print(f"SEED={SEED}")
    for c in Random(SEED).sample(shared, 5):
        for target in ONE_TARGET:
            schedule = Random(SEED).choice(c.kernel.schedules(c.node, target))
            assert compile_for(replace(c, schedule=schedule), target, tmp_path).binary
