"""The Triton products in the interpreter compared with the reference: odd shapes, every epilogue, one token to many;
the first schedules for real models; other dtypes and extras as binaries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator, of_test
from kernels.harness import Case
from kernels.triton_harness import ONE_TARGET, run_case, some, ttir

from llmc.codegen.backends.triton.gemm_small import GEMM, GEMM_SMALL
from llmc.codegen.backends.triton.gemm_tma import GEMM_TMA, has_maps
from llmc.codegen.backends.triton.gemv import GEMV, MEASURED
from llmc.codegen.backends.triton.linear_problem import Product
from llmc.codegen.backends.triton.triton_kernel import CODES
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.codegen.kernel import TRIGGER_AFTER_LOADS, Kernel, Schedule, Source
from llmc.ir.graph import Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import gfx942, sm_80, sm_90
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
KERNELS = (GEMV, GEMM_SMALL, GEMM)
WAIT, GO = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
ALL = (*KERNELS, GEMM_TMA)
ROWS = (1, 2, 3, 5, 16, 17, 33, 130)
SILU = "mul(mul(a0, sigmoid(a0)), a1)"
GELU = "mul(mul(a0, 0.5), add(erf(mul(a0, 0.7071067811865476)), 1.0))"
# Scales of weight rows and of tokens.
SCALED, SCALES = "mul(mul(a0, a1), a2)", (("f32", (37,)), ("f32", ("T", 1)))
SILU_SCALED = "mul(mul(mul(mul(a0, a2), a3), sigmoid(mul(mul(a0, a2), a3))), mul(mul(a1, a2), a3))"
# (n, k, parts) of the products of one layer and the head.
MODELS = {
    "llama-3.1-8b": ((6144, 4096, 1), (4096, 4096, 1), (14336, 4096, 2), (4096, 14336, 1), (128256, 4096, 1)),
    "llama-3.2-1b": ((3072, 2048, 1), (2048, 2048, 1), (8192, 2048, 2), (2048, 8192, 1), (128256, 2048, 1)),
    "qwen3-0.6b": ((4096, 1024, 1), (1024, 2048, 1), (3072, 1024, 2), (1024, 3072, 1), (151936, 1024, 1)),
}
REAL = tuple(dict.fromkeys(s for shapes in MODELS.values() for s in shapes))


@dataclass(frozen=True)
class Shape:
    """A product: dtypes of x and w, sizes, epilogue, extras as (dtype, dims), dtype of the result, tokens."""

    name: str
    x: str
    w: str
    n: int
    k: int
    parts: int = 1
    body: str = "a0"
    extras: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    dtype: str = ""
    rows: Any = "T"
    weight: bool = True

    def graph(self) -> Graph:
        g = Graph("test")
        lead = self.rows if isinstance(self.rows, tuple) else (self.rows,)
        x = g.input("x", tensor(self.x, *lead, self.k))
        w = g.input("w", tensor(self.w, self.parts * self.n, self.k), weight=self.weight)
        extras = [g.input(f"e{i}", tensor(dt, *dims)) for i, (dt, dims) in enumerate(self.extras)]
        attrs = {"parts": self.parts, "body": self.body, "dtype": self.dtype}
        g.outputs = [g.add(OPS["linear_map"], [x, w, *extras], attrs).result]
        return g


SHAPES = (
    Shape("plain", "bf16", "bf16", 37, 133),
    Shape("one", "bf16", "bf16", 3, 1),
    Shape("column", "bf16", "bf16", 1, 40, 1, "add(a0, a1)", (("bf16", ("T", 1)),)),
    Shape("residual", "bf16", "bf16", 33, 72, 1, "add(add(a0, a1), a2)", (("f32", (33,)), ("bf16", ("T", 33)))),
    Shape("silu", "bf16", "bf16", 21, 64, 2, SILU),
    Shape("i8", "i8", "i8", 37, 133, 1, SCALED, SCALES, dtype="bf16"),
    Shape("i8 silu", "i8", "i8", 21, 64, 2, SILU_SCALED, (("bf16", (21,)), *SCALES[1:]), dtype="bf16"),
    Shape("f8", "f8e4m3", "f8e4m3", 37, 133, 1, SCALED, SCALES, dtype="bf16"),
    Shape("f8 silu", "f8e4m3", "f8e4m3", 21, 64, 2, SILU_SCALED, (("bf16", (21,)), *SCALES[1:]), dtype="f32"),
    Shape("gelu", "f16", "f16", 35, 29, 1, GELU),
    Shape("f32", "f32", "f32", 50, 45, 1, "add(a0, a1)", (("f32", ("T", 50)),)),
    Shape("head", "bf16", "bf16", 70, 56, dtype="f32"),
    Shape("mixed", "f32", "bf16", 41, 51, 1, "mul(a0, a1)", (("f32", ("T", 1)),), "bf16"),
    Shape("tanh", "f16", "f16", 18, 29, 1, "tanh(mul(a0, a1))", (("f32", ()),)),
    Shape("three", "bf16", "f32", 24, 31, 3, "add(select(gt(a0, 0.0), a1, a2), a3)", (("f16", (1, 24)),), "f32"),
    Shape("value", "bf16", "bf16", 37, 30, weight=False),
)
# Leading axes of their own, of which an extra has some.
LEADING = Shape(
    "leading", "f32", "f32", 9, 14, 1, "add(mul(a0, a1), a2)", (("f32", ("T", 1, 9)), ("f32", (3, 1))), rows=("T", 3)
)


def draw(g: Graph, rows: int) -> list[np.ndarray]:
    """Fresh inputs; the products of sums stay near 1."""
    rng = generator()
    shapes = [[int(d.subs({"T": rows})) for d in v.type.shape] for v in g.inputs]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    arrays[1] /= np.sqrt(shapes[1][1])
    codes = [v.type.dtype in CODES for v in g.inputs[:2]]
    for i in range(2):  # the scales that follow keep the products of sums near 1
        if codes[i]:
            arrays[i] = rng.integers(-127, 128, shapes[i]) if g.inputs[i].type.dtype == "i8" else arrays[i] * 8
    if any(codes):
        scale = arrays[0].std() * arrays[1].std() * np.sqrt(shapes[1][1]) + 1e-6
        arrays[2] = (arrays[2] / scale).astype(np.float32)
    return arrays


def mappable(s: Shape) -> Shape:
    """The nearest product that tensor maps can hold."""
    x = s.x if s.x in ("f16", *CODES) else "bf16"
    parts, body = (s.parts, s.body) if s.parts < 3 else (2, SILU)
    extras = () if parts != s.parts else s.extras
    return replace(
        s,
        x=x,
        w=x,
        k=-(-s.k // 16) * 16,
        parts=parts,
        body=body,
        extras=extras,
        dtype=s.dtype or (s.x if s.x not in CODES else "bf16"),
    )


def check(kernel: Kernel, s: Shape, rows: int, schedule: Schedule | None = None) -> None:
    """Check a case; kernels with tensor maps need 16-bit factors and rows of a multiple of 16 bytes."""
    if kernel is GEMM_TMA:
        s = mappable(s)
    g = s.graph()
    (node,) = g.nodes
    chosen = schedule or kernel.schedules(node, sm_90())[0]
    # Sums of 8-bit floats have about 14 bits on Hopper.
    atol = 2e-3 if {"f16", "bf16", "f8e4m3"} & {s.x, s.dtype} else 2e-5
    run_case(Case(f"{s.name} {rows} {chosen}", g, kernel, chosen, draw(g, rows), atol=atol, sizes={"T": rows}))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_products_agree_with_the_reference(kernel: Kernel, rows: int) -> None:
    """The schedule is the first one, but the last one for streams of many tokens, since it has the most per program."""
    for s in SHAPES:
        (node,) = (mappable(s) if kernel is GEMM_TMA else s).graph().nodes
        first = kernel.schedules(node, sm_90())[0 if rows < 5 else -1]
        if kernel is not GEMV or rows < 4 or s.n < 4 or s.n * rows < 100:
            check(kernel, s, rows, first if kernel is GEMV else None)


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_leading_axes_and_extras_over_some_of_them(kernel: Kernel) -> None:
    check(kernel, LEADING, 5)


@pytest.mark.parametrize("rows", (1, 3, 8, 11))
@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_a_constant_number_of_tokens(kernel: Kernel, rows: int) -> None:
    residual = (("f32", (33,)), ("bf16", (rows, 33)))
    for s in (replace(SHAPES[3], extras=residual), SHAPES[4], SHAPES[0])[: 1 if rows > 8 else 3]:
        check(kernel, replace(s, rows=rows), rows)


def offered(kernel: Kernel, dtype: str) -> dict[int, list[Schedule]]:
    """parts -> every schedule that real shapes are offered, for one token and for any number."""
    out: dict[int, dict[str, Schedule]] = {}
    for n, k, parts in REAL:
        for rows in (1, "T"):
            (node,) = Shape("", dtype, dtype, n, k, parts, SILU if parts == 2 else "a0", rows=rows).graph().nodes
            if kernel.reject(node, sm_90()):
                continue
            for s in kernel.schedules(node, sm_90()):
                out.setdefault(parts, {})[str(s)] = s
    return {parts: list(found.values()) for parts, found in out.items()}


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_every_schedule(kernel: Kernel, dtype: str) -> None:
    """Half of all, on a product that is no multiple of anything, deep enough for three steps of every tile."""
    for parts, schedules in offered(kernel, dtype).items():
        for schedule in some(schedules):
            depth = 2 * schedule["bk"] + 37
            s = Shape("odd", dtype, dtype, schedule["bn"] + 1, depth, parts, SILU if parts == 2 else "a0")
            check(kernel, s, 2, schedule)


def node_of(n: int, k: int, parts: int, rows: Any = "R") -> Node:
    (node,) = Shape("", "bf16", "bf16", n, k, parts, SILU if parts == 2 else "a0", rows=rows).graph().nodes
    return node


def ranked(node: Node, rows: int) -> list[tuple[float, str, Schedule]]:
    found = [(k, s) for k in ALL if k.reject(node, sm_90()) is None for s in k.schedules(node, sm_90())]
    env = {"R": rows, "T": rows}
    return sorted(((k.cost_us(node, s, sm_90(), env), k.name, s) for k, s in found), key=lambda x: x[0])


@pytest.mark.parametrize(("n", "k", "parts"), REAL)
def test_first_schedules(n: int, k: int, parts: int) -> None:
    """By predicted cost only: streams for one token, tiles for some, large tiles for prompts."""
    expected = {1: {"gemv"}, 2: {"gemv", "gemm_small"}, 8: {"gemv", "gemm_small"}, 16: {"gemv", "gemm_small"}}
    expected |= {m: {"gemm_small"} for m in (17, 32, 64)} | {
        m: {"gemm_small", "gemm_tma"} for m in (100, 128, 200, 256)
    }
    expected |= {m: {"gemm_tma"} for m in (4096, 8192)}
    for m, names in expected.items():
        us, name, schedule = ranked(node_of(n, k, parts, 1 if m == 1 else "R"), m)[0]
        assert name.partition("/")[2] in names, f"{m} tokens: {name} {schedule} {us:.1f} us"
        if "bm" in schedule and m <= 32:
            assert schedule["bm"] >= m, f"{m} tokens read the weights again: {schedule}"


def test_one_token_is_streamed_as_measured() -> None:
    """Each measured shape is offered its own best schedule first, dealt to its parts."""
    for rows, k, (bn, bk, warps, _) in MEASURED:
        parts = next((p for n, d, p in REAL if n * p == rows and d == k), 1)
        _, name, s = ranked(node_of(rows // parts, k, parts, 1), 1)[0]
        assert (name, s["bn"] * parts, s["warps"]) == ("triton/gemv", bn, warps), (rows, k, s)
        assert s["bk"] >= bk and s["rows"] == 1


def sampled(rng: random.Random, target: Target, count: int) -> Iterator[Source]:
    """Some of all offers, with all kinds of extras."""
    for _ in range(count):
        kernel, (n, k, parts) = rng.choice(ALL if has_maps(target) else KERNELS), rng.choice(REAL)
        dtype = rng.choice(("bf16", "bf16", "f16", *(["f32"] * (kernel is not GEMM_TMA))))
        extras = (("f32", (n,)), (dtype, ("T", n)))
        body = "add(add(a0, a1), a2)" if parts == 1 else f"add(add({SILU}, a2), a3)"
        (node,) = Shape("", dtype, dtype, n, k, parts, body, extras).graph().nodes
        yield kernel.emit(node, rng.choice(kernel.schedules(node, target)), target)


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_real_shapes_compile(target: Target, tmp_path: Path) -> None:
    """A random choice of schedules, always with the first one."""
    sources = list(sampled(random.Random(of_test()), target, 6))
    for kernel in ALL if has_maps(target) else KERNELS:
        node = node_of(*REAL[2])
        sources.append(kernel.emit(node, kernel.schedules(node, target)[0], target))
    made = TritonToolchain.find(target).compile([(s, "") for s in sources], tmp_path, jobs=1)
    assert all(c.shared <= target.limits.shared for c in made.values())


def test_rejected_nodes() -> None:
    g = Graph("test")
    x, w = g.input("x", tensor("bf16", 99, 8)), g.input("w", tensor("bf16", 10, 8), weight=True)
    node = g.add(OPS["linear_map"], [x, w], {"parts": 5, "body": "a0"})
    assert all("5 parts" in str(k.reject(node, sm_90())) for k in KERNELS)
    codes = g.add(
        OPS["linear_map"], [g.input("c", tensor("i8", 99, 8)), w], {"parts": 1, "body": "a0", "dtype": "bf16"}
    )
    assert all("factors of i8 and bf16" in str(k.reject(codes, sm_90())) for k in (GEMM_SMALL, GEMM))
    floats = g.add(OPS["linear"], [g.input("f", tensor("f8e4m3", 9, 8)), g.input("v", tensor("f8e4m3", 10, 8))])
    assert "no instructions for f8e4m3" in str(GEMM.reject(floats, sm_80()))
    assert "99 tokens" in str(GEMV.reject(g.add(OPS["linear"], [x, w]), sm_90()))
    v = g.input("v", tensor("bf16", "T", 8))
    assert "not constant" in str(GEMM_SMALL.reject(g.add(OPS["linear"], [x, v]), sm_90()))


def test_nodes_that_tensor_maps_cannot_describe_are_rejected() -> None:
    bad = ((Shape("", "bf16", "bf16", 16, 12), "24 bytes"), (Shape("", "f32", "f32", 16, 16), "f32"),
           (Shape("", "bf16", "bf16", 16, 16, 3, "add(add(a0, a1), a2)"), "3 parts"))  # fmt: skip
    for s, words in bad:
        (node,) = s.graph().nodes
        assert words in str(GEMM_TMA.reject(node, sm_90()))
    for target in (sm_80(), gfx942()):
        assert "does not support TMA" in str(GEMM_TMA.reject(node_of(64, 256, 1), target))


def test_weights_are_read_before_the_wait_and_values_behind_it() -> None:
    for kernel in (GEMV, GEMM_SMALL):
        for weight in (True, False):
            s = Shape("", "bf16", "bf16", 64, 256, rows=1, weight=weight)
            (node,) = s.graph().nodes
            text = ttir(kernel.emit(node, kernel.schedules(node, sm_90())[0], sm_90()))
            before, wait, _ = text.partition(WAIT)
            assert wait and ("tt.load" in before or "prefetch" in before) == weight
            assert text.count(WAIT) == text.count(GO) == 1


@pytest.mark.parametrize("kernel", [GEMM_SMALL, GEMM, GEMM_TMA], ids=lambda k: k.name)
def test_a_late_launch_begins_behind_the_last_load(kernel: Kernel) -> None:
    node = node_of(64, 256, 2)
    first = kernel.schedules(node, sm_90())[0]
    early, late = (ttir(kernel.emit(node, {**first, **more}, sm_90())) for more in ({}, {TRIGGER_AFTER_LOADS: 1}))
    assert early.index(WAIT) < early.index(GO) < early.index("scf.for")
    assert late.index(WAIT) < late.index("scf.for") < late.index("tt.dot") < late.index(GO) < late.index("tt.store")
    assert [x.count(y) for x in (early, late) for y in (WAIT, GO)] == [1, 1, 1, 1]


def test_the_bytes_of_a_product() -> None:
    p = Product(node_of(14336, 4096, 2))
    assert p.weight_bytes == 2 * 28672 * 4096
    assert p.bytes({"R": 3}) == p.weight_bytes + 3 * 2 * (4096 + 14336)
