"""Latent attention in Triton compared with the reference: random steps, odd sizes, parts; and products of heads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from draw import generator, of_test
from kernels.cases import SIZES, Text
from kernels.harness import Case
from kernels.latent_cases import Shape, build, draw, steps
from kernels.triton_harness import INTERPRETED, ONE_TARGET, TARGETS, compile_for, ptx, run_case
from kernels.triton_order import memory_order

from llmc.codegen.backends.triton.latent_attention import LATENT_DECODE, LATENT_PREFILL
from llmc.codegen.backends.triton.matmul import HEAD_MATMUL
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
SHAPES = (
    Shape("lite", "bf16", "bf16", 16, 512, 64),
    Shape("heads-of-two-programs", "bf16", "bf16", 72, 32, 16),
    Shape("minicpm3", "f32", "f32", 40, 256, 32),
    Shape("odd", "f16", "f16", 5, 33, 7, 8),
    Shape("mixed", "f32", "bf16", 3, 17, 10, 4),
    Shape("rows-of-24-bytes", "bf16", "bf16", 4, 8, 4, 4),
)
# For GPUs.
WIDEST = (
    Shape("v3", "bf16", "bf16", 128, 512, 64),
    Shape("v3-ranks", "bf16", "bf16", 32, 512, 64),
    Shape("v3-long", "bf16", "bf16", 128, 512, 64, 64),
)
ATOL = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}
PRODUCTS = (
    Text("bf16[T, 3, 33]; bf16[3, 33, 41]", "head_matmul", "bf16[T, 3, 41]"),
    Text("f32[5, 2, 17]; f32[2, 17, 70]", "head_matmul", "f32[5, 2, 70]"),
    Text("bf16[R, 4, 128]; bf16[4, 128, 512]", "head_matmul", "bf16[R, 4, 512]"),
)


def cases(s: Shape, rng: np.random.Generator, target: Target, splits: int, count: int) -> Iterator[Case]:
    """Random steps on every schedule in turn; with `splits`, of one token per row."""
    kernel = LATENT_DECODE if splits else LATENT_PREFILL
    for i, step in enumerate(steps(rng, s.page, count, splits > 0)):
        g = build(s, splits)
        (node,) = g.nodes
        assert kernel.reject(node, target) is None
        plans = kernel.schedules(node, target)
        plan = plans[(i + splits) % len(plans)]
        atol = max(ATOL[s.q], ATOL[s.pool] if s.q != "f32" else 0)
        name = f"{node.op.name}-{s.name}-{splits}-{step}-{plan}"
        yield Case(name, g, kernel, plan, draw(s, step, rng, splits > 0), rtol=2e-5, atol=atol)


def gpu_cases(target: Target) -> Iterator[Case]:
    """Yield the cases that run on a GPU."""
    rng = generator()
    for s in (*SHAPES, *WIDEST):
        for splits in (0, 1, 3, 8):
            yield from cases(s, rng, target, splits, 3)
    for t in PRODUCTS:
        g = t.graph()
        (node,) = g.nodes
        for plan in HEAD_MATMUL.schedules(node, target):
            inputs = t.inputs(g, rng)
            yield Case(f"{t.types} {plan}", g, HEAD_MATMUL, plan, inputs, rtol=1e-2, atol=2e-2, sizes=SIZES)


@pytest.mark.parametrize("splits", [0, 1, 3, 8])
@pytest.mark.parametrize("s", SHAPES, ids=lambda s: s.name)
def test_latent_attention_agrees_with_the_reference(s: Shape, splits: int) -> None:
    for case in cases(s, np.random.default_rng(of_test()), INTERPRETED, splits, 1):
        run_case(case)


@pytest.mark.parametrize("t", PRODUCTS, ids=lambda t: t.types)
def test_products_of_heads(t: Text) -> None:
    g = t.graph()
    (node,) = g.nodes
    for i, s in enumerate(HEAD_MATMUL.schedules(node, sm_90())):
        atol = 1e-2 if "f16" in t.types else 2e-5
        run_case(Case(f"{t.types} {i}", g, HEAD_MATMUL, s, t.inputs(g, generator()), atol=atol, sizes=SIZES))


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_compiles(target: Target, tmp_path: Path) -> None:
    """A schedule of each kernel fits the shared memory that the target has."""
    rng = np.random.default_rng(of_test())
    for s in (SHAPES[0], WIDEST[0]):
        for splits in (0, 3):
            for case in cases(s, rng, target, splits, 1):
                assert compile_for(case, target, tmp_path).shared <= target.limits.shared, case.name


@pytest.mark.parametrize("settled", [False, True])
def test_settled_tables_are_read_before_the_wait(settled: bool) -> None:
    """The queries never are, nor the pool: the previous launch has written them."""
    target = next(t for t in TARGETS if t.has("pdl"))
    (node,) = build(SHAPES[0], 3).nodes
    schedule = {**LATENT_DECODE.schedules(node, target)[0], **({READ_BEFORE_WAIT: 1} if settled else {})}
    order = memory_order(LATENT_DECODE.emit(node, schedule, target), target)
    at = order.index("wait")
    # The pages of the first keys follow the wait.
    assert set(order[:at]) == ({"load x4", "load x5"} if settled else set())
    assert {"launch_dependents", "load x0", "load x1", "load x2", "store y0"} <= set(order[at:])


@pytest.mark.parametrize(("rotary", "widest"), [(4, 8), (8, 16)])
def test_copies_are_as_wide_as_rows_of_the_pool_are_aligned(rotary: int, widest: int) -> None:
    """With a pool of bf16, whose rows are 8 + rotary numbers."""
    (node,) = build(Shape("small", "bf16", "bf16", 4, 8, rotary, 4), 2).nodes
    source = LATENT_DECODE.emit(node, {"rows": 16, "keys": 64, "warps": 4, "stages": 3}, sm_90())
    copies = {int(n, 16) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x[0-9a-f]+), ", ptx(source))}
    assert max(copies) == widest


def test_rejected_nodes() -> None:
    (node,) = build(Shape("wide", "bf16", "bf16", 4, 528, 16)).nodes
    assert "above 512" in (LATENT_PREFILL.reject(node, sm_90()) or "")
