"""Sampling compared with its reference over many rows: ties, extreme parameters, and the statistics of draws."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.harness import Case, Ctx, compile_cases, run_case

from llmc.codegen.backends.cpp.state import SAMPLE
from llmc.extension import load
from llmc.ir.example import example_graph
from llmc.ir.ops import OPS
from llmc.ir.ops.sample import kept

V, ROWS = 997, 64


def operands(logits: np.ndarray, fparams: np.ndarray, iparams: np.ndarray) -> list[np.ndarray]:
    i32 = np.int32
    n = len(logits)
    rows, starts = np.arange(n, dtype=i32), np.arange(n + 1, dtype=i32)
    return [logits, rows, starts, np.arange(n, dtype=i32) * 7, np.zeros((n, 1), i32), fparams, iparams]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(logits [64, 997], fparams, iparams) -> ids by the compiled kernel."""
    rng = np.random.default_rng(0)
    drawn = operands(rng.random((ROWS, V)), np.zeros((ROWS, 8), np.float32), np.zeros((ROWS, 8), np.int32))
    g = example_graph(OPS["row_sample"], drawn, {}).graphs["main"]
    case, target = Case("sample", g, SAMPLE, {}, drawn), load().target("cpu:native")
    source, function = compile_cases([case], target, tmp_path_factory.mktemp("sample"))["sample"]
    nbytes = source.scratch.const or 0

    def run(logits: np.ndarray, fparams: np.ndarray, iparams: np.ndarray) -> np.ndarray:
        dtypes = (np.float32, *[np.int32] * 4, np.float32, np.int32)
        arrays = [np.ascontiguousarray(a, d) for a, d in zip(operands(logits, fparams, iparams), dtypes)]
        out = np.full(ROWS, -1, np.int32)
        scratch = np.zeros(nbytes + 64, np.uint8)
        args = (ctypes.c_void_p * 8)(*(a.ctypes.data for a in [*arrays, out]))
        ctx = Ctx(0, 1, scratch.ctypes.data + -scratch.ctypes.data % 64, nbytes)
        function(ctypes.byref(ctx), args, (ctypes.c_int64 * 1)())
        return out

    return run


def parameters(temperature: float, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0) -> tuple[Any, Any]:
    f, i = np.zeros((ROWS, 8), np.float32), np.zeros((ROWS, 8), np.int32)
    f[:, 0], f[:, 1], f[:, 2], i[:, 0] = temperature, top_p, min_p, top_k
    i[:, 1] = np.arange(ROWS)
    return f, i


GRID = [(t, p, m, k) for t in (0.3, 5.0) for p in (1.0, 0.9, 1e-6) for m in (0.0, 0.1, 1.0) for k in (0, 1, 40, 5000)]


@pytest.mark.parametrize("kind", ["normal", "flat", "ties", "spiked"])
def test_draws_equal_the_reference(sample: Any, kind: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((ROWS, V)).astype(np.float32) * 4
    if kind == "flat":
        logits[:] = 1.5
    elif kind == "ties":
        logits = np.round(logits)
    elif kind == "spiked":
        logits[:, 5] = 60.0
        logits[:, 17] = -np.inf
    wrong = total = 0
    for t, p, m, k in GRID:
        f, i = parameters(t, p, m, k)
        got, want = sample(logits, f, i), OPS["row_sample"].ref(*operands(logits, f, i))
        wrong, total = wrong + int((got != want).sum()), total + ROWS
        for r in range(0, ROWS, 16):
            _, mask = kept(logits[r], f[r], k)
            assert mask[got[r]], f"row {r} drew an id outside the kept set (t={t} p={p} min_p={m} k={k})"
    assert wrong <= total // 1000, f"{wrong} of {total} draws differ: more than rounding at a boundary explains"


def test_temperature_zero_takes_the_lowest_of_equal_ids(sample: Any) -> None:
    logits = np.zeros((ROWS, V), np.float32)
    logits[:, [900, 31, 500]] = 2.0
    assert (sample(logits, *parameters(0.0)) == 31).all()


def test_the_draw_depends_only_on_seed_and_position(sample: Any) -> None:
    logits = np.tile(np.random.default_rng(2).standard_normal(V).astype(np.float32), (ROWS, 1))
    f, i = parameters(1.0)
    first = sample(logits, f, i)
    assert (sample(logits, f, i) == first).all()
    assert len(set(first.tolist())) > ROWS // 4
    i[:, 1] += 1000
    assert (sample(logits, f, i) != first).any()


@pytest.mark.parametrize("v", [997, 1024, 5])
def test_penalties_equal_the_reference(tmp_path: Path, v: int) -> None:
    """Vectors, the rest of a row, padding, and rows without penalties; three threads divide the ids."""
    rng, m = np.random.default_rng(3), 6
    f, i = np.zeros((m, 8), np.float32), np.zeros((m, 8), np.int32)
    f[:, 3:6] = [[1, 0, 0], [1.7, 0, 0], [1, 0.5, 0], [1, 0, -0.3], [0.8, -0.5, 0.3], [1.7, 0.5, 0.3]]
    i[:, 6] = 2
    seen = rng.integers(-(2**31), 2**31, (m, -(-v // 32)))
    counts = rng.integers(0, 3, (m, v)) * (rng.random((m, v)) < 0.2)
    bias_ids = np.sort(rng.random((m, v)).argsort(1)[:, :2], 1)
    logits, rows = 4 * rng.standard_normal((m + 1, v)), np.array([3, 0, -1, 5, 1, 4, 2])
    arrays = [logits, rows, f, i, seen, counts, bias_ids, rng.standard_normal((m, 2))]
    g = example_graph(OPS["row_penalize"], arrays, {}).graphs["main"]
    case = Case("penalize", g, SAMPLE, {}, arrays)
    run_case(case, *compile_cases([case], load().target("cpu:native"), tmp_path)["penalize"])
