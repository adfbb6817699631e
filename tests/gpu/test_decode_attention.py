"""cuda/decode_attention on a GPU against the references of its ops, run as in test_kernels.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draw import generator
from gpu.launcher import Card
from gpu.test_cuda_kernels import check
from kernels.harness import Case
from kernels.test_triton_attention import ATOL, Paged

from llmc.codegen.backends.cuda.decode_attention import DECODE_ATTENTION, SINGLE, SPLIT, WHOLE
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.ir.dim import D
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import Type
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
MOST = 1500  # tokens of a row
SCHEDULES = 2  # of each variant, drawn
F8 = "f8e4m3"
# Query heads, key heads, elements of a head; tokens of a page; dtype of queries, and of the pool if it is another one;
# parts; attributes; sinks.
VARIANTS: tuple[tuple[tuple[int, int, int], int, str, int, dict[str, Any], bool], ...] = (
    ((32, 8, 128), 16, "bf16", 0, {}, False),
    ((32, 8, 128), 16, "bf16", 3, {"window": 1000}, False),
    ((16, 8, 128), 16, "bf16", 0, {"window": 100, "softcap": 3.0}, False),
    ((32, 4, 128), 32, "bf16", 2, {}, False),
    ((32, 8, 64), 16, "f16", 0, {"window": 17}, False),
    ((8, 2, 64), 64, "bf16", 7, {"softcap": 5.0}, False),
    ((16, 1, 64), 16, "bf16", 0, {"window": 128}, True),
    ((28, 4, 128), 16, "bf16", 0, {}, True),
    ((4, 4, 256), 16, "f16", 0, {}, False),
    ((12, 1, 192), 16, "bf16", 4, {}, False),
    ((32, 8, 128), 16, f"bf16 {F8}", 0, {}, False),
    ((32, 8, 128), 16, f"bf16 {F8}", 4, {"window": 300}, False),
    ((16, 1, 64), 32, f"f16 {F8}", 0, {"window": 77, "softcap": 4.0}, True),
    ((4, 2, 256), 16, f"f16 {F8}", 0, {}, False),
    ((28, 4, 128), 16, f"bf16 {F8}", 0, {}, True),
)


def lengths(rng: np.random.Generator) -> list[int]:
    """Draw the tokens of rows: around the sizes of pages and tiles, and some at random."""
    return [1, 15, 16, 17, 31, 33, 64, 127, 193, 640, MOST, *(int(n) for n in rng.integers(1, 900, 3))]


def case_of(step: Paged, op: str, rng: np.random.Generator, parts: int = 0) -> Case:
    """A step of an op, without a schedule. The pool has the pages that rows need, and another one."""
    arrays = step.inputs(rng)
    needed = arrays[2] >= 0
    order = rng.permutation(needed.sum() + 1)[:-1].astype(np.int32)
    pool = np.full((len(order) + 1, *arrays[1].shape[1:]), np.nan, np.float32)
    pool[order], arrays[2][needed] = arrays[1][arrays[2][needed]], order
    arrays[1] = pool
    single, names = op == SINGLE, ["q", "kv", "pages", "rows", "starts", "positions"]
    if parts:
        del arrays[4], names[4]
    if single:
        arrays.insert(6, rng.standard_normal(arrays[0].shape).astype(np.float32))
        names.append("y")
    names += ["scales"] * (step.pool == F8) + ["sinks"] * step.sinks
    t = D("T") if single else D("R")
    first = {"q": t, "y": t, "rows": D("R"), "starts": D("R") + 1, "positions": t, "kv": D("P")}
    g = Graph("main")
    for name, x in zip(names, arrays, strict=True):
        dtype = "i32" if x.dtype.kind == "i" else "f32" if name == "scales" else step.dtype
        dtype = step.pool if name == "kv" and step.pool else dtype
        shape = (first.get(name, D(len(x))), *map(D, x.shape[1:]))
        g.input(name, Type(dtype, shape, name in ("kv", "pages")))
    attrs = {"scale": step.shape[2] ** -0.5, **step.attrs, **({"splits": parts} if parts else {})}
    g.outputs = list(g.add(OPS[op], g.inputs, attrs).results)
    atol = ATOL["f16" if step.pool else step.dtype]  # factors are f16 if the pool has 8-bit floats
    return Case(f"{op}-{step}-{parts}", g, DECODE_ATTENTION, {}, arrays, rtol=2e-5, atol=atol)


def step_of(variant: tuple[Any, ...], spans: list[tuple[int, int] | None], rng: np.random.Generator) -> Paged:
    """The rows in any order."""
    shape, page, dtypes, _, attrs, sinks = variant
    dtype, _, pool = dtypes.partition(" ")
    ordered = [spans[i] for i in rng.permutation(len(spans))]
    return Paged(shape, ordered, page, dtype, pool, sinks, attrs)


def scheduled(case: Case, rng: np.random.Generator) -> Iterator[Case]:
    """Yield the case with some schedules, with and without inputs that are read before the wait."""
    assert DECODE_ATTENTION.reject(case.node, sm_90()) is None
    found = DECODE_ATTENTION.schedules(case.node, sm_90())
    for i, k in enumerate(rng.permutation(len(found))[:SCHEDULES]):
        schedule = {**found[k], **({READ_BEFORE_WAIT: 1} if i % 2 else {})}
        yield replace(case, schedule=schedule, name=f"{case.name} {schedule}")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_rows_of_one_token(variant: tuple[Any, ...], card: Card) -> None:
    rng, parts = generator(), variant[3]
    step = step_of(variant, [None, None, *((1, n) for n in lengths(rng))], rng)
    check(list(scheduled(case_of(step, SPLIT if parts else WHOLE, rng, parts), rng)), card)


def test_rows_without_a_token_and_with_several(card: Card) -> None:
    rng = generator()
    step = Paged((16, 4, 128), [(2, 40), (0, 20), (1, 333), (3, 3), (0, 16), (0, 9)], 16, "bf16")
    check(list(scheduled(case_of(step, WHOLE, rng), rng)), card)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v[3]], ids=str)
def test_single_tokens_beside_longer_rows(variant: tuple[Any, ...], card: Card) -> None:
    rng = generator()
    step = step_of(variant, [None, (70, 300), (5, 5), (0, 8), *((1, n) for n in lengths(rng))], rng)
    step.behind = int(rng.integers(0, 5))
    check(list(scheduled(case_of(step, SINGLE, rng), rng)), card)
