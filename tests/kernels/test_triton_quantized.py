"""Triton products over quantised weights in the interpreter compared with the reference: odd shapes, all layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.harness import Case
from kernels.triton_harness import run_case, some, ttir

from llmc.codegen.backends.triton.quantized_gemm import QUANTIZED_GEMM
from llmc.codegen.backends.triton.quantized_gemv import QUANTIZED_GEMV
from llmc.codegen.backends.triton.quantized_problem import halves, scales_factors
from llmc.codegen.kernel import Kernel, Schedule
from llmc.codegen.launch_plan import check_packed
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.ir.verify import verify
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.drawn
KERNELS = (QUANTIZED_GEMV, QUANTIZED_GEMM)
ROWS = (1, 2, 7, 16, 33, 64, 130)
SILU = "mul(mul(a0, sigmoid(a0)), a1)"


@dataclass(frozen=True)
class Shape:
    """A product: dtypes of x, codes and scales, sizes, columns that share a scale (0: all), zero points, epilogue.

    zero: "" for none, a number, or "u8" for an operand.
    """

    name: str
    x: str
    code: str
    scale: str
    n: int
    k: int
    block: int = 0
    zero: str = ""
    parts: int = 1
    body: str = "a0"
    extras: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    dtype: str = ""
    rows: Any = "T"
    weight: bool = True
    wide: bool = False  # codes of dtype u8 have 8 bits

    @property
    def bits(self) -> int:
        return 4 if self.code == "u8" and not self.wide else 8

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block) if self.block else 1

    def graph(self, packed: bool = True) -> Graph:
        """The graph of the product; packed: of codes of 4 bits as the kernels read them."""
        half = halves(self.k, self.block or self.k) if self.bits <= 4 and packed else 0
        g, m = Graph("test"), self.parts * self.n
        x = g.input("x", tensor(self.x, self.rows, self.k))
        code = g.input("code", tensor(self.code, m, self.k // 2 if half else self.k), weight=self.weight)
        table = (self.blocks, m) if half else (m, self.blocks)
        scale = g.input("scale", tensor(self.scale, *table), weight=True)
        zeros = [g.input("zero", tensor("u8", *table), weight=True)] if self.zero == "u8" else []
        extras = [g.input(f"e{i}", tensor(dt, *dims)) for i, (dt, dims) in enumerate(self.extras)]
        attrs: dict[str, Any] = {"block": [1, self.block], "parts": self.parts, "body": self.body, "dtype": self.dtype}
        attrs |= {"zeros": True} if zeros else {"zero_point": int(self.zero or 0)}
        attrs |= {"half": half} if half else {"bits": self.bits}
        op = OPS["packed_nibbles_linear" if half else "quantized_linear"]
        g.outputs = [g.add(op, [x, code, scale, *zeros, *extras], attrs).result]
        return g

    @property
    def node(self) -> Node:
        (node,) = self.graph().nodes
        return node


SHAPES = (
    Shape("rows8", "bf16", "i8", "f32", 37, 133),
    Shape("one8", "f32", "i8", "bf16", 3, 1),
    Shape("silu8", "f16", "i8", "f16", 21, 96, 0, "", 2, SILU),
    Shape("group128", "bf16", "u8", "bf16", 33, 384, 128, "8", 1, "add(add(a0, a1), a2)",
          (("f32", (33,)), ("bf16", ("T", 33)))),
    Shape("group64", "bf16", "u8", "f32", 21, 192, 64, "8", 2, SILU),
    Shape("group32", "f16", "u8", "f16", 35, 96, 32, "7", 1, "mul(a0, a1)", (("f32", ("T", 1)),)),
    Shape("whole", "f32", "u8", "f32", 19, 224, 0, "8", 1, "a0", (), "bf16"),
    Shape("ragged", "bf16", "u8", "bf16", 18, 192, 128, "8"),
    Shape("zeros", "bf16", "u8", "f16", 37, 256, 64, "u8", 2, SILU),
    Shape("zeros128", "f32", "u8", "f32", 5, 256, 128, "u8", 3, "add(mul(a0, a1), a2)"),
    Shape("value8", "bf16", "i8", "f32", 20, 64, weight=False),
)  # fmt: skip


def draw(g: Graph, rows: int) -> list[np.ndarray]:
    """Codes of all values, and scales with which the sums stay near 1."""
    rng = generator()
    out = []
    for v in g.inputs:
        shape = [int(d.subs({"T": rows})) for d in v.type.shape]
        wide = g.inputs[1].type.dtype == "i8"
        if v.name == "code":
            out.append(rng.integers(-128, 128, shape) if wide else rng.integers(0, 256, shape))
        elif v.name == "zero":
            out.append(rng.integers(0, 16, shape))
        elif v.name == "scale":
            out.append(rng.uniform(0.5, 2.0, shape) / (75 if wide else 5) / np.sqrt(int(g.inputs[0].type.shape[-1])))
        else:
            out.append(rng.standard_normal(shape))
    return [x if x.dtype.kind == "i" else x.astype(np.float32) for x in out]


def check(kernel: Kernel, s: Shape, rows: int, schedule: Schedule | None = None) -> None:
    g = s.graph()
    (node,) = g.nodes
    chosen = schedule or kernel.schedules(node, sm_90())[0]
    atol = 2e-3 if "f16" in (s.x, s.dtype) or "bf16" in (s.x, s.dtype) else 2e-5
    # Large tiles round codes times scales to the dtype of x: an error of up to 2 ** -9 of each term.
    half = node.attrs.get("half", 0)
    atol = 2e-2 * s.parts if scales_factors(half, chosen.get("bm", 1), s.scale, s.x) else atol
    run_case(Case(f"{s.name} {rows} {chosen}", g, kernel, chosen, draw(g, rows), atol=atol, sizes={"T": rows}))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_products_agree_with_the_reference(kernel: Kernel, rows: int) -> None:
    for s in SHAPES if rows < 3 else some(SHAPES, 0.3):
        if kernel is QUANTIZED_GEMM or rows <= 16:
            check(kernel, s, rows)


@pytest.mark.parametrize("rows", (1, 3, 8, 16))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_constant_number_of_tokens(kernel: Kernel, rows: int) -> None:
    for s in (SHAPES[0], SHAPES[4], SHAPES[8]):
        check(kernel, replace(s, rows=rows), rows)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_every_schedule(kernel: Kernel) -> None:
    """Those that real sizes are offered, on a product that ends within a tile."""
    real = (Shape("", "bf16", "i8", "bf16", 6144, 4096), Shape("", "bf16", "u8", "bf16", 6144, 4096, 128, "8"),
            Shape("", "f32", "u8", "f32", 4096, 14336, 32, "u8"))  # fmt: skip
    for s in real:
        for schedule in some(kernel.schedules(s.node, sm_90()), 0.2):
            k = 2 * schedule["bk"] + 37 if s.code == "i8" and "bk" in schedule else 3 * 128 * schedule.get("split", 1)
            check(kernel, replace(s, name="odd", n=schedule["bn"] + 1, k=k), 3, schedule)


def test_packing_keeps_the_product() -> None:
    s = Shape("", "f32", "u8", "f32", 6, 192, 64, "8", 2, SILU)
    g = s.graph(packed=False)
    (node,) = g.nodes
    inputs = [x % 16 if v.name == "code" else x for v, x in zip(g.inputs, draw(g, 5), strict=True)]
    (want,) = run(g, inputs, {"T": 5})
    layouts = [k.layouts(node, k.schedules(node, sm_90())[0], sm_90()) for k in KERNELS]
    assert layouts[0] == layouts[1] == {1: "pack_nibbles{half=32}", 2: "transpose{perm=[1, 0]}"}
    with pytest.raises(Diagnostic, match="not packed"):
        check_packed(QUANTIZED_GEMM, node, QUANTIZED_GEMM.schedules(node, sm_90())[0], sm_90())
    QUANTIZED_GEMM.pack(g, node, {}, sm_90(), OPS)
    assert [n.op.name for n in g.nodes] == ["pack_nibbles", "transpose", "packed_nibbles_linear"]
    verify(Module(symbols={"T": (1, 64)}, graphs={"test": g}))
    np.testing.assert_array_equal(run(g, inputs, {"T": 5})[0], want)


def test_rejected_nodes() -> None:
    bad = (
        (Shape("", "bf16", "u8", "bf16", 8, 100, 0, "8"), "multiples of 32"),
        (Shape("", "bf16", "u8", "bf16", 8, 120, 40, "8"), "multiples of 32"),
        (Shape("", "bf16", "u8", "bf16", 8, 128, 0, "128"), "codes of 4 bits"),
        (Shape("", "bf16", "i8", "bf16", 8, 128, 64), "2 scales per row"),
        (Shape("", "bf16", "i8", "bf16", 8, 128, 0, "3"), "with zero points"),
        (Shape("", "bf16", "i8", "bf16", 8, 128, parts=5), "5 parts"),
        (Shape("", "bf16", "u8", "bf16", 8, 128, 0, "8", weight=False), "at compile time"),
        (Shape("", "bf16", "u8", "bf16", 8, 128, 64, "u8", wide=True), "8 bits in dtype u8"),
        (Shape("", "bf16", "f8e4m3", "bf16", 8, 128), "f8e4m3"),
    )
    for s, words in bad:
        (node,) = s.graph(packed=False).nodes
        for kernel in KERNELS:
            assert words in str(kernel.reject(node, sm_90())), s
    assert "99 tokens" in str(QUANTIZED_GEMV.reject(replace(SHAPES[0], rows=99).node, sm_90()))


def ranked(node: Node, rows: int) -> list[tuple[float, str]]:
    found = [(k, s) for k in KERNELS for s in k.schedules(node, sm_90())]
    return sorted((k.cost_us(node, s, sm_90(), {"T": rows}), k.name) for k, s in found)


@pytest.mark.parametrize(("code", "block"), (("i8", 0), ("u8", 128)))
def test_first_schedules(code: str, block: int) -> None:
    s = Shape("", "bf16", code, "bf16", 6144, 4096, block)
    assert ranked(replace(s, rows=1).node, 1)[0][1] == "triton/quantized_gemv"
    for rows in (32, 256, 4096):
        assert ranked(s.node, rows)[0][1] == "triton/quantized_gemm"


def test_codes_are_read_before_the_wait_if_they_are_weights() -> None:
    for weight in (True, False):
        node = Shape("", "bf16", "i8", "bf16", 64, 256, rows=1, weight=weight).node
        text = ttir(QUANTIZED_GEMV.emit(node, QUANTIZED_GEMV.schedules(node, sm_90())[0], sm_90()))
        before, wait, _ = text.partition("griddepcontrol.wait")
        assert wait and ("tt.load" in before) == weight
