"""The CUDA C++ products of experts over codes of 4 bits: packing, binaries, rejected nodes, and when they are chosen.

tests/gpu/test_cuda_kernels.py runs them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.expert_codes import QUANTIZED, QuantizedStack
from kernels.test_cuda_experts import node_of
from kernels.test_triton_moe import chosen

from llmc.codegen.backends.cuda.grouped_codes import GROUPED_CODES, CodesProblem
from llmc.codegen.candidates import Candidate
from llmc.codegen.candidates import candidates as node_candidates
from llmc.codegen.cubin import read_entry
from llmc.codegen.kernel import READ_BEFORE_WAIT, Schedule
from llmc.codegen.launch_plan import check_packed
from llmc.codegen.tuning_records import Tuning
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import moe_route
from llmc.ir.verify import verify
from llmc.targets.gpu_targets import sm_90, sm_100

OURS = "cuda/grouped_codes"
INT4 = QuantizedStack("bf16", "u8", "bf16", (1, 128), "8")
ZEROS = QuantizedStack("bf16", "u8", "f16", (1, 64), "u8", bias="f32")
MXFP4 = QuantizedStack("bf16", "u8", "bf16", (1, 32), values="e2m1", bias="bf16")
QWEN3 = (8, 128, 1536, 2048), (8, 128, 2048, 768)
GPT_OSS = (4, 32, 5760, 2880), (4, 32, 2880, 2880)


def packed(g: Graph) -> Node:
    """The product over packed codes that replaces that of `g`."""
    node, target = node_of(g), sm_90()
    GROUPED_CODES.pack(g, node, GROUPED_CODES.schedules(node, target)[0], target, OPS)
    return next(n for n in g.nodes if n.op.name.startswith("fragments"))


@pytest.mark.parametrize("s", [INT4, ZEROS, MXFP4], ids=["int4", "zeros", "mxfp4"])
@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_packing_keeps_the_product(up: bool, s: QuantizedStack) -> None:
    g = s.graph(up, 5, 2, 3, 128, 256)
    node, target, rng = node_of(g), sm_90(), generator()
    order, starts = moe_route.ref(chosen(5, 2, 3), experts=3)
    given: dict[str, Any] = {"order": order, "starts": starts}
    for v in g.inputs:
        shape = [int(d) for d in v.type.shape]
        drawn = rng.integers(0, 16, shape) if v.type.dtype == "u8" else rng.standard_normal(shape)
        given.setdefault(v.name, drawn)
    arrays = [np.asarray(given[v.name], np.int32 if v.type.dtype[0] in "iu" else np.float32) for v in g.inputs]
    (want,) = run(g, arrays)
    schedule = GROUPED_CODES.schedules(node, target)[0]
    assert set(GROUPED_CODES.layouts(node, schedule, target)) == {3, 4, *({6 - up} if s.zero == "u8" else ())}
    with pytest.raises(Diagnostic, match="not packed"):
        check_packed(GROUPED_CODES, node, schedule, target)
    assert packed(g).op.name == ("fragments_moe_up" if up else "fragments_moe_down")
    verify(Module(graphs={"test": g}))
    np.testing.assert_array_equal(run(g, arrays)[0], want)


@pytest.mark.parametrize(
    ("s", "up", "sizes"),
    [(INT4, True, QWEN3[0]), (ZEROS, False, QWEN3[1]), (MXFP4, True, GPT_OSS[0])],
    ids=["int4", "zeros", "mxfp4"],
)
def test_binaries(s: QuantizedStack, up: bool, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Of the schedules the one with the fewest rows, the one with the most registers, and one that begins early."""
    node, target = packed(s.graph(up, "T", *sizes)), sm_90()
    assert GROUPED_CODES.reject(node, target) is None
    offered = GROUPED_CODES.schedules(node, target)
    few = next(x for x in offered if x["tokens"] == 8 and x["consumers"] == 1)
    most = next(x for x in offered if x["tokens"] == 128 and x["blocks"] == 2)
    ways: list[Schedule] = [few, most, {**few, READ_BEFORE_WAIT: 1}]
    tool = load().toolchains["cuda"](target)
    sources = [GROUPED_CODES.emit(node, way, target) for way in ways]
    made = tool.compile([(x, "") for x in sources], tmp_path, jobs=1)
    for way, source in zip(ways, sources, strict=True):
        c = made[tool.key(source)]
        assert c.threads == 128 * (way["consumers"] + 1) and c.shared * way["resident"] <= target.limits.shared
        assert read_entry(c.binary, source.entry).sizes == (8,) * (len(node.operands) + 1)
        assert [str(d) for d in source.grid] == [str(132 * way["resident"]), "1", "1"]  # for any number of tokens


def test_rings_fit_into_shared_memory() -> None:
    target = sm_90()
    for s, shapes in ((INT4, QWEN3), (ZEROS, QWEN3), (MXFP4, GPT_OSS)):
        for up, sizes in zip((True, False), shapes, strict=True):
            node = node_of(s.graph(up, "T", *sizes))
            for way in GROUPED_CODES.schedules(node, target):
                ring = CodesProblem(node).ring(way, target)
                used = ring.stages * ring.nbytes + 2 * 1024 + 8 * way["consumers"] * way["tokens"]
                assert ring.stages >= 4 and used * way["resident"] <= target.limits.shared, way
                assert ring.stages * ring.nbytes + 1024 > 48 << 10  # static memory counts toward what needs no opt-in
                columns = ring.chunks * 64
                assert columns % s.block[1] == 0 or s.block[1] % columns == 0


def test_what_is_refused() -> None:
    def why(s: QuantizedStack, columns: int = 128, rows: int = 64, target: Any = None, **options: Any) -> str:
        return str(GROUPED_CODES.reject(node_of(s.graph(True, "T", 2, 3, rows, columns, **options)), target or sm_90()))

    assert why(INT4) == why(MXFP4) == why(ZEROS) == "None"
    assert "rows of f16" in why(replace(INT4, x="f16")) and "scales of f32" in why(replace(INT4, scale="f32"))
    assert "multiples of 64" in why(INT4, rows=96) and "multiples of 64" in why(
        replace(INT4, block=(1, 32)), columns=96
    )
    assert "blocks of [1, 24]" in why(replace(INT4, block=(1, 24)), columns=192)
    assert "known at compile time" in why(INT4, weight=False)
    assert "codes of i8" in why(replace(QUANTIZED["rows8"][0], scale="bf16")) and "packed for other kernels" in why(
        replace(INT4, half=64)
    )
    assert "the zero point 16" in why(replace(INT4, zero="16"))
    assert "does not have wgmma" in why(INT4, target=sm_100())
    node = node_of(INT4.graph(True, "T", 2, 513, 64, 128))
    assert "513 experts; the maximum is 512" in str(GROUPED_CODES.reject(node, sm_90()))
    node.attrs["act"] = "i8"
    assert "rounded to i8" in str(GROUPED_CODES.reject(node, sm_90()))


def first(s: QuantizedStack, up: bool, sizes: tuple[int, ...], tokens: int) -> Candidate:
    node = node_of(s.graph(up, 1 if tokens == 1 else "T", *sizes))
    return node_candidates(node, load().kernels, sm_90(), {"T": tokens}, Tuning())[0]


@pytest.mark.parametrize(
    ("s", "shapes"), [(INT4, QWEN3), (ZEROS, QWEN3), (MXFP4, GPT_OSS)], ids=["int4", "zeros", "mxfp4"]
)
def test_all_steps_take_it_without_measurements(s: QuantizedStack, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Small tiles for few rows, large ones for prompts. All steps share one layout of the weights."""
    for up, sizes in zip((True, False), shapes, strict=True):
        found = {t: first(s, up, sizes, t) for t in (1, 16, 256, 2048, 8192)}
        assert {c.kernel.name for c in found.values()} == {OURS}
        assert found[1].schedule["tokens"] <= 16 and found[16].schedule["tokens"] <= 16
        assert found[8192].schedule["tokens"] >= 96


def test_deterministic_targets_do_without_it() -> None:
    target = replace(sm_90(), deterministic=True)
    node = node_of(INT4.graph(True, "T", *QWEN3[0]))
    found = node_candidates(node, load().kernels, target, {"T": 2048}, Tuning())
    assert {o.kernel.name for o in found} == {"triton/quantized_moe_up"}
