"""Sampling in Triton's interpreter compared with its reference: mixed parameters, ties, the statistics of draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from draw import generator
from kernels.harness import Case
from kernels.triton_harness import INTERPRETED, interpret, interpreting, run_case, some

from llmc.codegen.backends.triton.sample import (
    ROW_BLOCK_MAX,
    ROW_FINISH,
    ROW_LOGPROBS,
    ROW_MASK,
    ROW_PENALIZE,
    ROW_SAMPLE,
    ROW_SAMPLE_BLOCKS,
)
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.triton_kernel import TritonKernel
from llmc.codegen.backends.triton.triton_toolchain import load_entry
from llmc.ir.example import example_graph, op_example
from llmc.ir.ops import OPS
from llmc.ir.ops.sample import exponentials, kept, row_exponentials

KERNELS: Mapping[str, TritonKernel] = {
    "row_penalize": ROW_PENALIZE, "row_mask": ROW_MASK, "row_block_max": ROW_BLOCK_MAX,
    "row_sample_blocks": ROW_SAMPLE_BLOCKS, "row_sample": ROW_SAMPLE, "row_logprobs": ROW_LOGPROBS,
    "row_finish": ROW_FINISH,
}  # fmt: skip
I32, F32 = np.int32, np.float32
pytestmark = pytest.mark.drawn
SMALL = {"tile": 256, "warps": 4}
FILTERS = [(1.0, 0.0, 0), (0.7, 0.0, 0), (1.0, 0.2, 0), (1.0, 0.0, 4), (0.8, 0.1, 0), (0.6, 0.0, 6), (0.9, 0.05, 5)]


def case(op: str, arrays: list[Any], attrs: dict[str, Any], schedule: dict[str, Any], dtype: str = "f32") -> Case:
    g = example_graph(OPS[op], arrays, attrs, dtype).graphs["main"]
    return Case(op, g, KERNELS[op], schedule, arrays)


def results(c: Case) -> list[np.ndarray]:
    """Return the kernel's results for f32 logits."""
    source = c.kernel.emit(c.node, c.schedule, INTERPRETED)
    kinds = {"f32": F32, "i32": I32}
    out = [np.full([int(d) for d in v.type.shape], -77, kinds[v.type.dtype]) for v in c.node.results]
    given = [np.ascontiguousarray(x, kinds[v.type.dtype]) for x, v in zip(c.inputs, c.graph.inputs, strict=True)]
    interpret(source, [torch.from_numpy(x) for x in [*given, *out]], [], [int(d) for d in source.grid])
    return out


class Step:
    """Rows with a mixture of parameters, in a device of a few more rows."""

    def __init__(self, rng: np.random.Generator, r: int, v: int, logits: np.ndarray | None = None):
        m = r + 3
        self.logits = rng.standard_normal((r, v)).astype(F32) * 3 if logits is None else logits
        self.rows, self.qlens = rng.permutation(m)[:r].astype(I32), rng.integers(1, 4, r).astype(I32)
        self.length = rng.integers(0, 30, m).astype(I32)
        self.history = rng.integers(0, v, (m, 33)).astype(I32)
        self.f, self.i = np.zeros((m, 8), F32), np.zeros((m, 8), I32)
        self.f[:, 0] = rng.choice([0.0, 0.4, 1.0, 2.5], m)
        self.f[:, 1] = rng.choice([1.0, 0.9, 0.3, 1e-6], m)
        self.f[:, 2] = rng.choice([0.0, 0.0, 0.02, 0.5, 1.0], m)
        self.f[:, 3] = rng.choice([1.0, 1.0, 1.3], m)
        self.f[:, 4:6] = rng.choice([0.0, 0.0, 0.7, -0.4], (m, 2))
        self.i[:, 0] = rng.choice([0, 1, 7, 40, v, v + 9], m)
        self.i[:, 1:3] = rng.integers(-(2**31), 2**31, (m, 2))
        self.i[:, 3], self.i[:, 4] = rng.choice([0, 0, 0, 33], m), rng.integers(0, 40, m)
        self.i[:, 5], self.i[:, 6], self.i[:, 7] = (
            rng.integers(0, 2, m),
            rng.choice([0, 5, 11], m),
            rng.integers(0, 5, m),  # bitmaps of a row; there is room for 3
        )
        self.bias_ids = np.stack([np.sort(rng.permutation(v)[:11]) for _ in range(m)]).astype(I32)
        self.biases = rng.choice([-100.0, -2.5, 0.5, 3.0], (m, 11)).astype(F32)
        self.allowed = rng.integers(-(2**31), 2**31, (m, 3 * -(-v // 32))).astype(I32)
        self.stops = np.full((m, 32), -1, I32)
        self.stops[:, :3] = rng.integers(-1, v, (m, 3))
        self.seen = rng.integers(-(2**31), 2**31, (m, -(-v // 32))).astype(I32)
        self.counts = (rng.integers(0, 3, (m, v)) * (rng.random((m, v)) < 0.1)).astype(I32)

    def blocks(self) -> list[Any]:
        """Operands of row_block_max."""
        states = [self.f, self.i, self.stops, self.seen, self.counts, self.bias_ids, self.biases, self.allowed]
        return [self.logits, *self.where(), *states]

    def where(self) -> list[Any]:
        """rows, starts and positions, as row_spans lays them out."""
        self.qlens[self.rows < 0] = 0
        tokens = int(self.qlens.sum()) + 1
        starts, _, positions = OPS["row_spans"].ref(self.rows, self.qlens, self.length, tokens=tokens)
        return [self.rows, starts, positions]

    def plain(self, x: np.ndarray) -> list[Any]:
        """Operands of row_sample."""
        return [x, *self.where(), self.history, self.f, self.i]

    def penalties(self) -> list[Any]:
        """Operands of row_penalize."""
        return [self.logits, self.rows, self.f, self.i, self.seen, self.counts, self.bias_ids, self.biases]

    def unaltered(self) -> None:
        """Rows draw from the raw logits, and none of them is inside its prompt."""
        self.f[:, 3:6], self.i[:, 3:5], self.i[:, 6:] = [1.0, 0.0, 0.0], 0, 0

    def masked(self) -> np.ndarray:
        """The logits that are drawn from, by the references."""
        x = OPS["row_penalize"].ref(*self.penalties())
        return OPS["row_mask"].ref(x, *self.where(), self.i, self.stops, self.allowed)

    def check(self, got: np.ndarray, x: np.ndarray) -> None:
        """Every id is the reference's, or its score is the largest one up to rounding."""
        want = OPS["row_sample"].ref(*self.plain(x))
        for n in np.nonzero(got != want)[0]:
            row, id = self.rows[n], int(got[n])
            end = int(self.length[row] + self.qlens[n])
            assert row >= 0 and self.f[row, 0] > 0 and end >= self.i[row, 3], f"row {n}: {id}, not {want[n]}"
            p, mask = kept(x[n], self.f[row], int(self.i[row, 0]))
            scores = np.where(mask, p / row_exponentials(self.i[row], end, len(p)), 0)
            assert scores[id] >= scores[want[n]] * (1 - 1e-4), f"row {n}: {id}, not {want[n]}"


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("op", KERNELS)
def test_examples(op: str, dtype: str) -> None:
    arrays, attrs = op_example(OPS[op], generator())
    run_case(case(op, arrays, attrs, {}, dtype))


def test_exponential_random_variables_equal_the_reference() -> None:
    rng = generator()
    n, draws = 512, 8
    functions = "\n\n\n".join(Template("sampling_math", name).text() for name in ("draw_key", "exponential"))
    text = (
        f"import triton\nimport triton.language as tl\n\n\n{functions}\n\n\n"
        "@triton.jit\ndef entry(lo, hi, at, ids, y):\n"
        f"    d, i = tl.program_id(0), tl.arange(0, {n})\n"
        "    key = draw_key(tl.load(lo + d), tl.load(hi + d), tl.load(at + d))\n"
        f"    tl.store(y + d * {n} + i, exponential(key, tl.load(ids + i)))\n"
    )
    lo, hi = rng.integers(-(2**31), 2**31, (2, draws)).astype(I32)
    hi[:4], lo[:4] = [-1, -(2**31), 2**31 - 1, 0], [-1, 0, -1, 0]
    at, ids = (rng.integers(0, 2**31, k).astype(I32) for k in (draws, n))
    got = np.zeros((draws, n), F32)
    with interpreting():
        load_entry(text, "entry")[(draws,)](*(torch.from_numpy(x) for x in (lo, hi, at, ids, got)))
    seeds = [int(a) & 0xFFFFFFFF | (int(b) & 0xFFFFFFFF) << 32 for a, b in zip(lo, hi)]
    want = np.array([exponentials(seed, int(p), ids) for seed, p in zip(seeds, at)])
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_penalties(dtype: str) -> None:
    rng = generator()
    s = Step(rng, 5, 700)
    s.rows[3] = -1
    run_case(case("row_penalize", s.penalties(), {}, {"block": 256, "warps": 4}, dtype))


def test_stop_ids_and_allowed_ids() -> None:
    rng = generator()
    s = Step(rng, 6, 5000)
    s.rows[3] = -1
    run_case(case("row_mask", [s.logits, *s.where(), s.i, s.stops, s.allowed], {}, {}))


@pytest.mark.parametrize("per", [1, 4])
@pytest.mark.parametrize("v", [41, 700, 2100])
def test_block_maxima(v: int, per: int) -> None:
    rng = generator()
    s = Step(rng, 5, v, np.round(rng.standard_normal((5, v)) * 4).astype(F32))
    s.rows[2] = -1
    s.f[:, 3:6] = [1.0, 0.0, 0.0]
    s.f[s.rows[0], 3:6] = [1.25, 0.5, 0.25]  # exact in float32
    s.i[s.rows[0], 6:], s.i[s.rows[1], 6:] = [11, 1], [5, 0]
    run_case(case("row_block_max", s.blocks(), {"block": 128}, {"per": per, "warps": 4}))


def drawn(s: Step, block: int = 128) -> np.ndarray:
    """Ids by both kernels of the split op."""
    found = results(case("row_block_max", s.blocks(), {"block": block}, {"per": 1, "warps": 4}))
    return results(case("row_sample_blocks", [*s.blocks(), s.history, *found], {"block": block}, SMALL))[0]


@pytest.mark.parametrize(("v", "kind"), [(41, "normal"), (600, "normal"), (600, "ties")])
def test_mixtures_of_parameters(v: int, kind: str) -> None:
    """Both ways to draw, penalised and masked rows among others, padding."""
    rng = generator()
    s = Step(rng, 8, v)
    if kind == "ties":
        s.logits = np.round(s.logits)
    s.rows[[3, 6]] = -1
    x = s.masked()
    s.check(results(case("row_sample", s.plain(x), {}, SMALL))[0], x)
    s.check(drawn(s), x)


@pytest.mark.parametrize("kind", ["flat", "spiked", "few", "wide"])
def test_odd_rows(kind: str) -> None:
    rng = generator()
    logits = rng.standard_normal((8, 300)).astype(F32) * 3
    if kind == "flat":
        logits[:] = -1.5
    elif kind == "spiked":
        logits[:, 5], logits[:, 17] = 60.0, -np.inf
    elif kind == "few":
        logits[:, 3:] = -np.inf
    else:
        logits[:, ::2] -= 1e30
    s = Step(rng, 8, 300, logits)
    s.unaltered()
    s.check(results(case("row_sample", s.plain(logits), {}, SMALL))[0], logits)
    s.check(drawn(s), logits)


def test_greedy_takes_the_lowest_of_equals_and_the_first_nan() -> None:
    logits = np.zeros((4, 700), F32)
    logits[0, [31, 300, 650]], logits[1, :], logits[2, [500, 20]] = 2.0, -np.inf, np.nan
    logits[3, :], logits[3, 100:] = -0.0, 0.0
    s = Step(generator(), 4, 700, logits)
    s.unaltered()
    s.f[:, 0] = 0.0
    assert drawn(s).tolist() == [31, 0, 20, 0]
    assert results(case("row_sample", s.plain(logits), {}, SMALL))[0].tolist() == [31, 0, 20, 0]


def test_rows_without_penalties_read_neither_counts_nor_seen() -> None:
    """Their states may hold anything: poison that would change every logit changes nothing."""
    rng = generator()
    s = Step(rng, 4, 300)
    s.unaltered()
    s.f[:, 0] = 0.0
    s.counts[:], s.seen[:], s.allowed[:] = 1 << 30, -1, 0
    s.bias_ids[:], s.biases[:] = np.arange(11), np.inf
    assert drawn(s).tolist() == s.logits.argmax(-1).tolist()


def test_one_allowed_id_is_drawn_whatever_the_filters() -> None:
    """Fewer ids than top_k keeps, masses of zero everywhere else."""
    rng = generator()
    s = Step(rng, 8, 600)
    s.unaltered()
    ids = rng.integers(0, 600, 8)
    s.i[:, 7], s.allowed[:] = 1, 0
    s.allowed[s.rows, ids // 32] = (1 << (ids % 32).astype(np.uint32)).astype(np.uint32).view(I32)
    assert drawn(s).tolist() == ids.tolist()
    x = s.masked()
    assert results(case("row_sample", s.plain(x), {}, SMALL))[0].tolist() == ids.tolist()


def test_inside_its_prompt_a_row_gives_the_prompts_next_id() -> None:
    rng = generator()
    s = Step(rng, 6, 300)
    s.i[:, 3] = 33
    s.length[:] = rng.integers(0, 29, len(s.length))
    want = s.history[s.rows, s.length[s.rows] + s.qlens].tolist()
    assert drawn(s).tolist() == want
    assert results(case("row_sample", s.plain(s.masked()), {}, SMALL))[0].tolist() == want


@pytest.mark.parametrize(("top_p", "min_p", "top_k"), some(FILTERS))
def test_the_draw_has_the_distribution_of_what_is_kept(top_p: float, min_p: float, top_k: int) -> None:
    """Pearson's chi-square of the reference over consecutive seeds, which the kernel's ids are those of."""
    n, v = 2000, 11
    row = np.random.default_rng(5).standard_normal(v).astype(F32) * 1.5
    s = Step(np.random.default_rng(6), n, v, np.tile(row, (n, 1)))
    s.unaltered()
    s.f[:, :6], s.i[:, :5] = [0.9, top_p, min_p, 1.0, 0.0, 0.0], [top_k, 0, 0, 0, 0]
    s.i[:, 1] = np.arange(len(s.i)) + 1000
    p, mask = kept(row, s.f[0], top_k)
    expected = np.where(mask, p, 0) / p[mask].sum() * n
    ids = OPS["row_sample"].ref(*s.plain(s.logits))
    counts = np.bincount(ids, minlength=v)
    assert not counts[~mask].any()
    big = mask & (expected >= 5)
    chi = float(((counts - expected)[big] ** 2 / expected[big]).sum())
    freedom = max(1, int(big.sum()) - 1)
    assert chi < freedom + 4.3 * np.sqrt(2 * freedom) + 9, f"chi-square {chi} of {freedom}"
    s.rows, s.qlens, s.logits = s.rows[:24], s.qlens[:24], s.logits[:24]
    assert (drawn(s, 16) == ids[:24]).all()


@pytest.mark.parametrize(("v", "dtype"), [(41, "f32"), (700, "bf16"), (5000, "f16")])
def test_logprobs(v: int, dtype: str) -> None:
    rng = generator()
    s = Step(rng, 6, v)
    s.rows[4], s.i[s.rows[:4], 5] = -1, [1, 0, 1, 1]
    ids = rng.integers(0, v, 6).astype(I32)
    ids[0] = s.logits[0].argmax()
    run_case(case("row_logprobs", [s.logits, ids, s.rows, s.i], {"k": 20}, SMALL, dtype))
    run_case(case("row_logprobs", [s.logits, ids], {"k": 7}, SMALL, dtype))


def test_finish() -> None:
    """Greedy rows, so that ids are exact: log-probabilities where wanted, full rows, rows that do not emit, padding."""
    rng = generator()
    s = Step(rng, 7, 700)
    s.f[:, 0], s.rows[5], s.rows[4] = 0.0, -1, s.rows[3]
    s.i[s.rows[:5], 5] = [1, 0, 1, 0, 1]
    emit = np.array([1, 1, 0, 0, 1, 1, 0], I32)
    s.length[s.rows[1]], s.qlens[1] = 32, 1
    s.length[s.rows[3]] = 7
    found = [x.astype(d) for x, d in zip(OPS["row_block_max"].ref(*s.blocks(), block=128), (F32, I32, F32))]
    operands = [*s.blocks(), s.history, *found, s.length, emit]
    run_case(case("row_finish", operands, {"block": 128, "k": 20}, SMALL))
