"""The products of experts over codes in Triton's interpreter compared with their references, and as binaries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.expert_codes import QUANTIZED, SCALED, ExpertStack, QuantizedStack, ScaledStack
from kernels.test_triton_moe import ROUTINGS, chosen, first
from kernels.triton_harness import ONE_TARGET, run_case, some

from llmc.codegen.backends.triton.quantized_moe import QUANTIZED_MOE_UP, QuantizedExperts
from llmc.codegen.backends.triton.scaled_moe import SCALED_MOE_UP
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.codegen.launch_plan import check_packed
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Module
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import moe_route
from llmc.ir.verify import verify
from llmc.targets.gpu_targets import gfx942, sm_80, sm_90
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
STACKS: dict[str, tuple[ExpertStack, int]] = {**QUANTIZED, **SCALED}


@pytest.mark.parametrize("name", STACKS)
def test_products(name: str) -> None:
    s, columns = STACKS[name]
    for routing in (ROUTINGS[1], ROUTINGS[2]):
        for up in (True, False):
            run_case(s.case(up, *routing, 22, columns, None))
    run_case(s.case(True, "T", 4, 9, 22, columns, None))


@pytest.mark.parametrize("name", STACKS)
def test_every_schedule(name: str) -> None:
    """Of all schedules some: more rows of some experts than a block has, and columns of several steps."""
    s, columns = STACKS[name]
    sizes = ("T", 2, 3, 150, columns + s.more)
    for up in (True, False):
        (node,) = s.graph(up, *sizes).nodes
        for schedule in some(s.kernels[up].schedules(node, sm_90()), 0.15):
            run_case(s.case(up, *sizes, schedule))


def test_packing_keeps_the_product() -> None:
    s = replace(QUANTIZED["zeros"][0], half=0)
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


# Stacks, and the sizes of both products: of Qwen3-30B-A3B, gpt-oss-20b, and few wide experts (Mixtral 8x7B).
QWEN3 = (8, 128, 1536, 2048), (8, 128, 2048, 768)
GPT_OSS = (4, 32, 5760, 2880), (4, 32, 2880, 2880)
MIXTRAL = (2, 8, 28672, 4096), (2, 8, 4096, 14336)
REAL: tuple[tuple[ExpertStack, Any], ...] = (
    (QuantizedStack("bf16", "u8", "bf16", (1, 128), "8", half=64), QWEN3),
    (QuantizedStack("bf16", "i8", "bf16", (1, 0)), QWEN3),
    (QuantizedStack("bf16", "f8e4m3", "bf16", (1, 0)), QWEN3),
    (QuantizedStack("bf16", "f8e4m3", "f32", (128, 128)), QWEN3),
    (QuantizedStack("bf16", "u8", "bf16", (1, 32), values="e2m1", half=32, bias="bf16"), GPT_OSS),
    (ScaledStack("i8"), QWEN3),
    (ScaledStack("f8e4m3"), QWEN3),
    (ScaledStack("f8e4m3", (128, 128)), QWEN3),
)
WIDE = tuple((s, MIXTRAL) for s, _ in REAL if isinstance(s, ScaledStack))


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_binaries(target: Target, tmp_path: Path) -> None:
    sources = []
    for s, sizes in REAL:
        for kernel, node in s.nodes(*sizes):
            if why := kernel.reject(node, target):
                assert "no instructions for f8e4m3" in why
                continue
            sources += [kernel.emit(node, first(kernel, node, target, t), target) for t in (1, 2048)]
    made = TritonToolchain.find(target).compile([(s, "") for s in sources], tmp_path, jobs=1)
    assert made and all(c.shared <= target.limits.shared for c in made.values())


@pytest.mark.parametrize(("s", "sizes"), REAL + WIDE, ids=str)
def test_first_schedules(s: ExpertStack, sizes: Any) -> None:
    """Blocks of few rows for few tokens, of many for prompts."""
    for kernel, node in s.nodes(*sizes):
        assert [first(kernel, node, sm_90(), t)["bm"] for t in (1, 16)] == [16, 16]
        assert first(kernel, node, sm_90(), 8192)["bm"] >= 64


def test_rejected_nodes() -> None:
    def why(s: QuantizedStack, target: Target | None = None, columns: int = 128, **options: Any) -> str:
        (node,) = s.graph(True, "T", 2, 3, 6, columns, **options).nodes
        return str(QUANTIZED_MOE_UP.reject(node, target or sm_90()))

    nibbles = QuantizedStack("bf16", "u8", "bf16", (1, 64), "8")
    assert why(nibbles) == "None"
    assert "multiples of 32" in why(nibbles, columns=100) and "when compiled" in why(nibbles, weight=False)
    assert "blocks of [2, 64]" in why(replace(nibbles, block=(2, 64)))
    assert "8 bits in dtype u8" in why(replace(nibbles, wide=True))
    assert "with zero points" in why(QuantizedStack("bf16", "i8", "bf16", (1, 0), "3"))
    assert "blocks of 16" in why(QuantizedStack("bf16", "i8", "bf16", (1, 16)))
    assert "no instructions" in why(QuantizedStack("bf16", "f8e4m3", "bf16", (1, 0)), sm_80())
    (node,) = nibbles.graph(True, "T", 2, 5000, 2, 64).nodes
    assert "5000 experts" in str(QUANTIZED_MOE_UP.reject(node, sm_90()))
    node.attrs["act"] = "i8"
    assert "rounded to i8" in str(QUANTIZED_MOE_UP.reject(node, sm_90()))


def test_rejected_nodes_of_codes_by_codes() -> None:
    def why(s: ScaledStack, target: Target | None = None, columns: int = 96, experts: int = 3) -> str:
        (node,) = s.graph(True, "T", 2, experts, 6, columns).nodes
        return str(SCALED_MOE_UP.reject(node, target or sm_90()))

    assert why(ScaledStack("i8")) == why(ScaledStack("i8"), sm_80()) == why(ScaledStack("i8"), gfx942()) == "None"
    assert "groups of 48" in why(ScaledStack("f8e4m3", (1, 48)))
    assert "codes of i8 and f8e4m3" in why(ScaledStack("f8e4m3", x="i8"))
    assert "codes of u8" in why(ScaledStack("u8"))
    assert "5000 experts" in why(ScaledStack("i8"), experts=5000)
    for target in (sm_80(), gfx942()):
        assert "no instructions for f8e4m3" in why(ScaledStack("f8e4m3"), target)


def test_the_problem_of_packed_and_of_unpacked_codes_is_one() -> None:
    s = QUANTIZED["group128"][0]
    packed, plain = (next(iter(x.graph(True, "T", 2, 3, 6, 256).nodes)) for x in (s, replace(s, half=0)))
    a, b = map(QuantizedExperts, (packed, plain))
    assert (a.half, a.group, a.k, a.n, a.expert_bytes) == (b.half, b.group, b.k, b.n, b.expert_bytes)


def test_scales_of_whole_rows_are_no_groups() -> None:
    """Blocks that have all columns are multiplied by their scales once, at the end."""
    one, many = (replace(SCALED["scaled fp8-block"][0], block=(1, c)) for c in (0, 128))
    for s, late in ((one, True), (many, False)):
        (node,) = s.graph(True, "T", 2, 3, 6, 256).nodes
        assert SCALED_MOE_UP.experts(node).scales_at_end == late
