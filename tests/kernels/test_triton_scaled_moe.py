"""The products of experts of codes by codes in Triton's interpreter compared with their references, and as binaries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.cases import CLAMPED, SQUARED
from kernels.harness import Case
from kernels.test_triton_moe import ROUTINGS, chosen, first
from kernels.triton_harness import INTERPRETED, ONE_TARGET, run_case, some

from llmc.codegen.backends.triton.scaled_moe import SCALED_MOE_DOWN, SCALED_MOE_UP
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.ir.graph import Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU, moe_route
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import gfx942, sm_80, sm_90
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn


@dataclass(frozen=True)
class Stack:
    """A stack of experts: the dtype of all codes, the blocks that share a scale, and the dtype of a bias."""

    code: str
    block: tuple[int, int] = (1, 0)
    bias: str = ""
    scale: str = "f32"
    x: str = ""  # dtype of the activations' codes, if that is another one
    gate: bool = True

    def graph(self, up: bool, t: Any, k: int, experts: int, rows: int, columns: int) -> Graph:
        """The graph of one product; rows: of an expert's weights."""
        g, pairs = Graph("test"), tensor("i32", t, k).numel
        blocks = [-(-n // b) if b else 1 for n, b in zip((rows, columns), self.block, strict=True)]
        m = t if up else pairs
        operands = [
            g.input("x", tensor(self.x or self.code, m, columns)), g.input("order", tensor("i32", pairs)),
            g.input("starts", tensor("i32", experts + 1)),
            g.input("code", tensor(self.code, experts, rows, columns), weight=True),
            g.input("scale", tensor(self.scale, experts, *blocks), weight=True),
            g.input("x_scale", tensor("f32", m, blocks[1])),
        ]  # fmt: skip
        operands += [] if up else [g.input("weights", tensor("f32", t, k))]
        operands += [g.input("bias", tensor(self.bias, experts, rows), weight=True)] if self.bias else []
        attrs: dict[str, Any] = {"block": self.block}
        gated = CLAMPED if self.bias else SWIGLU
        attrs |= {"k": k, "body": gated if self.gate else SQUARED, "dtype": "bf16"} if up else {}
        g.outputs = [g.add(OPS["scaled_moe_up" if up else "scaled_moe_down"], operands, attrs).result]
        return g


# Stacks with the columns of their products.
STACKS = {
    "int8": (Stack("i8"), 37),
    "int8-groups": (Stack("i8", (1, 64), bias="f32"), 192),
    "fp8": (Stack("f8e4m3", bias="bf16"), 70),
    "fp8-tiles": (Stack("f8e4m3", (8, 32)), 96),
    "fp8-block": (Stack("f8e4m3", (128, 128)), 256),
    "fp8-columns": (Stack("f8e4m3", (0, 64), scale="bf16"), 128),
    "no gate": (Stack("f8e4m3", (8, 32), bias="f32", gate=False), 96),
}


def check(
    s: Stack, columns: int, up: bool, t: Any, k: int, experts: int, schedule: Any = None, rows: int = 22,
    on: Target = INTERPRETED,
) -> None:  # fmt: skip
    size = t if isinstance(t, int) else 40
    kernel, g = (SCALED_MOE_UP if up else SCALED_MOE_DOWN), s.graph(up, t, k, experts, rows, columns)
    rng = generator()
    order, starts = moe_route.ref(chosen(size, k, experts), experts=experts)
    drawn: dict[str, Any] = {"order": order, "starts": starts}
    for v in g.inputs:
        shape = [int(d.subs({"T": size})) for d in v.type.shape]
        if v.name in ("x", "code"):
            drawn[v.name] = np.clip(np.rint(40 * rng.standard_normal(shape)), -127, 127)
        elif v.name in ("x_scale", "scale"):
            drawn[v.name] = rng.uniform(0.2, 2.0, shape) / 40 / columns**0.25
        else:
            drawn.setdefault(v.name, rng.standard_normal(shape))
    arrays = [np.asarray(drawn[v.name], np.int32 if v.type.dtype[0] == "i" else np.float32) for v in g.inputs]
    (node,) = g.nodes
    chosen_schedule = schedule or kernel.schedules(node, sm_90())[0]
    name = f"{kernel.name} {s} {t} {k} {experts} {chosen_schedule}"
    run_case(Case(name, g, kernel, chosen_schedule, arrays, atol=2e-3, sizes={"T": size}), on)


@pytest.mark.parametrize("name", STACKS)
def test_products(name: str) -> None:
    s, columns = STACKS[name]
    for t, k, experts in (ROUTINGS[1], ROUTINGS[2]):
        for up in (True, False):
            check(s, columns, up, t, k, experts)
    check(s, columns, True, "T", 4, 9)


@pytest.mark.parametrize("name", STACKS)
def test_every_schedule(name: str) -> None:
    """Of all schedules some: more rows of some experts than a block has, and columns of several steps."""
    s, columns = STACKS[name]
    wide = columns + 256
    for up, kernel in ((True, SCALED_MOE_UP), (False, SCALED_MOE_DOWN)):
        (node,) = s.graph(up, "T", 2, 3, 150, wide).nodes
        for schedule in some(kernel.schedules(node, sm_90()), 0.2):
            check(s, wide, up, "T", 2, 3, schedule, rows=150)


# Qwen3-30B-A3B, and a mixture with few wide experts (Mixtral 8x7B).
SIZES = (((8, 128, 1536, 2048), (8, 128, 2048, 768)), ((2, 8, 28672, 4096), (2, 8, 4096, 14336)))
REAL = tuple((s, *sizes) for s in (Stack("i8"), Stack("f8e4m3"), Stack("f8e4m3", (128, 128))) for sizes in SIZES)


def nodes(s: Stack, up: tuple[int, ...], down: tuple[int, ...]) -> tuple[Node, ...]:
    return tuple(n for kind, sizes in ((True, up), (False, down)) for n in s.graph(kind, "T", *sizes).nodes)


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_binaries(target: Target, tmp_path: Path) -> None:
    sources = []
    for s, up, down in REAL[::2]:
        for kernel, node in zip((SCALED_MOE_UP, SCALED_MOE_DOWN), nodes(s, up, down), strict=True):
            if why := kernel.reject(node, target):
                assert "no instructions for f8e4m3" in why
                continue
            sources += [kernel.emit(node, first(kernel, node, target, t), target) for t in (1, 2048)]
    made = TritonToolchain.find(target).compile([(s, "") for s in sources], tmp_path, jobs=1)
    assert made and all(c.shared <= target.limits.shared for c in made.values())


@pytest.mark.parametrize("case", REAL, ids=lambda c: f"{c[0].code}-{c[0].block}-{c[1][1]}")
def test_first_schedules(case: Any) -> None:
    """Blocks of few rows for few tokens, of many for prompts."""
    s, up, down = case
    for kernel, node in zip((SCALED_MOE_UP, SCALED_MOE_DOWN), nodes(s, up, down), strict=True):
        assert first(kernel, node, sm_90(), 1)["bm"] == 16
        assert first(kernel, node, sm_90(), 8192)["bm"] >= 64


def test_rejected_nodes() -> None:
    def why(s: Stack, target: Target | None = None, columns: int = 96, experts: int = 3) -> str:
        (node,) = s.graph(True, "T", 2, experts, 6, columns).nodes
        return str(SCALED_MOE_UP.reject(node, target or sm_90()))

    assert why(Stack("i8")) == why(Stack("i8"), sm_80()) == why(Stack("i8"), gfx942()) == "None"
    assert "groups of 48" in why(Stack("f8e4m3", (1, 48)))
    assert "codes of i8 and f8e4m3" in why(Stack("f8e4m3", x="i8"))
    assert "codes of u8" in why(Stack("u8"))
    assert "5000 experts" in why(Stack("i8"), experts=5000)
    for target in (sm_80(), gfx942()):
        assert "no instructions for f8e4m3" in why(Stack("f8e4m3"), target)


def test_scales_of_whole_rows_are_no_groups() -> None:
    """Blocks that have all columns are multiplied by their scales once, at the end."""
    one, many = (replace(STACKS["fp8-block"][0], block=(1, c)) for c in (0, 128))
    for s, late in ((one, True), (many, False)):
        (node,) = s.graph(True, "T", 2, 3, 6, 256).nodes
        assert SCALED_MOE_UP.experts(node).scales_at_end == late
