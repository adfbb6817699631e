"""Pointwise and row groups in Triton: the shared cases, every dtype, special values, wide rows, a few binaries."""

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
from kernels.cases import SIZES, Text, of_ops, of_random, of_texts
from kernels.harness import Case
from kernels.triton_harness import INTERPRETED, ONE_TARGET, TARGETS, compile_for, run_case

from llmc.codegen.backends.triton.row_kernels import ROWS
from llmc.codegen.kernel import TRIGGER_BEFORE_WAIT
from llmc.ir.dtype import DTYPES

INTEGERS = ("i64", "i32", "i16", "i8", "u32", "u16", "u8")
NORM = Text("bf16[1, 4096]; bf16[4096]", "rms_norm {eps=1e-06}", "bf16[1, 4096]")
RESIDUAL = Text(
    "bf16[T, 301]; bf16[T, 301]; bf16[301]",
    'fused {body=["add(a0, a1)", "mul(mul(add(a0, a1), rsqrt(add(row_mean(mul(add(a0, a1), add(a0, a1))), 1e-06))),'
    ' a2)"], dtypes=["bf16", "bf16"]}',
    "bf16[T, 301], bf16[T, 301]",
)
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-30, -3e38, 88.9, -104.0, 3e-3], np.float32)
# numpy says what overflows and what is no number
pytestmark = [pytest.mark.drawn, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def case(t: Text, schedule: dict[str, Any] | None = None, inputs: Sequence[np.ndarray] = (), **options: Any) -> Case:
    g = t.graph()
    (node,) = g.nodes
    drawn = list(inputs) or t.inputs(g, generator())
    given = schedule or ROWS.schedules(node, INTERPRETED)[0]
    return Case(t.call, g, ROWS, given, drawn, **{"sizes": SIZES, "rtol": 2e-5, "atol": 2e-5, **options})


@pytest.fixture(scope="module")
def shared() -> list[Case]:
    """Of the cases of every language 80, each under one of its schedules."""
    print(f"SEED={SEED}")
    found: dict[str, list[Case]] = {}
    for c in [*of_ops([ROWS], INTERPRETED), *of_texts([ROWS], INTERPRETED), *of_random([ROWS], INTERPRETED)]:
        found.setdefault(c.name.rpartition("-")[0], []).append(c)
    rng = Random(SEED)
    return [rng.choice(found[name]) for name in rng.sample(list(found), 80)]


def test_shared_cases(shared: list[Case]) -> None:
    for c in shared:
        triton_harness.run_case(c)


@pytest.mark.parametrize("rows, cols", [(1, 16), (4, 8)])
def test_rows_read_again_by_every_pass(rows: int, cols: int, shared: list[Case]) -> None:
    """Tiles narrower than the row: what wide rows do."""
    for c in Random(SEED).sample(shared, 8):
        triton_harness.run_case(replace(c, schedule={"rows": rows, "cols": cols, "warps": 1}))


@pytest.mark.parametrize("schedule", range(3))
@pytest.mark.parametrize("text", [NORM, RESIDUAL], ids=["norm", "residual"])
def test_norms(text: Text, schedule: int) -> None:
    (node,) = text.graph().nodes
    offered = ROWS.schedules(node, INTERPRETED)
    run_case(case(text, offered[schedule % len(offered)]))


@pytest.mark.parametrize("width", [16384, 20001])
def test_wide_rows(width: int) -> None:
    run_case(case(Text(f"bf16[2, {width}]; f32[{width}]", "rms_norm {eps=1e-06}", f"bf16[2, {width}]")))
    run_case(case(Text(f"f32[2, {width}]", "softmax", f"f32[2, {width}]"), rtol=1e-4, atol=1e-9))


def test_rows_of_unknown_width() -> None:
    run_case(case(Text("f32[3, T]", "softmax", "f32[3, T]")))
    run_case(case(Text("bf16[R, T]", "amax {axis=1}", "bf16[R]")))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_exact(dtype: str) -> None:
    """Over the whole range; overflows wrap around."""
    rng, np_type = generator(), DTYPES[dtype].np
    info = np.iinfo(np_type)
    xs = [rng.integers(info.min, info.max, 33, np_type, endpoint=True) for _ in range(2)]
    for op in ("add", "sub", "mul", "maximum", "minimum"):
        run_case(case(Text(f"{dtype}[33]; {dtype}[33]", op, f"{dtype}[33]"), inputs=xs))
    xs[1][::3] = xs[0][::3]
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        run_case(case(Text(f"{dtype}[33]; {dtype}[33]", op, "bool[33]"), inputs=xs))
    small = [rng.integers(0, 100, 33, np_type)]
    for to in (*INTEGERS, "f32", "bf16", "f16", "bool"):
        run_case(case(Text(f"{dtype}[33]", f'cast {{dtype="{to}"}}', f"{to}[33]"), inputs=small))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_bools_and_floats_cast(dtype: str) -> None:
    x = generator().uniform(-90, 90, (5, 7)).astype(np.float32) * (np.arange(7) > 1)
    for to in ("i8", "i32", "i64", "bool", "f32", "bf16", "f16"):
        run_case(case(Text(f"{dtype}[5, 7]", f'cast {{dtype="{to}"}}', f"{to}[5, 7]"), inputs=[x]))
    flags = [x > 0, x < 30]
    run_case(case(Text("bool[5, 7]; bool[5, 7]", "logical_and", "bool[5, 7]"), inputs=flags))
    run_case(case(Text("bool[5, 7]; bool[5, 7]", "add", "bool[5, 7]"), inputs=flags))
    run_case(case(Text(f"bool[5, 7]; {dtype}[5, 7]", "mul", f"{dtype}[5, 7]"), inputs=[flags[0], x]))


@pytest.mark.parametrize(
    "op", ["relu", "abs", "exp", "exp2", "sigmoid", "tanh", "erf", "sqrt", "floor", "reciprocal", "log"]
)
def test_special_values(op: str) -> None:
    x = SPECIAL[SPECIAL != 0] if op in ("reciprocal", "log") else SPECIAL
    run_case(case(Text(f"f32[{len(x)}]", op, f"f32[{len(x)}]"), inputs=[x], atol=1e-37))


@pytest.mark.parametrize("op", ["maximum", "minimum", "pow", "add", "mul", "lt", "ne"])
def test_special_pairs(op: str) -> None:
    """NaN wins a maximum; powers of negative bases and of infinities are those of C."""
    values = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -2.5], np.float32)
    n, to = len(values), "bool" if op in ("lt", "ne") else "f32"
    run_case(case(Text(f"f32[{n}, 1]; f32[{n}]", op, f"{to}[{n}, {n}]"), inputs=[values[:, None], values]))


def test_not_a_number_in_a_row() -> None:
    x = generator().standard_normal((4, 19)).astype(np.float32)
    x[1, 3] = np.nan
    x[2] = -np.inf
    body = 'fused {body=["row_max(a0)", "div(exp(sub(a0, row_max(a0))), row_sum(exp(sub(a0, row_max(a0)))))"], '
    t = Text("f32[4, 19]", body + 'dtypes=["f32", "f32"]}', "f32[4, 1], f32[4, 19]")
    for schedule in ({"rows": 1, "cols": 32, "warps": 1}, {"rows": 2, "cols": 8, "warps": 1}):
        run_case(case(t, schedule, inputs=[x]))


def test_functions_are_float32_accurate() -> None:
    """Near zero and far from it: tanh must not cancel, powers must not lose digits to the logarithm."""
    rng = generator()
    small = np.float32(10.0) ** rng.uniform(-12, 1, 500).astype(np.float32) * rng.choice([-1, 1], 500)
    run_case(case(Text("f32[500]", "tanh", "f32[500]"), inputs=[small.astype(np.float32)], rtol=4e-7, atol=0))
    large = rng.uniform(1, 1e4, 500).astype(np.float32)
    t = Text("f32[500]; f32[500]", "pow", "f32[500]")
    run_case(case(t, inputs=[large, rng.uniform(-9, 9, 500).astype(np.float32)], rtol=4e-7, atol=0))
    angles = rng.uniform(-1e5, 1e5, 500).astype(np.float32)
    for op in ("sin", "cos"):
        run_case(case(Text("f32[500]", op, "f32[500]"), inputs=[angles], rtol=1e-6, atol=1e-6))


def test_weights_are_loaded_before_the_wait() -> None:
    g = NORM.graph()
    g.inputs[1].weight = True
    (node,) = g.nodes
    text = ROWS.emit(node, ROWS.schedules(node, TARGETS[1])[0], TARGETS[1]).text
    at = [text.index(s) for s in ("tl.load(x1", "gdc_wait", "gdc_launch_dependents", "tl.load(x0")]
    assert at == sorted(at)
    text = ROWS.emit(node, {**ROWS.schedules(node, TARGETS[1])[0], TRIGGER_BEFORE_WAIT: 1}, TARGETS[1]).text
    at = [text.index(s) for s in ("tl.load(x1", "gdc_launch_dependents", "gdc_wait", "tl.load(x0")]
    assert at == sorted(at)
    assert "gdc" not in ROWS.emit(node, ROWS.schedules(node, TARGETS[0])[0], TARGETS[0]).text


def test_only_values_that_fill_the_space_share_memory() -> None:
    """A vector that every row reads must stay as it is until the last row has read it."""
    t = Text(
        "f32[3, 4]; f32[4]", 'fused {body=["add(a0, a1)", "mul(a1, 2.0)"], dtypes=["f32", "f32"]}', "f32[3, 4], f32[4]"
    )
    (node,) = t.graph().nodes
    assert ROWS.inplace(node, {}) == ((0, 0),)


def test_schedules_rank_by_parallelism() -> None:
    """A row for one token: many threads; a batch of short rows: several rows a program."""

    def best(t: Text, tokens: int) -> dict[str, Any]:
        (node,) = t.graph().nodes
        offered = ROWS.schedules(node, TARGETS[1])
        return min(offered, key=lambda s: ROWS.cost_us(node, s, TARGETS[1], {"T": tokens, "R": 1}))

    assert best(NORM, 1)["warps"] >= 8
    assert best(Text("bf16[T, 32, 128]; bf16[128]", "rms_norm {eps=1e-06}", "bf16[T, 32, 128]"), 4096)["rows"] > 1


def test_a_sample_compiles(shared: list[Case], tmp_path: Path) -> None:
    """Of the cases, and the norm, for a GPU target."""
    for c in [*Random(SEED).sample(shared, 3), case(NORM)]:
        for target in ONE_TARGET:
            schedule = Random(SEED).choice(ROWS.schedules(c.node, target))
            assert compile_for(replace(c, schedule=schedule), target, tmp_path).binary


@pytest.mark.parametrize("types", ["bf16[T, 3]", "f32[3, 4]", "bf16[T, 33]", "f32[5, 1]", "bf16[2, 16384]", "f32[T]"])
def test_no_two_threads_hold_one_element(types: str) -> None:
    """Else one could read an element after another has written its result over it."""
    for call in ("tanh", "softmax", "rms_norm {eps=1e-06}"):
        weight = f"; f32[{types.rpartition(',')[2].strip(' ]')}]" if call.startswith("rms") else ""
        if weight and "," not in types:
            continue
        (node,) = Text(types + weight, call, types).graph().nodes
        for target in TARGETS:
            for s in ROWS.schedules(node, target):
                assert s["warps"] == 1 or s["warps"] * target.limits.warp <= s["rows"] * s["cols"]
