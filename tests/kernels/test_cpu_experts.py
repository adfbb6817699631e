"""The products of experts on all CPU levels compared with the reference in float64, and their packing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from draw import of_test
from kernels.cases import TEXTS, UNGATED, Text
from kernels.harness import Case, batch, compile_cases, run_case
from kernels.test_cpu_linear import target_here
from kernels.test_cpu_quantized import LEVELS, VNNI

from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.backends.cpp.experts import EXPERTS
from llmc.codegen.kernel import Source
from llmc.extension import load
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import moe_route
from llmc.ir.verify import verify

pytestmark = pytest.mark.drawn
EVERY = [t for t in TEXTS if t.call.partition(" ")[0].removeprefix("quantized_") in ("moe_up", "moe_down")]
HALF = len(EVERY) // 2  # first products, then second ones of the same stacks: some of both
FLOAT_CODES = next(t for t in EVERY if "e2m1" in t.call and "act" in t.call)
ROUTED = (*EVERY[3:HALF:3], *EVERY[HALF + 4 :: 3], FLOAT_CODES, *UNGATED)
TOKENS = (1, 7, 64)


def inputs(t: Text, g: Graph, tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Operands for a number of tokens; the last expert has no pairs, and one of them many."""
    (node,) = g.nodes
    experts = int(node.operands[2].type.shape[0]) - 1
    chosen = np.where(rng.random((tokens, 2)) < 0.4, 0, rng.integers(0, max(1, experts - 1), (tokens, 2)))
    order, starts = moe_route.ref(chosen, experts=experts)
    drawn = t.inputs(g, rng)
    for i, v in enumerate(g.inputs):
        shape = [int(d.subs({"T": tokens})) for d in v.type.shape]
        if i in (1, 2):
            drawn[i] = (order, starts)[i - 1]
        elif list(drawn[i].shape) != shape:
            drawn[i] = 0.1 * rng.standard_normal(shape)
    return drawn


@pytest.mark.parametrize("i", range(len(ROUTED)))
@pytest.mark.parametrize("level", LEVELS)
def test_products_agree_with_the_reference(level: str, i: int, tmp_path: Path) -> None:
    target, t, rng = target_here(level), ROUTED[i], np.random.default_rng(of_test())
    case = Case(f"{i}", t.graph(), EXPERTS, {}, [], exact=True)
    compiled = compile_cases([case], target, tmp_path)[case.name]
    for tokens in TOKENS:
        drawn = inputs(t, case.graph, tokens, rng)
        for threads in (1, 5):
            run_case(replace(case, inputs=drawn, sizes={"T": tokens}), *compiled, threads)


@pytest.mark.parametrize("level", VNNI)
def test_other_instruction_sets_compile(level: str, tmp_path: Path) -> None:
    """Levels that this machine may not be able to run."""
    target = load().target(level)
    sources = [EXPERTS.emit(*t.graph().nodes, {}, target) for t in ROUTED[::3]]
    toolchain = CppToolchain.find(target)
    assert len(toolchain.compile([(Source("tests", "cpp", batch(sources)), "")], tmp_path)) == 1


def node(types: str, attrs: str) -> tuple[Graph, Node]:
    """A first product over a stack that is a weight."""
    stack = "; ".join(f"weight {t}" for t in types.split("; "))
    columns = types.partition("]")[0].rpartition(" ")[2]
    g = Text(
        f"f32[T, {columns}]; i32[2*T]; i32[6]; {stack}", f"quantized_moe_up {{k=2, {attrs}}}", "f32[2*T, 3]"
    ).graph()
    return g, next(iter(g.nodes))


def test_packing_keeps_the_product() -> None:
    g, n = node("u8[5, 6, 128]; f32[5, 6, 2]; u8[5, 6, 2]", "block=[1, 64], zeros=true, bits=3")
    rng = np.random.default_rng(of_test())
    order, starts = moe_route.ref(rng.integers(0, 5, (4, 2)), experts=5)
    rest = [rng.integers(0, 8, [int(d) for d in v.type.shape]) for v in g.inputs[3:]]
    drawn = [rng.standard_normal((4, 128)).astype(np.float32), order, starts, *rest]
    (want,) = run(g, drawn, {"T": 4})
    target = load().target("cpu:portable")
    turned = "transpose{perm=[0, 2, 1]}"
    assert EXPERTS.layouts(n, {}, target) == {3: "pack_nibbles{half=32}", 4: turned, 5: turned}
    EXPERTS.pack(g, n, {}, target, OPS)
    assert [x.op.name for x in g.nodes] == ["pack_nibbles", "transpose", "transpose", "quantized_moe_up"]
    verify(Module(symbols={"T": (1, 64)}, graphs={"main": g}))
    np.testing.assert_array_equal(run(g, drawn, {"T": 4})[0], want)


def test_rejected_nodes() -> None:
    def why(types: str, attrs: str) -> str:
        return str(EXPERTS.reject(node(types, attrs)[1], load().target("cpu:x86-64-v3")))

    rows = "i8[5, 6, 128]; f32[5, 6, 1]"
    assert why(rows, 'block=[1, 0], act="i8", act_block=64') == "None"
    assert "multiple of 32" in why(rows, 'block=[1, 0], act="i8", act_block=48')
    assert "activations of dtype f8e4m3" in why(rows, 'block=[1, 0], act="f8e4m3"')
    assert "blocks of [2, 64]" in why("i8[5, 6, 128]; f32[5, 3, 2]", 'block=[2, 64], act="i8", act_block=64')
    assert "zero points of dtype f32" in why(
        "u8[5, 6, 128]; f32[5, 6, 2]; f32[5, 6, 2]", 'block=[1, 64], zeros=true, bits=4, act="i8", act_block=64'
    )
    assert "other than 128" in why("u8[5, 6, 128]; f32[5, 6, 1]", 'block=[1, 0], zero_point=3, act="i8", act_block=64')
    assert "with zero points" in why(rows, 'block=[1, 0], zero_point=3, act="i8", act_block=64')
    assert "scales of dtype f8e4m3" in why("i8[5, 6, 128]; f8e4m3[5, 6, 1]", "block=[1, 0]")
    assert "dtype i64" in why("i64[5, 6, 128]; f32[5, 6, 1]", "block=[1, 0]")
