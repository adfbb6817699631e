"""CPU kernels compared with this machine's ceilings, which are measured in between on the same threads.

The products and the attention of the Qwen2.5-0.5B shape in bf16 and f32, and products over codes of 8 and 4 bits:
decode as a share of the read bandwidth, a 512-token prompt as a share of the multiply-add rate of floats. Shares are
medians of interleaved pairs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import kit
from bench.kit import THREADS, clock, median, record
from llmc.codegen.backends.cpp.attention import ATTENTION
from llmc.codegen.backends.cpp.cpp_kernel import inline_headers
from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.backends.cpp.linear import LINEAR
from llmc.codegen.backends.cpp.quantized_linear import QUANTIZED_LINEAR
from llmc.codegen.kernel import Kernel, Source
from llmc.ir.graph import Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.types import Type, state, tensor
from llmc.targets import cpu_targets

ROUNDS = 7
TITLE = f"CPU kernels of the Qwen2.5-0.5B shape, medians of {ROUNDS} interleaved with their ceiling"
pytestmark = pytest.mark.benchmark(timer=clock, group="kernels")
SILU = "mul(mul(a0, sigmoid(a0)), a1)"
# name, outputs, depth, parts, body, whether a residual is added
PRODUCTS = (
    ("qkv", 1152, 896, 1, "a0", False),
    ("o", 896, 896, 1, "add(a0, a1)", True),
    ("gate_up", 4864, 896, 2, SILU, False),
    ("down", 896, 4864, 1, "add(a0, a1)", True),
    ("head", 151936, 896, 1, "a0", False),
)


def product(name: str, dtype: str) -> Node:
    _, n, k, parts, body, residual = next(p for p in PRODUCTS if p[0] == name)
    g = Graph("bench")
    target = cpu_targets.native()
    rows = 2 * target.vector // 4
    pair = 2 if dtype == "bf16" else 1
    wp = tensor(dtype, -(-n // (rows // parts)), k // pair, rows, pair)
    operands = [g.input("x", tensor(dtype, "T", k)), g.input("wp", wp, weight=True)]
    operands += [g.input("r", tensor(dtype, "T", n))] if residual else []
    return g.add(OPS["packed_linear"], operands, {"n": n, "parts": parts, "body": body})


def quantized(name: str, bits: int, group: int) -> Node:
    """A product over codes with a bf16 scale per `group` columns (0: per row); rows of x are rounded by 128 columns."""
    _, n, k, parts, body, residual = next(p for p in PRODUCTS if p[0] == name)
    g = Graph("bench")
    rows = 2 * cpu_targets.native().vector // 4
    panels = -(-n // (rows // parts))
    operands = [
        g.input("x", tensor("bf16", "T", k)),
        g.input("wp", tensor("i8" if bits == 8 else "u8", panels, k * bits // 32, rows, 4), weight=True),
        g.input("sp", tensor("bf16", panels, -(-k // group) if group else 1, rows, 1), weight=True),
    ]
    operands += [g.input("r", tensor("bf16", "T", n))] if residual else []
    attrs = {
        "n": n, "bits": bits, "block": group, "zero_point": 0 if bits == 8 else 8, "act": "i8", "act_block": 128,
        "parts": parts, "body": body,
    }  # fmt: skip
    return g.add(OPS["packed_quantized_linear"], operands, attrs)


def attention(context: int) -> Node:
    g = Graph("bench")
    pages = context // 16 + 1
    operands = [
        g.input("q", tensor("bf16", "T", 14, 64)), g.input("kv", state("bf16", pages, 2, 2, 16, 64)),
        g.input("pages", state("i32", 1, pages)), g.input("rows", tensor("i32", "R")),
        g.input("starts", tensor("i32", "R+1")), g.input("positions", tensor("i32", "T")),
    ]  # fmt: skip
    return g.add(OPS["paged_attention"], operands, {"scale": 0.125})


class Bench:
    """Compiled kernels and ceilings in one process."""

    def __init__(self, folder: Path):
        self.target, self.folder = cpu_targets.native(), folder
        self.toolchain = CppToolchain.find(self.target)
        text = inline_headers((Path(__file__).parent / "ceilings.cpp").read_text())
        self.lib = self.load(text)
        for name in ("bench_kernel", "bench_read", "bench_peak_f32", "bench_peak_bf16"):
            getattr(self.lib, name).restype = ctypes.c_double
        self.memory = np.ones(256 << 20, np.uint8)

    def load(self, text: str) -> ctypes.CDLL:
        unit = Source("bench", "cpp", text)
        key = self.toolchain.key(unit)
        path = self.folder / f"{key}.bench.so"
        if not path.exists():  # do not overwrite a mapped library
            path.write_bytes(self.toolchain.compile([(unit, "")], self.folder)[key].binary)
        return ctypes.CDLL(str(path))

    def bandwidth(self) -> float:
        at, nbytes = ctypes.c_void_p(self.memory.ctypes.data), ctypes.c_int64(self.memory.nbytes)
        return self.lib.bench_read(at, nbytes, THREADS)

    def peak(self, dtype: str) -> float:
        return getattr(self.lib, f"bench_peak_{dtype}")(THREADS)

    def kernel(self, k: Kernel, node: Node, sizes: dict[str, int], fill: dict[int, np.ndarray]) -> Callable[[], float]:
        """Return a function that returns seconds per call; it cycles through copies of the weights, so that they come
        from memory.
        """
        source = k.emit(node, k.schedules(node, self.target)[0], self.target)
        entry = getattr(self.load(source.text), source.entry)
        weight = max((_bytes(v.type, sizes) for v in node.operands if v.weight), default=64 << 20)
        sets = max(2, (192 << 20) // weight)
        values = [*node.operands, *node.results]
        fill = fill | {
            i: _random(_bytes(v.type, sizes)) for i, v in enumerate(values) if i not in fill and not v.weight
        }
        copies = [
            [fill[i] if i in fill else _random(_bytes(v.type, sizes)) for i, v in enumerate(values)]
            for _ in range(sets)
        ]
        args = [(ctypes.c_void_p * len(c))(*(b.ctypes.data for b in c)) for c in copies]
        argsets = (ctypes.c_void_p * sets)(*map(ctypes.addressof, args))
        sizes_array = (ctypes.c_int64 * 8)(*(int(d.subs(sizes).const or 0) for d in source.sizes))
        scratch = ctypes.c_int64(source.scratch.const or 0)
        call = lambda: self.lib.bench_kernel(entry, argsets, sizes_array, sets, THREADS, scratch)  # noqa: E731
        call.keep = (copies, args)  # type: ignore[attr-defined]
        return call


def _bytes(t: Type, sizes: dict[str, int]) -> int:
    return int(t.nbytes.subs(sizes).const or 0)


def _random(nbytes: int) -> np.ndarray:
    """Return finite numbers between 0.5 and 2 of either sign (zeros would be too fast), aligned to 64 bytes."""
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    bits = raw[start : start + nbytes].view(np.uint16)
    bits[:] = np.resize(np.random.default_rng(1).integers(0, 1 << 16, 65521, np.uint16), len(bits)) & 0x80FF | 0x3F00
    return bits


def report(benchmark: Any, call: Callable[[], float], ceiling: Callable[[], float], work: float, unit: str) -> None:
    """Time `call` (`work` bytes or flops per call) between measurements of its ceiling."""
    call()
    pairs = [(call(), ceiling()) for _ in range(ROUNDS)]
    seconds = [s for s, _ in pairs]
    rates, shares = sorted(work / s for s in seconds), sorted(work / s / c for s, c in pairs)
    limit, rate, share = median([c for _, c in pairs]), median(rates), median(shares)
    tables = [t for t in kit.TABLES if t.title == TITLE]
    t = tables[0] if tables else kit.table(TITLE, "kernel", "us", "median", "best", "unit", "ceiling", "share")
    numbers = (f"{x / 1e9:.1f}" for x in (rate, rates[-1]))
    t.add(benchmark.name[5:], f"{median(seconds) * 1e6:.0f}", *numbers, unit, f"{limit / 1e9:.1f}", f"{share:.0%}")
    record(benchmark, seconds, limit_rate=limit, share_median=share)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("name", [p[0] for p in PRODUCTS])
@pytest.mark.parametrize("rows", (1, 8))
def test_decode(benchmark: Any, bench: Bench, name: str, dtype: str, rows: int) -> None:
    """Few rows: weight bytes per second, compared with the read bandwidth."""
    node = product(name, dtype)
    call = bench.kernel(LINEAR, node, {"T": rows}, {})
    report(benchmark, call, bench.bandwidth, _bytes(node.operands[1].type, {}), "GB/s")


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("name", [p[0] for p in PRODUCTS[:4]])
@pytest.mark.parametrize("rows", (64, 512))
def test_prefill(benchmark: Any, bench: Bench, name: str, dtype: str, rows: int) -> None:
    """Many rows: flops per second, compared with the rate of the same loop in the first-level cache."""
    node = product(name, dtype)
    flops = 2.0 * rows * next(n * k * parts for product_name, n, k, parts, _, _ in PRODUCTS if product_name == name)
    report(benchmark, bench.kernel(LINEAR, node, {"T": rows}, {}), lambda: bench.peak(dtype), flops, "GFLOP/s")


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128), (4, 32)])
@pytest.mark.parametrize("name", [p[0] for p in PRODUCTS])
@pytest.mark.parametrize("rows", (1, 8))
def test_quantized_decode(benchmark: Any, bench: Bench, name: str, rows: int, bits: int, group: int) -> None:
    """Few rows: bytes of codes and scales per second, compared with the read bandwidth."""
    node = quantized(name, bits, group)
    weights = sum(_bytes(v.type, {}) for v in node.operands[1:3])
    report(benchmark, bench.kernel(QUANTIZED_LINEAR, node, {"T": rows}, {}), bench.bandwidth, weights, "GB/s")


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128), (4, 32)])
@pytest.mark.parametrize("name", [p[0] for p in PRODUCTS[:4]])
@pytest.mark.parametrize("rows", (64, 512))
def test_quantized_prefill(benchmark: Any, bench: Bench, name: str, rows: int, bits: int, group: int) -> None:
    """Many rows: integer operations per second, compared with the rate of float products in the L1 cache."""
    node = quantized(name, bits, group)
    flops = 2.0 * rows * next(n * k * parts for product, n, k, parts, _, _ in PRODUCTS if product == name)
    call = bench.kernel(QUANTIZED_LINEAR, node, {"T": rows}, {})
    report(benchmark, call, lambda: bench.peak("f32"), flops, "GFLOP/s")


@pytest.mark.parametrize(("tokens", "context"), [(1, 1024), (512, 512), (512, 4096)])
def test_attention(benchmark: Any, bench: Bench, tokens: int, context: int) -> None:
    """One row's tokens at the end of its context: flops per second of the visible half."""
    node = attention(context)
    i32: Sequence[Any] = (np.int32,)
    pages = np.arange(context // 16 + 1, dtype=i32[0])
    fill = {
        2: pages, 3: np.zeros(1, i32[0]), 4: np.array([0, tokens], i32[0]),
        5: np.arange(context - tokens, context, dtype=i32[0]),
    }  # fmt: skip
    flops = 4.0 * 14 * 64 * (tokens * (context - tokens) + tokens * (tokens + 1) / 2)
    sizes = {"T": tokens, "R": 1}
    report(benchmark, bench.kernel(ATTENTION, node, sizes, fill), lambda: bench.peak("bf16"), flops, "GFLOP/s")
