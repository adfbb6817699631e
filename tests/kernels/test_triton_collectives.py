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

from llmc.codegen.backends.triton.collectives import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_NORM
from llmc.ir.dtype import DTYPES
from llmc.targets.gpu_targets import gfx942, sm_90
from llmc.testing.triton_interpreter import INTERPRETED

PATIENT = 1 << 20  # reads
WIDTHS = (1, 3, 8, 13, 64, 136, 1000)


def drawn(rng: Random, ranks: int) -> Launch:
    """A random collective."""
    rows, width, programs = rng.choice((1, 2, 5)), rng.choice(WIDTHS), rng.choice((1, 2, 3))
    kind, sizes = rng.choice(("sum", "sum", "norm", "norm", "gather")), {"T": rows}
    if kind == "gather":
        t, axis = rng.choice(("bf16", "f32", "i32", "i8", "i64")), rng.choice((0, 1))
        shape = f"[{ranks}*T, {width}]" if axis == 0 else f"[T, {ranks * width}]"
        text = Text(f"{t}[T, {width}]", f"all_gather {{axis={axis}, ranks={ranks}}}", f"{t}{shape}")
        return Launch(ALL_GATHER, text, {"warps": rng.choice((1, 2))}, sizes, programs)
    t = rng.choice(("bf16", "f16", "f32"))
    x = f"{t}[T, {width}]"
    more = f"; {x}" if rng.random() < 0.6 else ""
    if kind == "norm":
        gain = f"{rng.choice((t, 'f32'))}[{width}]"
        text = Text(f"{x}; {gain}{more}", f"all_reduce_norm {{eps=1e-05, ranks={ranks}}}", f"{x}, {x}")
        (node,) = text.graph().nodes
        schedule = rng.choice(ALL_REDUCE_NORM.schedules(node, INTERPRETED))
        return Launch(ALL_REDUCE_NORM, text, schedule, sizes, programs)
    text = Text(f"{x}{more}", f"all_reduce{'_add' if more else ''} {{ranks={ranks}}}", x)
    schedule = {"warps": rng.choice((1, 2)), "parts": rng.choice((1, ranks))}
    return Launch(ALL_REDUCE, text, schedule, sizes, programs)


def arrays(launch: Launch, seed: int, ranks: int) -> list[list[np.ndarray]]:
    """The operands of every rank, in their dtypes: the first one differs."""
    out = [draw(launch, 0, np.random.default_rng([seed, rank])) for rank in range(ranks)]
    same = np.random.default_rng([seed, ranks])
    whole = [draw(launch, i, same) for i in range(1, len(launch.operands))]
    return [[x, *whole] for x in out]


def draw(launch: Launch, i: int, rng: np.random.Generator) -> np.ndarray:
    t = DTYPES[launch.operands[i].dtype]
    if t.kind == "f":
        return rng.standard_normal(launch.shapes[i]).astype(t.np)
    return rng.integers(-1, 3, launch.shapes[i]).astype(t.np)  # -1: all bits are set


def check(launch: Launch, got: list[np.ndarray], every: list[list[np.ndarray]], what: str) -> None:
    """Compare with the op's reference. Sums of floats are in float32 in the ranks' order, so they must be equal up to
    the interpreter's rounding: it truncates floats to bfloat16. Norms add their squares in another order.
    """
    exact = launch.node.op.name != "all_reduce_norm"
    compute = np.float32 if exact else np.float64
    real = DTYPES[launch.operands[0].dtype].kind == "f"
    every = [[x.astype(compute) if real else x for x in own] for own in every]
    want = launch.node.op.ref(*(own[0] for own in every), *every[0][1:], **launch.node.attrs)
    for y, exactly in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        unit = {"bf16": 2.0**-7, "f16": 2.0**-10, "f32": 2e-6}.get(launch.results[0].dtype, 0)
        unit = unit if not exact or y.dtype == DTYPES["bf16"].np else 0
        np.testing.assert_allclose(
            y.astype(np.float64),
            exactly.astype(y.dtype).astype(np.float64),
            rtol=unit,
            atol=unit and max(unit / 64, 1e-6),
            err_msg=what,
        )


@pytest.mark.parametrize("ranks", (2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))))
def test_ranks_have_equal_bits_over_many_launches(ranks: int) -> None:
    """Ranks are late by turns; slots are used again and again, within a launch and by the next ones."""
    seed = of_test()
    rng = Random(seed)
    work = [drawn(rng, ranks) for _ in range(12)]
    places = [dict(allowed(w, rng)) if rng.random() < 0.5 else {} for w in work]
    memories = group_memories(ranks, PATIENT)

    def run(rank: int) -> list[bytes]:
        late, outs = Random(seed + rank), []
        for i, (launch, inplace) in enumerate(zip(work, places, strict=True)):
            time.sleep(late.choice((0, 0, 0.02, 0.3)))
            every = arrays(launch, seed % 1000 + i, ranks)
            got = launch.run(every[rank], memories, rank, inplace)
            check(launch, got, every, f"{i}, seed {seed}: {launch.source.text[:200]}")
            outs += [y.tobytes() for y in got]
        return outs

    first, *others = run_ranks(ranks, run)
    assert all(outs == first for outs in others)
    assert not any(map(has_ended, memories))


def allowed(launch: Launch, rng: Random) -> list[tuple[int, int]]:
    """Results with the operands whose memory they may share, all of them different."""
    pairs = [(r, i) for i, r in launch.kernel.inplace(launch.node, launch.schedule)]
    rng.shuffle(pairs)
    out: dict[int, int] = {}
    for r, i in pairs:
        if r not in out and i not in out.values():
            out[r] = i
    return list(out.items())


def test_words_that_mean_empty_are_sent_as_nan() -> None:
    text = Text("bf16[T, 64]", "all_reduce {ranks=2}", "bf16[T, 64]")
    launch = Launch(ALL_REDUCE, text, {"warps": 1, "parts": 1}, {"T": 1}, 1)
    memories = group_memories(2, PATIENT)
    x = np.full((1, 64), -1, np.int16).view(DTYPES["bf16"].np)
    outs = run_ranks(2, lambda rank: launch.run([x], memories, rank)[0].astype(np.float32))
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
        x = np.ones((4, 64), np.float32)
        launch.run([x], memories, rank)
        return launch.run([x], memories, rank)[0]

    outs = run_ranks(3, run)
    assert [has_ended(m) for m in memories] == [True, False, True]
    assert is_poisoned(outs[0]) and is_poisoned(outs[2])


def test_rejected_nodes() -> None:
    (node,) = Text("f32[T, 64]", "all_reduce {ranks=2}", "f32[T, 64]").graph().nodes
    assert "AMD" in str(ALL_REDUCE.reject(node, gfx942()))
    (node,) = Text("f32[T, 64]", "all_reduce {ranks=1}", "f32[T, 64]").graph().nodes
    assert "2 to 64" in str(ALL_REDUCE.reject(node, sm_90()))
    (node,) = Text("f32[T, 64]", "all_gather {axis=1, ranks=65}", "f32[T, 4160]").graph().nodes
    assert "2 to 64" in str(ALL_GATHER.reject(node, sm_90()))
    for width, fits in ((8192, True), (8200, False), (1023, True), (1025, False)):
        call, types = "all_reduce_norm {eps=1e-05, ranks=2}", f"bf16[T, {width}]; bf16[{width}]"
        (node,) = Text(types, call, f"bf16[T, {width}], bf16[T, {width}]").graph().nodes
        why = ALL_REDUCE_NORM.reject(node, sm_90())
        assert why is None if fits else "lanes" in str(why)


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
