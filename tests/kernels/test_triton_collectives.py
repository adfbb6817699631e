"""Triton collectives in the interpreter, a process per rank: the same protocol as on GPUs, except memory ordering."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import pytest
from draw import of_test
from kernels.cases import Text
from kernels.rank_processes import Launch, group_memories, has_ended, is_poisoned, run_ranks

from llmc.codegen.backends.triton.collectives import ALL_GATHER, ALL_REDUCE
from llmc.ir.dtype import DTYPES
from llmc.targets.gpu_targets import gfx942, sm_90

PATIENT = 1 << 20  # reads
WIDTHS = (1, 3, 8, 13, 64, 136, 1000)


def drawn(rng: Random, ranks: int) -> tuple[Launch, bool]:
    """A random collective, and whether it is an all_reduce."""
    rows, width, programs = rng.choice((1, 2, 5)), rng.choice(WIDTHS), rng.choice((1, 2, 3))
    if rng.random() < 0.6:
        t = rng.choice(("bf16", "f16", "f32"))
        text = Text(f"{t}[T, {width}]", f"all_reduce {{ranks={ranks}}}", f"{t}[T, {width}]")
        schedule = {"warps": rng.choice((1, 2)), "parts": rng.choice((1, ranks))}
        return Launch(ALL_REDUCE, text, schedule, {"T": rows}, programs), True
    t, axis = rng.choice(("bf16", "f32", "i32", "i8", "i64")), rng.choice((0, 1))
    shape = f"[{ranks}*T, {width}]" if axis == 0 else f"[T, {ranks * width}]"
    text = Text(f"{t}[T, {width}]", f"all_gather {{axis={axis}, ranks={ranks}}}", f"{t}{shape}")
    return Launch(ALL_GATHER, text, {"warps": rng.choice((1, 2))}, {"T": rows}, programs), False


def operand(launch: Launch, seed: int, rank: int) -> np.ndarray:
    """The operand of a rank, in its dtype."""
    t = launch.types[0]
    rng = np.random.default_rng([seed, rank])
    if DTYPES[t.dtype].kind == "f":
        return rng.standard_normal(launch.shapes[0]).astype(DTYPES[t.dtype].np)
    return rng.integers(-1, 3, launch.shapes[0]).astype(DTYPES[t.dtype].np)  # -1: all bits are set


def expected(launch: Launch, reduces: bool, xs: list[np.ndarray]) -> np.ndarray:
    """The result on every rank: float32 sums in the order of the ranks, or all operands in a row."""
    if not reduces:
        return np.concatenate(xs, axis=0 if launch.shapes[1][0] != launch.shapes[0][0] else 1)
    total = xs[0].astype(np.float32)
    for x in xs[1:]:
        total = total + x.astype(np.float32)
    return total.astype(xs[0].dtype)


def check(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Compare exactly, except that the interpreter truncates floats to bfloat16 instead of rounding."""
    unit = 2.0**-7 if got.dtype == DTYPES["bf16"].np else 0
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=unit, atol=0, err_msg=what)


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_ranks_have_equal_bits_over_many_launches(ranks: int) -> None:
    """Ranks are late by turns; slots are used again and again, within a launch and by the next ones."""
    seed = of_test()
    rng = Random(seed)
    work = [(*drawn(rng, ranks), rng.random() < 0.5) for _ in range(10)]
    memories = group_memories(ranks, PATIENT)

    def run(rank: int) -> list[bytes]:
        late, outs = Random(seed + rank), []
        for i, (launch, reduces, inplace) in enumerate(work):
            time.sleep(late.choice((0, 0, 0.02)))
            xs = [operand(launch, seed % 1000 + i, r) for r in range(ranks)]
            got = launch.run(xs[rank], memories[rank], inplace and reduces)
            check(got, expected(launch, reduces, xs), f"{i}: {launch.source.text[:200]}")
            outs.append(got.tobytes())
        return outs

    first, *others = run_ranks(ranks, run)
    assert all(outs == first for outs in others)
    assert not any(map(has_ended, memories))


def test_words_that_mean_empty_are_sent_as_nan() -> None:
    text = Text("bf16[T, 64]", "all_reduce {ranks=2}", "bf16[T, 64]")
    launch = Launch(ALL_REDUCE, text, {"warps": 1, "parts": 1}, {"T": 1}, 1)
    memories = group_memories(2, PATIENT)
    x = np.full((1, 64), -1, np.int16).view(DTYPES["bf16"].np)
    outs = run_ranks(2, lambda rank: launch.run(x, memories[rank]).astype(np.float32))
    assert all(np.isnan(y).all() for y in outs)


@pytest.mark.parametrize("parts", (1, 3))
def test_a_rank_that_never_comes(parts: int) -> None:
    """The others give up after the limit, and later kernels do not wait at all."""
    text = Text("f32[T, 64]", "all_reduce {ranks=3}", "f32[T, 64]")
    launch = Launch(ALL_REDUCE, text, {"warps": 1, "parts": parts}, {"T": 4}, 2)
    memories = group_memories(3, 400)

    def run(rank: int) -> Any:
        if rank == 1:
            return None
        launch.run(np.ones((4, 64)), memories[rank])
        return launch.run(np.ones((4, 64)), memories[rank])

    outs = run_ranks(3, run)
    assert [has_ended(m) for m in memories] == [True, False, True]
    assert is_poisoned(outs[0]) and is_poisoned(outs[2])


def test_what_is_refused() -> None:
    (node,) = Text("f32[T, 64]", "all_reduce {ranks=2}", "f32[T, 64]").graph().nodes
    assert "AMD" in str(ALL_REDUCE.reject(node, gfx942()))
    (node,) = Text("f32[T, 64]", "all_reduce {ranks=1}", "f32[T, 64]").graph().nodes
    assert "2 to 64" in str(ALL_REDUCE.reject(node, sm_90()))
    (node,) = Text("f32[T, 64]", "all_gather {axis=1, ranks=65}", "f32[T, 4160]").graph().nodes
    assert "2 to 64" in str(ALL_GATHER.reject(node, sm_90()))


def test_large_sums_of_many_ranks_go_in_parts() -> None:
    """Few bytes are sent to all at once, many in parts; two ranks send the same bytes either way."""
    (node,) = Text("bf16[T, 4096]", "all_reduce {ranks=8}", "bf16[T, 4096]").graph().nodes
    target = sm_90()

    def best(tokens: int) -> int:
        found = ALL_REDUCE.schedules(node, target)
        return int(min(found, key=lambda s: ALL_REDUCE.cost_us(node, s, target, {"T": tokens}))["parts"])

    assert (best(1), best(2048)) == (1, 8)
    (pair,) = Text("bf16[T, 4096]", "all_reduce {ranks=2}", "bf16[T, 4096]").graph().nodes
    assert {s["parts"] for s in ALL_REDUCE.schedules(pair, target)} == {1}
