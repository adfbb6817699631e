"""Attention from a QKV product in Triton beside the reference: norms, rotations, appends, groups, pools, parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.harness import Case
from kernels.test_triton_attention import ATOL, F8, Paged, drawn
from kernels.triton_harness import INTERPRETED, ONE_TARGET, TARGETS, compile_for, run_case

from llmc.codegen.backends.triton.rope_attention import ROPE_ATTENTION
from llmc.codegen.kernel import SETTLED
from llmc.ir.dim import D
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import Type
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn


def case(
    p: Paged, rng: np.random.Generator, schedule: int = 0, splits: int = 0, pairs: int | None = None,
    normed: bool = False, interleaved: bool = False, on: Target = INTERPRETED,
) -> Case:  # fmt: skip
    """One token of each row. pairs: rotated pairs of a head (half of it if None, 0: no rotation).

    The token's own slot is NaN, as nothing may read it from the pool; its page exists.
    """
    h, g, d = p.shape
    _, kv, table, rows, _, positions, *scales = p.inputs(rng)
    rows = np.concatenate([rows, np.full(p.behind, -1, np.int32)])
    for row, position in zip(rows, positions, strict=True):
        if row >= 0:
            kv[table[row, position // p.page], :, :, position % p.page] = np.nan
    count = len(rows)
    arrays: dict[str, Any] = {"x": rng.standard_normal((count, (h + 2 * g) * d)), "kv": kv, "pages": table}
    arrays |= {"rows": rows, "positions": positions}
    if p.pool == F8:
        arrays["scales"] = scales[0]
    pairs = d // 2 if pairs is None else pairs
    if pairs:
        angle = rng.uniform(0, 7, (count, pairs))
        arrays |= {"cos": np.cos(angle), "sin": np.sin(angle)}
    if normed:
        arrays |= {"qw": rng.uniform(0.5, 1.5, d), "kw": rng.uniform(0.5, 1.5, d)}
    attrs = {"heads": h, "dtype": p.dtype, "scale": d**-0.5, "eps": 1e-5, "interleaved": interleaved, **p.attrs}
    op = OPS["rope_attention_split" if splits else "rope_attention"]
    graph, held = Graph("main"), []
    slots = {s.name: s for s in op.operands}
    for name, x in arrays.items():
        slot = slots[name]
        dtype = "i32" if x.dtype.kind == "i" else slot.dtype if slot.dtype == "f32" else p.dtype
        dtype = (p.pool or p.dtype) if name == "kv" else dtype
        first = (
            D("T") if p.dynamic and len(x) == count and name not in ("kv", "pages", "qw", "kw", "scales") else D(len(x))
        )
        graph.input(name, Type(dtype, (first, *map(D, x.shape[1:])), slot.state))
        held.append(x if x.dtype.kind == "i" else x.astype(np.float32))
    graph.outputs = list(graph.add(op, graph.inputs, attrs | ({"splits": splits} if splits else {})).results)
    (node,) = graph.nodes
    ways = ROPE_ATTENTION.schedules(node, on)
    way = ways[schedule % len(ways)]
    atol = max(ATOL[p.dtype], ATOL[p.pool or p.dtype])
    if p.pool == F8:  # a rotation that is rounded the other way may have the neighbouring code
        atol = ATOL["bf16"]
    rtol = 2e-5 if p.dtype == "f32" else 2.0**-7  # a norm and a rotation are rounded in turn
    name = f"{op.name}-{p}-{pairs}-{normed}-{interleaved}-{way}"
    return Case(name, graph, ROPE_ATTENTION, way, held, rtol=rtol, atol=atol)


def options(rng: np.random.Generator, p: Paged) -> dict[str, Any]:
    """Rotations of all pairs, of some and of none; norms, which only rotated heads have; adjacent pairs."""
    half = p.shape[2] // 2
    pairs = [half, half, half // 2, 0][rng.integers(4)]
    return {
        "pairs": pairs, "normed": bool(pairs and rng.random() < 0.5),
        "interleaved": bool(rng.random() < 0.3),
    }  # fmt: skip


@pytest.mark.parametrize("splits", [0, 1, 2, 8])
def test_drawn_steps(splits: int) -> None:
    rng = generator()
    for _ in range(6):
        p = drawn(rng, True)
        p.sinks = False
        run_case(case(p, rng, int(rng.integers(12)), splits, **options(rng, p)))


@pytest.mark.parametrize("splits", [0, 4])
@pytest.mark.parametrize("pool", ["", F8])
def test_ends_of_pages_and_parts(splits: int, pool: str) -> None:
    """The own key is the first of a page, the last, the only one, alone in its part, and outside of a window of 1."""
    rng = generator()
    spans = [(1, n) for n in (1, 2, 16, 17, 33, 64, 65, 129)]
    for attrs in ({}, {"window": 1}, {"window": 16}):
        run_case(case(Paged((8, 2, 64), [*spans, None], pool=pool, attrs=attrs, behind=2), rng, 3, splits))


def test_every_schedule() -> None:
    rng = generator()
    p = Paged((8, 2, 128), [(1, 300), (1, 5)], dtype="bf16")
    for i in range(len(ROPE_ATTENTION.schedules(case(p, rng).node, INTERPRETED))):
        run_case(case(p, rng, i, 2, normed=True))


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_binaries(target: Target, tmp_path: Any) -> None:
    """With tables that are settled, and of a pool of 8-bit floats where the target has them."""
    rng = generator()
    for pool in ("", F8):
        one = case(Paged((8, 2, 128), [(1, 40)], dtype="bf16", pool=pool), rng, 1, 4, normed=True, on=target)
        one.schedule = {**one.schedule, SETTLED: 1}
        if pool and ROPE_ATTENTION.reject(one.node, target):
            assert "no instructions for f8e4m3" in str(ROPE_ATTENTION.reject(one.node, target))
            continue
        assert compile_for(one, target, tmp_path).binary


def test_what_is_refused() -> None:
    node = case(Paged((4, 2, 64), [(1, 3)]), generator()).node
    node.operands[0].type = Type("i8", node.operands[0].type.shape)
    for target in TARGETS:
        assert ROPE_ATTENTION.reject(node, target)
