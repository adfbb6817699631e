"""The products of experts over codes in Triton's interpreter compared with their references, and as binaries."""

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

from llmc.codegen.backends.triton.quantized_moe import QUANTIZED_MOE_DOWN, QUANTIZED_MOE_UP, QuantizedExperts
from llmc.codegen.backends.triton.quantized_problem import scales_factors
from llmc.codegen.backends.triton.triton_kernel import FLOAT8
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.codegen.launch_plan import check_packed
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU, moe_route
from llmc.ir.types import tensor
from llmc.ir.verify import verify
from llmc.targets.gpu_targets import sm_80, sm_90
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn


@dataclass(frozen=True)
class Stack:
    """A stack of experts: dtypes of x, codes and scales, blocks, zero points, and columns between packed codes.

    zero: "" for none, a number, or "u8" for an operand. half: 0 if codes are not packed.
    """

    x: str
    code: str
    scale: str
    block: tuple[int, int]
    zero: str = ""
    values: str = ""
    half: int = 0
    bias: str = ""
    wide: bool = False  # codes of dtype u8 have 8 bits
    gate: bool = True

    @property
    def bits(self) -> int:
        return 4 if self.code == "u8" and not self.wide else 8

    def graph(self, up: bool, t: Any, k: int, experts: int, rows: int, columns: int, weight: bool = True) -> Graph:
        """The graph of one product; rows: of an expert's weights."""
        g, pairs = Graph("test"), tensor("i32", t, k).numel
        blocks = [-(-n // b) if b else 1 for n, b in zip((rows, columns), self.block, strict=True)]
        table = (experts, *(reversed(blocks) if self.half else blocks))
        width = columns // 2 if self.half else columns
        operands = [
            g.input("x", tensor(self.x, t if up else pairs, columns)), g.input("order", tensor("i32", pairs)),
            g.input("starts", tensor("i32", experts + 1)),
            g.input("code", tensor(self.code, experts, rows, width), weight=weight),
            g.input("scale", tensor(self.scale, *table), weight=True),
        ]  # fmt: skip
        operands += [] if up else [g.input("weights", tensor(self.x, t, k))]
        operands += [g.input("zero", tensor("u8", *table), weight=True)] if self.zero == "u8" else []
        operands += [g.input("bias", tensor(self.bias, experts, rows), weight=True)] if self.bias else []
        attrs: dict[str, Any] = {"block": self.block, "values": self.values, "bits": self.bits, "half": self.half}
        attrs |= {"zeros": True} if self.zero == "u8" else {"zero_point": int(self.zero or 0)}
        gated = CLAMPED if self.bias else SWIGLU
        attrs |= {"k": k, "body": gated if self.gate else SQUARED} if up else {}
        g.outputs = [g.add(OPS["quantized_moe_up" if up else "quantized_moe_down"], operands, attrs).result]
        return g


# Stacks with the columns of their products.
STACKS = {
    "rows8": (Stack("bf16", "i8", "f32", (1, 0)), 37),
    "groups8": (Stack("f16", "i8", "bf16", (1, 64)), 150),
    "floats": (Stack("bf16", "f8e4m3", "f32", (1, 0), bias="bf16"), 70),
    "tiles": (Stack("bf16", "f8e4m3", "f32", (8, 32)), 75),
    "group128": (Stack("bf16", "u8", "bf16", (1, 128), "8", half=64), 256),
    "group32": (Stack("f16", "u8", "f16", (1, 32), "7", half=32), 192),
    "zeros": (Stack("bf16", "u8", "f16", (1, 64), "u8", half=32, bias="f32"), 128),
    "whole": (Stack("f32", "u8", "f32", (1, 0), "8", half=16), 96),
    "mxfp4": (Stack("bf16", "u8", "bf16", (1, 32), values="e2m1", half=32, bias="bf16"), 192),
    "nvfp4": (Stack("bf16", "u8", "f32", (1, 16), values="e2m1", half=16), 96),
    "no gate": (Stack("bf16", "u8", "bf16", (1, 64), "8", half=32, bias="f32", gate=False), 128),
}


def check(
    s: Stack, columns: int, up: bool, t: Any, k: int, experts: int, schedule: Any = None, rows: int = 22,
    on: Target = INTERPRETED,
) -> None:  # fmt: skip
    size = t if isinstance(t, int) else 40
    kernel, g = (QUANTIZED_MOE_UP if up else QUANTIZED_MOE_DOWN), s.graph(up, t, k, experts, rows, columns)
    rng = generator()
    order, starts = moe_route.ref(chosen(size, k, experts), experts=experts)
    drawn: dict[str, Any] = {"order": order, "starts": starts}
    for v in g.inputs:
        shape = [int(d.subs({"T": size})) for d in v.type.shape]
        if v.name == "code" and v.type.dtype not in FLOAT8:
            drawn[v.name] = rng.integers(*((-128, 128) if s.code == "i8" else (0, 256)), shape)
        elif v.name == "zero":
            drawn[v.name] = rng.integers(0, 16, shape)
        elif v.name == "scale":
            drawn[v.name] = rng.uniform(0.5, 2.0, shape) / {"i8": 75, "u8": 5}.get(s.code, 1) / np.sqrt(columns)
        else:
            drawn.setdefault(v.name, rng.standard_normal(shape))
    arrays = [np.asarray(drawn[v.name], np.int32 if v.type.dtype[0] in "iu" else np.float32) for v in g.inputs]
    (node,) = g.nodes
    chosen_schedule = schedule or kernel.schedules(node, sm_90())[0]
    name = f"{kernel.name} {s} {t} {k} {experts} {chosen_schedule}"
    # Large tiles round codes times scales to the dtype of x: an error of up to 2 ** -9 of each term.
    atol = 6e-2 if scales_factors(s.half, chosen_schedule["bm"], s.scale, s.x) else 2e-2
    run_case(Case(name, g, kernel, chosen_schedule, arrays, atol=atol, sizes={"T": size}), on)


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
    wide = columns if s.half else columns + 128
    for up, kernel in ((True, QUANTIZED_MOE_UP), (False, QUANTIZED_MOE_DOWN)):
        (node,) = s.graph(up, "T", 2, 3, 150, wide).nodes
        for schedule in some(kernel.schedules(node, sm_90()), 0.1):
            check(s, wide, up, "T", 2, 3, schedule, rows=150)


def test_packing_keeps_the_product() -> None:
    s = replace(STACKS["zeros"][0], half=0)
    g = s.graph(True, 5, 2, 3, 6, 128)
    (node,) = g.nodes
    rng = generator()
    order, starts = moe_route.ref(chosen(5, 2, 3), experts=3)
    given = {"order": order, "starts": starts}
    arrays = [given.get(v.name, rng.integers(0, 16, [int(d) for d in v.type.shape])) for v in g.inputs]
    (want,) = run(g, arrays)
    schedule = QUANTIZED_MOE_UP.schedules(node, sm_90())[0]
    turned = "transpose{perm=[0, 2, 1]}"
    assert QUANTIZED_MOE_UP.layouts(node, schedule, sm_90()) == {3: "pack_nibbles{half=64}", 4: turned, 5: turned}
    with pytest.raises(Diagnostic, match="not packed"):
        check_packed(QUANTIZED_MOE_UP, node, schedule, sm_90())
    QUANTIZED_MOE_UP.pack(g, node, schedule, sm_90(), OPS)
    assert [n.op.name for n in g.nodes] == ["pack_nibbles", "transpose", "transpose", "quantized_moe_up"]
    verify(Module(graphs={"test": g}))
    np.testing.assert_array_equal(run(g, arrays)[0], want)


# Qwen3-30B-A3B and gpt-oss-20b.
REAL = (
    (Stack("bf16", "u8", "bf16", (1, 128), "8", half=64), (8, 128, 1536, 2048), (8, 128, 2048, 768)),
    (Stack("bf16", "i8", "bf16", (1, 0)), (8, 128, 1536, 2048), (8, 128, 2048, 768)),
    (Stack("bf16", "f8e4m3", "bf16", (1, 0)), (8, 128, 1536, 2048), (8, 128, 2048, 768)),
    (Stack("bf16", "f8e4m3", "f32", (128, 128)), (8, 128, 1536, 2048), (8, 128, 2048, 768)),
    (
        Stack("bf16", "u8", "bf16", (1, 32), values="e2m1", half=32, bias="bf16"),
        (4, 32, 5760, 2880),
        (4, 32, 2880, 2880),
    ),
)


def nodes(s: Stack, up: tuple[int, ...], down: tuple[int, ...]) -> tuple[Node, ...]:
    return tuple(n for kind, sizes in ((True, up), (False, down)) for n in s.graph(kind, "T", *sizes).nodes)


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_binaries(target: Target, tmp_path: Path) -> None:
    sources = []
    for s, up, down in REAL:
        for kernel, node in zip((QUANTIZED_MOE_UP, QUANTIZED_MOE_DOWN), nodes(s, up, down), strict=True):
            if why := kernel.reject(node, target):
                assert "no instructions for f8e4m3" in why
                continue
            sources += [kernel.emit(node, first(kernel, node, target, t), target) for t in (1, 2048)]
    made = TritonToolchain.find(target).compile([(s, "") for s in sources], tmp_path, jobs=1)
    assert all(c.shared <= target.limits.shared for c in made.values())


def test_first_schedules() -> None:
    """Blocks of few rows for few tokens, of many for prompts."""
    for s, up, down in REAL:
        (node, _) = nodes(s, up, down)
        assert [first(QUANTIZED_MOE_UP, node, sm_90(), t)["bm"] for t in (1, 16)] == [16, 16]
        assert first(QUANTIZED_MOE_UP, node, sm_90(), 8192)["bm"] >= 64


def test_rejected_nodes() -> None:
    def why(s: Stack, target: Target | None = None, columns: int = 128, **options: Any) -> str:
        (node,) = s.graph(True, "T", 2, 3, 6, columns, **options).nodes
        return str(QUANTIZED_MOE_UP.reject(node, target or sm_90()))

    nibbles = Stack("bf16", "u8", "bf16", (1, 64), "8")
    assert why(nibbles) == "None"
    assert "multiples of 32" in why(nibbles, columns=100) and "when compiled" in why(nibbles, weight=False)
    assert "blocks of [2, 64]" in why(replace(nibbles, block=(2, 64)))
    assert "8 bits in dtype u8" in why(replace(nibbles, wide=True))
    assert "with zero points" in why(Stack("bf16", "i8", "bf16", (1, 0), "3"))
    assert "blocks of 16" in why(Stack("bf16", "i8", "bf16", (1, 16)))
    assert "no instructions" in why(Stack("bf16", "f8e4m3", "bf16", (1, 0)), sm_80())
    (node,) = nibbles.graph(True, "T", 2, 5000, 2, 64).nodes
    assert "5000 experts" in str(QUANTIZED_MOE_UP.reject(node, sm_90()))
    node.attrs["act"] = "i8"
    assert "rounded to i8" in str(QUANTIZED_MOE_UP.reject(node, sm_90()))


def test_the_problem_of_packed_and_of_unpacked_codes_is_one() -> None:
    s = STACKS["group128"][0]
    packed, plain = (next(iter(x.graph(True, "T", 2, 3, 6, 256).nodes)) for x in (s, replace(s, half=0)))
    a, b = map(QuantizedExperts, (packed, plain))
    assert (a.half, a.group, a.k, a.n, a.expert_bytes) == (b.half, b.group, b.k, b.n, b.expert_bytes)
