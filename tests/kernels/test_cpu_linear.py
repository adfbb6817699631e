"""Products on all four CPU levels compared with the reference: odd shapes, every storage dtype, one row to many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.harness import Case, compile_cases, run_case

from llmc.codegen.backends.cpp.cpp_kernel import without_headers
from llmc.codegen.backends.cpp.linear import LINEAR
from llmc.extension import load
from llmc.ir.graph import Graph, Module
from llmc.ir.ops import OPS
from llmc.ir.ops.packed import pack_panel
from llmc.ir.text import show
from llmc.ir.types import tensor
from llmc.ir.verify import verify
from llmc.targets import cpu_targets
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
LEVELS = ("cpu:native", "cpu:x86-64-v4", "cpu:x86-64-v3", "cpu:portable")
ROWS = (1, 2, 3, 7, 16, 33, 65, 257)
SILU = "mul(mul(a0, sigmoid(a0)), a1)"


@dataclass(frozen=True)
class Shape:
    """A product: its dtypes (x, w, out), sizes, epilogue, extras as (dtype, dims) and changes to the first schedule."""

    name: str
    x: str
    w: str
    n: int
    k: int
    parts: int = 1
    body: str = "a0"
    extras: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    dtype: str = ""
    change: tuple[tuple[str, int], ...] = ()


SHAPES = (
    Shape("bf16", "bf16", "bf16", 70, 66),
    Shape("odd", "bf16", "bf16", 33, 37, 1, "add(add(a0, a1), a2)", (("f32", (33,)), ("bf16", ("T", 33)))),
    Shape("silu", "bf16", "bf16", 37, 64, 2, SILU),
    Shape("f32", "f32", "f32", 50, 45, 1, "add(a0, a1)", (("f32", ("T", 50)),)),
    Shape("mixed", "f32", "bf16", 41, 51, 1, "mul(a0, a1)", (("f32", ("T", 1)),), "bf16"),
    Shape("f16", "f16", "f16", 35, 29, 1, "tanh(mul(a0, a1))", (("f32", ()),)),
    Shape("wide", "bf16", "f32", 40, 31, 3, "add(select(gt(a0, 0.0), a1, a2), a3)", (("f16", (1, 40)),), "f32"),
    Shape("deep", "bf16", "bf16", 72, 202, 2, SILU, (), "", (("kc", 48), ("mb", 1))),
    Shape("deep32", "f32", "f32", 19, 203, 1, "a0", (), "", (("kc", 50), ("mb", 2))),
)


def build(s: Shape, target: Target) -> Graph:
    """The product over its packed weight, with a symbolic number of rows."""
    g = Graph("test")
    x = g.input("x", tensor(s.x, "T", s.k))
    w = g.input("w", tensor(s.w, s.parts * s.n, s.k), weight=True)
    extras = [g.input(f"e{i}", tensor(dt, *dims)) for i, (dt, dims) in enumerate(s.extras)]
    attrs = {"parts": s.parts, "body": s.body, "dtype": s.dtype}
    node = g.add(OPS["linear_map"], [x, w, *extras], attrs)
    g.outputs = [node.result]
    assert LINEAR.reject(node, target) is None
    LINEAR.pack(g, node, LINEAR.schedules(node, target)[0], target, OPS)
    verify(Module({"test": g}, {"T": (1, 512)}))
    new = g.outputs[0].node
    assert new is not None
    packed = new.operands[1]
    assert packed.node is not None
    alone = Graph("test")
    weight = alone.input("wp", packed.type, weight=True)
    operands = [alone.input("x", x.type), weight, *(alone.input(e.name, e.type) for e in extras)]
    alone.inputs = [operands[0], weight, *operands[2:]]
    alone.outputs = [alone.add(new.op, operands, new.attrs).result]
    return alone


def draw(s: Shape, g: Graph, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    def normal(*dims: Any) -> np.ndarray:
        return rng.standard_normal([rows if d == "T" else d for d in dims]).astype(np.float32)

    wp = g.inputs[1].type
    layout = {"rows": wp.shape[2].const, "pair": wp.shape[3].const, "parts": s.parts}
    packed = pack_panel.ref(normal(s.parts * s.n, s.k), **layout)
    return [normal(rows, s.k), packed, *(normal(*dims) for _, dims in s.extras)]


def target_here(level: str) -> Target:
    """The target; skips the test if this machine cannot run it."""
    target = load().target(level)
    if not cpu_targets.native().features >= target.features:
        pytest.skip(f"this machine cannot run {target.name}")
    return target


@pytest.mark.parametrize("s", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("level", LEVELS)
def test_products_agree_with_the_reference(level: str, s: Shape, tmp_path: Path) -> None:
    """Every number of rows, and more threads than panels."""
    target = target_here(level)
    g = build(s, target)
    (node,) = g.nodes
    schedule = LINEAR.schedules(node, target)[0] | dict(s.change)
    case = Case(s.name, g, LINEAR, schedule, [], atol=2e-4)
    compiled = compile_cases([case], target, tmp_path)[s.name]
    for rows in ROWS:
        run_case(replace(case, inputs=draw(s, g, rows, np.random.default_rng(rows))), *compiled)
    run_case(replace(case, inputs=draw(s, g, 40, np.random.default_rng(5))), *compiled, threads=7)


def test_packing_is_the_same_product() -> None:
    s, target = SHAPES[2], load().target("cpu:x86-64-v3")
    g = build(s, target)
    (node,) = g.nodes
    assert "packed_linear" in show(Module({"test": g}, {"T": (1, 512)}))
    first, second = (LINEAR.emit(node, LINEAR.schedules(node, target)[0], target) for _ in range(2))
    assert first == second
    assert [str(d) for d in first.sizes] == ["T"]
    assert "(bf16[sizes[0], 64], bf16[5, 32, 16, 2])" in without_headers(first.text).splitlines()[0]


def test_rejected_nodes() -> None:
    target = load().target("cpu:x86-64-v3")
    g = Graph("test")
    x, y = g.input("x", tensor("f32", "T", 4)), g.input("y", tensor("f32", 6, 4))
    assert "not known at compile time" in str(LINEAR.reject(g.add(OPS["linear"], [x, y]), target))
    z = g.input("z", tensor("f32", 2, "T", 4))
    w, e = g.input("w", tensor("f32", 6, 4), weight=True), g.input("e", tensor("f32", 2, 1, 6))
    some = g.add(OPS["linear_map"], [z, w, e], {"parts": 1, "body": "add(a0, a1)"})
    assert "broadcast" in str(LINEAR.reject(some, target))
