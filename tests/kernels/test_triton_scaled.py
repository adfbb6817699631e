"""Triton products of 8-bit floats with scales of tiles in the interpreter compared with the reference, and the rounding
of activations: odd shapes, tiles that end within a block, every schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.harness import Case
from kernels.triton_harness import INTERPRETED, run_case, some

from llmc.codegen.backends.triton.round_groups import ROUND_GROUPS
from llmc.codegen.backends.triton.scaled_gemm import SCALED_GEMM, SCALED_GEMM_SMALL, SCALED_GEMM_TMA
from llmc.codegen.kernel import Kernel, Schedule
from llmc.ir.graph import Graph, Node
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import gfx942, sm_80, sm_90
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
KERNELS = (SCALED_GEMM_SMALL, SCALED_GEMM, SCALED_GEMM_TMA)
ROWS = (1, 2, 16, 33, 64, 130)
SILU = "mul(mul(a0, sigmoid(a0)), a1)"
NORM = "mul(mul(a0, rsqrt(add(row_mean(mul(a0, a0)), 1e-06))), a1)"


@dataclass(frozen=True)
class Shape:
    """A product of n rows of each part and k columns with a scale for each block (rows, columns) of the weight."""

    name: str
    n: int
    k: int
    block: tuple[int, int] = (128, 128)
    parts: int = 1
    body: str = "a0"
    extras: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    dtype: str = "bf16"
    rows: Any = "T"
    code: str = "f8e4m3"
    weight: bool = True

    def graph(self) -> Graph:
        g, m, groups = Graph("test"), self.parts * self.n, self.k // self.block[1]
        x = g.input("x", tensor(self.code, self.rows, self.k))
        code = g.input("code", tensor(self.code, m, self.k), weight=self.weight)
        x_scale = g.input("x_scale", tensor("f32", self.rows, groups))
        scale = g.input("scale", tensor("f32", -(-m // (self.block[0] or m)), groups), weight=True)
        extras = [g.input(f"e{i}", tensor(dt, *dims)) for i, (dt, dims) in enumerate(self.extras)]
        attrs = {"block": list(self.block), "parts": self.parts, "body": self.body, "dtype": self.dtype}
        g.outputs = [g.add(OPS["block_scaled_linear"], [x, code, x_scale, scale, *extras], attrs).result]
        return g

    @property
    def node(self) -> Node:
        (node,) = self.graph().nodes
        return node


SHAPES = (
    Shape("tiles", 261, 384),
    Shape("residual", 128, 256, body="add(a1, a0)", extras=(("bf16", ("T", 128)),)),
    Shape("silu", 100, 256, parts=2, body=SILU),
    Shape("silu128", 128, 128, parts=2, body=f"add({SILU}, a2)", extras=(("f32", (128,)),), dtype="f32"),
    Shape("rows", 37, 384, (1, 128)),
    Shape("small", 70, 192, (64, 64), dtype="f16"),
    Shape("uneven", 50, 288, (24, 96), parts=2, body="add(a0, a1)"),
    Shape("wide", 33, 512, (128, 256)),
    Shape("all", 40, 128, (0, 32)),
    Shape("three", 40, 256, parts=3, body="add(mul(a0, a1), a2)", dtype="f32"),
    Shape("value", 40, 128, weight=False),
)


def draw(g: Graph, rows: int) -> list[np.ndarray]:
    """Codes of all sizes, and scales of different sizes with which the sums stay near 1."""
    rng = generator()
    out = []
    for v in g.inputs:
        shape = [int(d.subs({"T": rows})) for d in v.type.shape]
        if v.name in ("x", "code"):
            out.append(100 * rng.standard_normal(shape))
        elif v.name in ("x_scale", "scale"):
            out.append(rng.uniform(0.2, 2.0, shape) / 100 / int(g.inputs[0].type.shape[-1]) ** 0.25)
        else:
            out.append(rng.standard_normal(shape))
    return [x.astype(np.float32) for x in out]


def check(
    kernel: Kernel, s: Shape, rows: int, schedule: Schedule | None = None, on: Target = INTERPRETED
) -> None:  # fmt: skip
    g = s.graph()
    (node,) = g.nodes
    chosen = schedule or kernel.schedules(node, sm_90())[0]
    # Sums of 8-bit floats have about 14 bits on Hopper.
    run_case(Case(f"{s.name} {rows} {chosen}", g, kernel, chosen, draw(g, rows), atol=2e-3, sizes={"T": rows}), on)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_products_agree_with_the_reference(kernel: Kernel, rows: int) -> None:
    for s in SHAPES if rows < 3 else some(SHAPES, 0.3):
        check(kernel, s, rows)


@pytest.mark.parametrize("rows", (1, 16, 64))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_constant_number_of_tokens(kernel: Kernel, rows: int) -> None:
    for s in (SHAPES[0], SHAPES[2]):
        check(kernel, replace(s, rows=rows), rows)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_schedule(kernel: Kernel) -> None:
    """Those that real sizes are offered, on a product that ends within a tile."""
    for s in (Shape("", 6144, 4096), Shape("", 14336, 4096, parts=2, body=SILU)):
        for schedule in some(kernel.schedules(s.node, sm_90()), 0.3):
            n = schedule["bn"] + (1 if s.parts == 1 else schedule["bn"])
            check(kernel, replace(s, name="odd", n=n, k=2 * schedule["bk"]), 3, schedule)


def test_rejected_nodes() -> None:
    bad = (
        (Shape("", 40, 96, (16, 48)), "groups of 48 columns"),
        (Shape("", 40, 128, code="i8"), "codes of i8"),
        (Shape("", 40, 128, parts=5), "5 parts"),
    )
    for kernel in KERNELS:
        for s, words in bad:
            assert words in str(kernel.reject(s.node, sm_90())), s
        for target in (sm_80(), gfx942()):
            assert "no instructions for f8e4m3" in str(kernel.reject(SHAPES[0].node, target))


@pytest.mark.parametrize("block", ((128, 128), (1, 128)))
def test_few_tokens_have_the_weight_as_the_left_factor(block: tuple[int, int]) -> None:
    for rows, best in ((16, "triton/scaled_gemm_small"), (2048, "triton/scaled_gemm_tma")):
        node = Shape("", 6144, 4096, block).node
        found = [
            (k.cost_us(node, s, sm_90(), {"T": rows}), k.name) for k in KERNELS for s in k.schedules(node, sm_90())
        ]
        assert min(found)[1] == best


@dataclass(frozen=True)
class Rounding:
    """Rows of `body` over operands of these dtypes and shapes, rounded to `dtype` in groups."""

    name: str
    xs: tuple[tuple[str, tuple[Any, ...]], ...]
    group: int = 128
    dtype: str = "f8e4m3"
    body: str = "a0"

    def graph(self) -> Graph:
        g = Graph("test")
        xs = [g.input(f"x{i}", tensor(dt, *dims)) for i, (dt, dims) in enumerate(self.xs)]
        n = g.add(OPS["round_groups"], xs, {"body": self.body, "dtype": self.dtype, "group": self.group})
        g.outputs = list(n.results)
        return g


ROUNDINGS = (
    Rounding("plain", (("bf16", ("T", 384)),)),
    Rounding("narrow", (("f32", ("T", 128)),)),
    Rounding("norm", (("bf16", ("T", 384)), ("bf16", (384,))), body=NORM),
    Rounding("norm small", (("bf16", ("T", 64)), ("f32", (64,))), 32, body=NORM),
    Rounding("axes", (("f16", ("T", 3, 128)), ("f16", (3, 128))), 64, body="mul(a0, add(a1, 1.0))"),
    Rounding("long norm", (("bf16", ("T", 16512)), ("bf16", (16512,))), body=NORM),
    Rounding("eights", (("bf16", ("T", 48)),), 8),
)


def check_rounding(s: Rounding, rows: int, schedule: Schedule | None = None, on: Target = INTERPRETED) -> None:
    g = s.graph()
    (node,) = g.nodes
    rng = generator()
    shapes = [[int(d.subs({"T": rows})) for d in v.type.shape] for v in g.inputs]
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    inputs[0][0, ..., : s.group] = 0  # a group of zeros
    chosen = schedule or ROUND_GROUPS.schedules(node, sm_90())[0]
    run_case(Case(f"{s.name} {rows} {chosen}", g, ROUND_GROUPS, chosen, inputs, sizes={"T": rows}), on)


@pytest.mark.parametrize("rows", (1, 3, 17))
def test_groups_are_rounded_as_by_the_reference(rows: int) -> None:
    for s in ROUNDINGS:
        check_rounding(s, rows)


def test_every_schedule_of_the_rounding() -> None:
    for s in ROUNDINGS:
        (node,) = s.graph().nodes
        for schedule in some(ROUND_GROUPS.schedules(node, sm_90()), 0.5):
            check_rounding(s, 5, schedule)


def test_which_groups_are_refused() -> None:
    for group, k, words in ((96, 192, "powers of two"), (2048, 4096, "groups of 2048")):
        (node,) = Rounding("", (("bf16", ("T", k)),), group).graph().nodes
        assert words in str(ROUND_GROUPS.reject(node, sm_90()))
    (node,) = ROUNDINGS[0].graph().nodes
    assert "no instructions for f8e4m3" in str(ROUND_GROUPS.reject(node, sm_80()))


def test_codes_times_scales_are_the_numbers() -> None:
    g = ROUNDINGS[0].graph()
    x = np.random.default_rng(0).standard_normal((5, 384)).astype(np.float32)
    codes, scales = run(g, [x], {"T": 5})
    assert codes.shape == (5, 384) and scales.shape == (5, 3)
    assert np.abs(codes).reshape(5, 3, 128).max(-1).tolist() == [[448.0] * 3] * 5
    back = codes * np.repeat(scales, 128, -1)
    np.testing.assert_allclose(back, x, rtol=2**-4, atol=2**-9 * float(scales.max()))
