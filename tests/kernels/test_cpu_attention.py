"""Paged attention on all four CPU levels compared with the reference: ragged spans, shuffled pages, grouped heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from kernels.harness import Case, compile_cases, run_case
from kernels.test_cpu_linear import LEVELS, target_here

from llmc.codegen.backends.cpp.attention import ALIBI_ATTENTION, ATTENTION
from llmc.codegen.backends.cpp.cpp_kernel import CppKernel
from llmc.extension import load
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.types import state, tensor

pytestmark = pytest.mark.drawn
PAGES, TABLE, ROWS = 40, 11, 6  # pages of the pool and of a row, device rows


@dataclass(frozen=True)
class Shape:
    """One attention node: storage, heads, and its attributes."""

    name: str
    q: str
    kv: str
    h: int
    g: int
    d: int
    page: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    change: tuple[tuple[str, int], ...] = ()
    alibi: bool = False


SHAPES = (
    Shape("qwen", "bf16", "bf16", 14, 2, 64),
    Shape("small-blocks", "bf16", "bf16", 4, 4, 40, 16, 0, 0.0, False, (("br", 24), ("kt", 32))),
    Shape("odd", "bf16", "bf16", 6, 2, 33, 5),
    Shape("window", "bf16", "bf16", 8, 1, 72, 8, 19, 0.0, False, (("kt", 32),)),
    Shape("softcap", "f32", "f32", 4, 2, 48, 16, 0, 3.0, True),
    Shape("mixed", "f32", "bf16", 3, 3, 17, 7, 40, 0.0, True, (("br", 48),)),
    Shape("wide", "bf16", "f32", 2, 1, 130, 16),
    Shape("sinks", "bf16", "bf16", 8, 2, 128, 16, 33, 2.0, True),
    Shape("widest", "bf16", "bf16", 4, 1, 512),
    Shape("alibi", "bf16", "bf16", 6, 6, 80, alibi=True),
    Shape("alibi-groups", "f32", "f32", 6, 2, 33, 5, 0, 0.0, False, (("br", 24), ("kt", 32)), True),
)
# (row, tokens already there, tokens of the step) of each entry; -1 is a padding row. Drafts are verified by adjacent
# entries of one row
STEPS = (
    ((0, 0, 1),),
    ((3, 150, 1), (1, 0, 1), (2, 63, 1), (5, 31, 1)),
    ((4, 0, 97),),
    ((2, 40, 61), (0, 99, 1), (-1, 0, 3), (1, 0, 17), (5, 7, 2)),
    ((2, 29, 1), (2, 30, 1), (2, 31, 1), (2, 32, 1), (2, 33, 1), (0, 0, 1), (0, 1, 1), (-1, 0, 1), (-1, 0, 1)),
    ((4, 0, 1), (4, 1, 70), (4, 71, 1), (3, 5, 1), (1, 18, 1), (1, 19, 1)),
)


def build(s: Shape) -> Graph:
    g = Graph("test")
    operands = [
        g.input("q", tensor(s.q, "T", s.h, s.d)),
        g.input("kv", state(s.kv, PAGES, 2, s.g, s.page, s.d)),
        g.input("pages", state("i32", ROWS, "M")),
        g.input("rows", tensor("i32", "R")),
        g.input("starts", tensor("i32", "R+1")),
        g.input("positions", tensor("i32", "T")),
    ]
    if s.sinks or s.alibi:
        operands.append(g.input("slopes" if s.alibi else "sinks", tensor("f32", s.h)))
    scale = {"scale": s.d**-0.5 * 1.5}
    attrs = scale if s.alibi else scale | {"window": s.window, "softcap": s.softcap}
    g.outputs = [g.add(OPS[kernel_of(s).ops[0]], operands, attrs).result]
    return g


def kernel_of(s: Shape) -> CppKernel:
    return ALIBI_ATTENTION if s.alibi else ATTENTION


def draw(s: Shape, step: Sequence[tuple[int, int, int]], pad: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Inputs of a step; the pool is NaN wherever no token of a row lies, and every row's pages are scattered."""
    spans = [n for _, _, n in step]
    total = sum(spans) + pad
    kv = np.full((PAGES, 2, s.g, s.page, s.d), np.nan, np.float32)
    free = list(rng.permutation(PAGES))
    pages = np.full((ROWS, PAGES), -7, np.int32)
    positions = np.full(total, -1, np.int32)
    starts = np.concatenate([[0], np.cumsum(spans)]).astype(np.int32)
    for (row, held, n), at in zip(step, starts, strict=False):
        if row < 0:
            continue
        positions[at : at + n] = held + np.arange(n)
        need = -(-(held + n) // s.page)
        held_pages = int((pages[row] >= 0).sum())  # by an earlier entry of the row
        pages[row, held_pages:need] = [free.pop() for _ in range(need - held_pages)]
        for t in range(held + n):
            kv[pages[row, t // s.page], :, :, t % s.page] = rng.standard_normal((2, s.g, s.d))
    out = [rng.standard_normal((total, s.h, s.d)).astype(np.float32), kv, pages]
    out += [np.array([row for row, _, _ in step], np.int32), starts, positions]
    if s.alibi:
        return [*out, 2.0 ** rng.uniform(-8, 0, s.h).astype(np.float32)]
    return out + ([rng.standard_normal(s.h).astype(np.float32) * 2] if s.sinks else [])


@pytest.mark.parametrize("s", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("level", LEVELS)
def test_attention_agrees_with_the_reference(level: str, s: Shape, tmp_path: Path) -> None:
    target, kernel = target_here(level), kernel_of(s)
    g = build(s)
    (node,) = g.nodes
    assert kernel.reject(node, target) is None
    schedule = kernel.schedules(node, target)[0] | dict(s.change)
    low = "bf16" in (s.q, s.kv)  # weights of the sum are rounded to bf16 as well
    case = Case(s.name, g, kernel, schedule, [], atol=2e-2 if low else 2e-5)
    compiled = compile_cases([case], target, tmp_path)[s.name]
    for i, step in enumerate(STEPS):
        fits = [(r, min(held, s.page * 9 - n), n) for r, held, n in step if n <= s.page * 9]
        while sum(-(-(held + n) // s.page) for _, held, n in fits) > PAGES:
            fits = fits[1:]
        inputs = draw(s, fits, i, np.random.default_rng(i))
        for threads in (1, 3):
            run_case(replace(case, inputs=inputs), *compiled, threads)


def test_rejected_nodes() -> None:
    target = load().target("cpu:x86-64-v3")
    (node,) = build(replace(SHAPES[0], h=15)).nodes
    assert "not a multiple" in str(ATTENTION.reject(node, target))
    (node,) = build(replace(SHAPES[0], d=513)).nodes
    assert "above 512" in str(ATTENTION.reject(node, target))
