"""The matrix instruction that Triton chooses for a tile is that by which kernels name the order of their sums."""

from __future__ import annotations

import pytest
import triton
from draw import SEED
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmc.codegen.backends.triton.gemm_small import GEMM, GEMM_SMALL, Gemm
from llmc.codegen.backends.triton.tiling import dot_order
from llmc.codegen.backends.triton.triton_toolchain import load_entry
from llmc.codegen.kernel import Schedule, Source
from llmc.ir.graph import Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_80, sm_90
from llmc.targets.target import Target

# kernel, tokens, columns and warps of a tile; the parts of the product.
TILES = (
    (GEMM_SMALL, 16, 64, 4, 1), (GEMM_SMALL, 16, 32, 4, 2), (GEMM_SMALL, 8, 64, 4, 1), (GEMM_SMALL, 16, 32, 4, 1),
    (GEMM_SMALL, 256, 64, 4, 1), (GEMM, 64, 128, 4, 1), (GEMM, 128, 256, 8, 1),
)  # fmt: skip


def product(parts: int) -> Node:
    g = Graph("test")
    x, w = g.input("x", tensor("bf16", "T", 256)), g.input("w", tensor("bf16", 128 * parts, 256), weight=True)
    body = "add(a0, a1)" if parts == 2 else "a0"
    return g.add(OPS["linear_map"], [x, w], {"parts": parts, "body": body})


def ptx(source: Source, target: Target) -> str:
    """Return the PTX of a source."""
    fn = load_entry(source.text, source.entry)
    aligned = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(source.params) if p.startswith("*")}
    ast = ASTSource(fn, dict(zip(fn.arg_names, source.params, strict=True)), {}, aligned)
    gpu = GPUTarget("cuda", int(target.arch.removeprefix("sm_")), 32)
    return str(triton.compile(ast, target=gpu, options=dict(source.options)).asm["ptx"])


@pytest.mark.drawn
@pytest.mark.parametrize("target", (sm_80(), sm_90()), ids=lambda t: t.arch)
@pytest.mark.parametrize(("kernel", "bm", "bn", "warps", "parts"), TILES)
def test_instruction(kernel: Gemm, bm: int, bn: int, warps: int, parts: int, target: Target) -> None:
    print(f"seed {SEED}")
    schedule: Schedule = {"bm": bm, "bn": bn, "bk": 64, "warps": warps, "stages": 3, "split": 1}
    node = product(parts)
    text = ptx(kernel.emit(node, schedule, target), target)
    name, dtype = (kernel.reduction_order(node, schedule, target) or "").split()
    assert dtype == "bf16" and (name == "wgmma") == ("wgmma.mma_async" in text) == ("mma.sync" not in text)


def test_kinds() -> None:
    """Warpgroups multiply whole tiles of 64 rows on Hopper; float32 has no matrix instruction."""
    assert dot_order(sm_90(), "bf16", 64, 16, 4) == dot_order(sm_90(), "bf16", 128, 256, 8) == "wgmma bf16"
    assert dot_order(sm_90(), "bf16", 32, 64, 4) == dot_order(sm_90(), "bf16", 64, 8, 4) == "mma bf16"
    assert dot_order(sm_80(), "bf16", 64, 64, 4) == "mma bf16"
    assert dot_order(sm_90(), "f32", 64, 64, 4) == "fma"
