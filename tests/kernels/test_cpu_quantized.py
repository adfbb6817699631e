"""Products over quantised weights on all CPU levels compared with the float64 reference: odd shapes, 1 to many rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import of_test
from kernels.harness import Buffer, Case, Ctx, batch, compile_cases, run_case
from kernels.test_cpu_linear import SILU, target_here

from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.backends.cpp.quantized_linear import QUANTIZED_LINEAR
from llmc.codegen.kernel import Source
from llmc.extension import load
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.interp import round_to_type, run, run_node
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.ir.verify import verify
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
VNNI = ("cpu:x86-64-v4+avx512_vnni", "cpu:x86-64-v3+avx_vnni")
LEVELS = ("cpu:native", "cpu:x86-64-v4", "cpu:x86-64-v3", "cpu:portable", *VNNI)
ROWS = (1, 2, 7, 16, 64, 257)


@dataclass(frozen=True)
class Shape:
    """A product: dtypes of x, codes and scales, sizes, blocks, zero points (a number or their dtype), epilogue.

    extras are (dtype, dims); change overrides entries of the first schedule.
    """

    name: str
    x: str
    code: str
    scale: str
    n: int
    k: int
    block: int = 0
    zero: int | str = 0
    act: str = "i8"
    act_block: int = 0
    parts: int = 1
    body: str = "a0"
    extras: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    dtype: str = ""
    change: tuple[tuple[str, int], ...] = ()

    @property
    def bits(self) -> int:
        return 8 if self.code == "i8" or self.zero == 128 else 4


RESIDUAL = (("f32", (33,)), ("bf16", ("T", 33)))
SHAPES = (
    Shape("rows8", "bf16", "i8", "f32", 70, 96),
    Shape("rows4", "f32", "u8", "f32", 37, 130, 0, 8, act_block=32),
    Shape("odd8", "bf16", "i8", "bf16", 33, 301, 128, 0, "i8", 128, 1, "add(add(a0, a1), a2)", RESIDUAL),
    Shape("odd4", "bf16", "u8", "f16", 33, 301, 128, 8, "i8", 128, 1, "add(add(a0, a1), a2)", RESIDUAL),
    Shape("silu8", "bf16", "u8", "f16", 37, 256, 64, 128, "i8", 128, 2, SILU),
    Shape("silu4", "bf16", "u8", "bf16", 37, 256, 32, 8, "i8", 0, 2, SILU),
    Shape("zeros", "f32", "u8", "f16", 41, 190, 64, "u8", "i8", 96, 1, "mul(a0, a1)", (("f32", ("T", 1)),), "bf16"),
    Shape("zeros0", "f32", "u8", "f32", 20, 70, 0, "f16"),
    Shape("float8", "bf16", "i8", "f16", 40, 99, 32, 0, ""),
    Shape("float4", "f32", "u8", "f32", 35, 97, 0, 7, "", 0, 2, SILU),
    Shape("floats", "f32", "u8", "bf16", 19, 161, 64, "f32", ""),
    Shape("deep8", "f32", "i8", "f32", 19, 1100, 128, 0, "i8", 128, 2, SILU, (), "", (("kc", 300), ("mb", 2))),
    Shape("deep4", "f32", "u8", "f16", 19, 1100, 0, 8, "i8", 256, 1, "a0", (), "", (("kc", 300), ("mb", 1))),
    Shape("tiny", "f32", "i8", "f32", 1, 1),
    Shape("four", "f32", "u8", "f32", 10, 65, 32, 8, "i8", 64, 4, "add(mul(a0, a1), mul(a2, a3))"),
)


def product(s: Shape) -> Graph:
    """The product as `lower-quantized` leaves it, with a symbolic number of rows."""
    g = Graph("test")
    m, c = s.parts * s.n, -(-s.k // s.block) if s.block else 1
    x = g.input("x", tensor(s.x, "T", s.k))
    weight = [g.input("code", tensor(s.code, m, s.k), weight=True)]
    weight += [g.input("scale", tensor(s.scale, m, c), weight=True)]
    zeros = isinstance(s.zero, str)
    weight += [g.input("zero", tensor(s.zero, m, c), weight=True)] if isinstance(s.zero, str) else []
    extras = [g.input(f"e{i}", tensor(dt, *dims)) for i, (dt, dims) in enumerate(s.extras)]
    attrs = {
        "block": [1, s.block], "zero_point": 0 if zeros else s.zero, "zeros": zeros, "act": s.act,
        "act_block": s.act_block, "parts": s.parts, "body": s.body, "dtype": s.dtype,
        "bits": 4 if s.code == "u8" and s.zero != 128 else 8,
    }  # fmt: skip
    g.outputs = [g.add(OPS["quantized_linear"], [x, *weight, *extras], attrs).result]
    return g


def pack(g: Graph, target: Target) -> Node:
    """Replace the node of `product` by one over packed operands."""
    (node,) = g.nodes
    assert QUANTIZED_LINEAR.reject(node, target) is None
    QUANTIZED_LINEAR.pack(g, node, QUANTIZED_LINEAR.schedules(node, target)[0], target, OPS)
    verify(Module({"test": g}, {"T": (1, 512)}))
    new = g.outputs[0].node
    assert new is not None
    return new


def alone(node: Node) -> Graph:
    """The node in a graph of its own."""
    g = Graph("test")
    operands = [g.input(f"x{i}", v.type, weight=1 <= i < 3) for i, v in enumerate(node.operands)]
    g.outputs = [g.add(node.op, operands, node.attrs).result]
    return g


def draw(s: Shape, g: Graph, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Inputs of `product`; rows of x differ in size, and one of several has a block of zeros and one large value."""
    out = []
    for v in g.inputs:
        shape = [int(d.subs({"T": rows})) for d in v.type.shape]
        if v.name == "code":
            low, high = (-128, 128) if s.code == "i8" else (0, 1 << s.bits)
            out.append(rng.integers(low, high, shape))
        elif v.name == "zero":
            out.append(rng.integers(0, 16, shape))
        else:
            out.append(rng.standard_normal(shape).astype(np.float32))
    out[0] *= 2.0 ** rng.integers(-9, 2, (rows, 1))
    if rows > 1:
        out[0][rows // 2, : s.k // 2 + 1] = 0
        out[0][rows // 2, -1] = 40
    out[2] = (0.5 + np.abs(out[2])) / (np.sqrt(s.k) * 2 ** (s.bits - 1))
    return out


def packed_operands(g: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The operands of the packed product in `g`, computed from the inputs of `product`."""
    held = {v: round_to_type(x, v.type) for v, x in zip(g.inputs, inputs, strict=True)}
    *before, node = g.nodes
    for n in before:
        held |= zip(n.results, run_node(n, [held[v] for v in n.operands], {}), strict=True)
    return [held[v] for v in node.operands]


@pytest.mark.parametrize("s", SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("level", LEVELS)
def test_products_agree_with_the_reference(level: str, s: Shape, tmp_path: Path) -> None:
    """Every number of rows, more threads than panels, values that are ties when rounded, and values not finite."""
    target, g, rng = target_here(level), product(s), np.random.default_rng(of_test())
    node = pack(g, target)
    schedule = QUANTIZED_LINEAR.schedules(node, target)[0] | dict(s.change)
    case = Case(s.name, alone(node), QUANTIZED_LINEAR, schedule, [], rtol=1e-5, atol=1e-5, exact=True)
    compiled = compile_cases([case], target, tmp_path)[s.name]
    for rows in ROWS:
        run_case(replace(case, inputs=packed_operands(g, draw(s, product(s), rows, rng))), *compiled)
    run_case(replace(case, inputs=packed_operands(g, draw(s, product(s), 40, rng))), *compiled, threads=7)
    run_case(replace(case, inputs=packed_operands(g, ties(s, rng))), *compiled)
    if s.name in ("rows8", "rows4", "odd8"):
        check_not_finite(s, g, case, compiled[1])


def ties(s: Shape, rng: np.random.Generator) -> list[np.ndarray]:
    """Inputs whose x are ties of rounding or next to one, for which an error of one code exceeds the tolerance."""
    inputs = draw(s, product(s), 9, rng)
    if s.act:
        inputs[0] = rng.integers(-254, 255, inputs[0].shape) / 2.0 + rng.choice([0, 1e-5, -1e-5], inputs[0].shape)
        inputs[0][:, ::32] = 127
        inputs[0] *= 2.0**-7
    return inputs


def check_not_finite(s: Shape, g: Graph, case: Case, function: Any) -> None:
    """A NaN or an infinity in a row of x makes the row of the output NaN, and no other row."""
    inputs = packed_operands(g, draw(s, product(s), 3, np.random.default_rng(1)))
    for value in (np.nan, np.inf):
        inputs[0][1, 5] = value
        (node,) = case.graph.nodes
        buffers = [Buffer.holding(x, v.type) for x, v in zip(inputs, node.operands, strict=True)]
        out = Buffer(3 * s.n * DTYPES[node.result.type.dtype].bits // 8)
        nscratch = int(QUANTIZED_LINEAR.scratch(node, case.schedule, load().target("cpu:portable")).const or 0)
        scratch = Buffer(2 * nscratch)
        ctx = Ctx(0, 1, scratch.body.ctypes.data, 2 * nscratch)
        args = (ctypes.c_void_p * (len(buffers) + 1))(*(b.body.ctypes.data for b in [*buffers, out]))
        function(ctypes.byref(ctx), args, (ctypes.c_int64 * 1)(3))
        got = out.get(node.result.type, (3, s.n)).astype(np.float32)
        assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all(), value


@pytest.mark.parametrize("s", SHAPES, ids=lambda s: s.name)
def test_packing_is_the_same_product(s: Shape) -> None:
    g, packed = product(s), product(s)
    pack(packed, load().target("cpu:x86-64-v3"))
    inputs = draw(s, g, 3, np.random.default_rng(of_test()))
    np.testing.assert_array_equal(run(g, inputs, exact=True)[0], run(packed, inputs, exact=True)[0])


@pytest.mark.parametrize("level", VNNI)
def test_other_instruction_sets_compile(level: str, tmp_path: Path) -> None:
    """Levels that this machine may not be able to run."""
    target = load().target(level)
    sources = []
    for s in SHAPES[2:8]:
        node = pack(product(s), target)
        sources.append(QUANTIZED_LINEAR.emit(node, QUANTIZED_LINEAR.schedules(node, target)[0], target))
    toolchain = CppToolchain.find(target)
    assert len(toolchain.compile([(Source("tests", "cpp", batch(sources)), "")], tmp_path)) == 1


def changed(s: Shape, **attrs: Any) -> str | None:
    """Why the kernel refuses the product with other attributes."""
    (node,) = product(s).nodes
    node.attrs.update(attrs)
    return QUANTIZED_LINEAR.reject(node, load().target("cpu:x86-64-v3"))


def test_rejected_nodes() -> None:
    plain = Shape("plain", "f32", "u8", "f32", 8, 64, 32, 8)
    assert changed(plain) is None
    assert "multiple of 32" in str(changed(plain, act_block=16))
    assert "rows share" in str(changed(plain, block=(2, 32)))
    assert "scales of 48 columns" in str(changed(replace(plain, k=96, block=48)))
    assert "f8e4m3" in str(changed(plain, act="f8e4m3"))
    assert "zero point 20" in str(changed(plain, zero_point=20))
    assert "zero points other" in str(changed(replace(plain, code="i8", zero="u8")))
    assert "f8e4m3 is not" in str(changed(replace(plain, code="f8e4m3", zero=0)))
    assert "columns; the maximum" in str(changed(replace(plain, k=70000, block=0)))
    (node,) = product(plain).nodes
    node.operands[1].weight = False
    assert "compile time" in str(QUANTIZED_LINEAR.reject(node, load().target("cpu:portable")))
