"""Golden files of a few generated Triton kernels, so that changes show up as diffs.

After an intended change: LLMC_GOLDEN=write python -m pytest tests/codegen/test_golden_triton.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.codegen.backends.triton.gathered_moe import MOE_GATHER_DOWN, MOE_GATHER_UP
from llmc.codegen.backends.triton.gemm_small import GEMM, GEMM_SMALL, GEMM_SPLITK, SPLITK_COMBINE
from llmc.codegen.backends.triton.gemm_tma import GEMM_TMA
from llmc.codegen.backends.triton.gemv import GEMV, NORM_GEMV
from llmc.codegen.backends.triton.matmul import MATMUL
from llmc.codegen.backends.triton.moe import MOE_COMBINE, MOE_DOWN, MOE_ROUTE, MOE_UP
from llmc.codegen.backends.triton.quantized_gemm import QUANTIZED_GEMM
from llmc.codegen.backends.triton.quantized_gemv import QUANTIZED_GEMV
from llmc.codegen.backends.triton.quantized_moe import QUANTIZED_MOE_DOWN, QUANTIZED_MOE_UP
from llmc.codegen.backends.triton.reduce import TOPK
from llmc.codegen.backends.triton.row_kernels import ROWS
from llmc.codegen.backends.triton.scaled_moe import SCALED_MOE_DOWN, SCALED_MOE_UP
from llmc.codegen.backends.triton.shape import COPY, TAKE
from llmc.codegen.backends.triton.topk_map import TOPK_MAP, TOPK_ROUTE
from llmc.codegen.kernel import Kernel
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.targets.gpu_targets import sm_90

GOLDEN = Path(__file__).parent / "golden"
SILU = "mul(mul(a0, sigmoid(a0)), a1)"
PAIRS = "%p: i32[8*T], %s: i32[129]"
WEIGHT = "%w: weight bf16[4096, 4096]"
NODES: dict[str, tuple[Kernel, str, str]] = {
    "norm": (
        ROWS,
        "%x: bf16[1, 4096], %r: bf16[1, 4096], %w: weight bf16[4096]",
        'fused(%x, %r, %w) {body=["add(a0, a1)", "mul(mul(add(a0, a1), rsqrt(add(row_mean(mul(add(a0, a1), '
        'add(a0, a1))), 1e-06))), a2)"], dtypes=["bf16", "bf16"]} : bf16[1, 4096], bf16[1, 4096]',
    ),
    "softmax": (ROWS, "%x: bf16[T, 99]", "softmax(%x) : bf16[T, 99]"),
    "embedding": (TAKE, "%x: weight bf16[128256, 4096], %i: i32[T]", "take(%x, %i) : bf16[T, 4096]"),
    "heads": (COPY, "%x: bf16[T, 14, 64]", "transpose(%x) {perm=[1, 2, 0]} : bf16[14, 64, T]"),
    "gemm": (
        GEMM, f"%x: bf16[T, 4096], {WEIGHT}, %r: bf16[T, 4096]",
        'linear_map(%x, %w, %r) {parts=1, body="add(a1, a0)"} : bf16[T, 4096]',
    ),
    "gemm_small": (
        GEMM_SMALL, f"%x: bf16[T, 4096], {WEIGHT}", f'linear_map(%x, %w) {{parts=2, body="{SILU}"}} : bf16[T, 2048]',
    ),
    "gemm_tma": (
        GEMM_TMA, f"%x: bf16[T, 4096], {WEIGHT}", f'linear_map(%x, %w) {{parts=2, body="{SILU}"}} : bf16[T, 2048]',
    ),
    "gemv": (
        GEMV, f"%x: bf16[1, 4096], {WEIGHT}, %b: weight f32[2048]",
        f'linear_map(%x, %w, %b) {{parts=2, body="add({SILU}, a2)"}} : bf16[1, 2048]',
    ),
    "quantized_gemv": (
        QUANTIZED_GEMV, "%x: bf16[1, 4096], %w: weight u8[4096, 2048], %s: weight bf16[32, 4096]",
        f'packed_nibbles_linear(%x, %w, %s) {{half=64, block=[1, 128], zero_point=8, parts=2, body="{SILU}"}} '
        ": bf16[1, 2048]",
    ),
    "quantized_gemm": (
        QUANTIZED_GEMM, "%x: bf16[T, 4096], %w: weight i8[4096, 4096], %s: weight f32[4096, 1], %r: bf16[T, 4096]",
        'quantized_linear(%x, %w, %s, %r) {block=[1, 0], body="add(a1, a0)"} : bf16[T, 4096]',
    ),
    "norm_gemv": (
        NORM_GEMV, f"%x: bf16[T, 4096], {WEIGHT}, %g: weight bf16[4096]",
        'norm_linear(%x, %w, %g) {eps=1e-06, parts=1, body="a0"} : bf16[T, 4096]',
    ),
    "gemm_splitk": (GEMM_SPLITK, f"%x: bf16[T, 4096], {WEIGHT}", "linear_split(%x, %w) {splits=2} : f32[2, T, 4096]"),
    "splitk_combine": (
        SPLITK_COMBINE, "%p: f32[2, T, 4096], %r: bf16[T, 4096]",
        'linear_combine(%p, %r) {body="add(a1, a0)", dtype="bf16"} : bf16[T, 4096]',
    ),
    "matmul": (MATMUL, "%x: bf16[8, T, 128], %y: bf16[8, 128, T]", "matmul(%x, %y) : bf16[8, T, T]"),
    "moe_route": (MOE_ROUTE, "%e: i32[T, 8]", "moe_route(%e) {experts=128} : i32[8*T], i32[129]"),
    "moe_up": (
        MOE_UP, f"%x: bf16[T, 2048], {PAIRS}, %w: weight bf16[128, 1536, 2048], %b: weight bf16[128, 1536]",
        "moe_up(%x, %p, %s, %w, %b) {k=8} : bf16[8*T, 768]",
    ),
    "moe_down": (
        MOE_DOWN, f"%x: bf16[8*T, 768], {PAIRS}, %w: weight bf16[128, 2048, 768], %a: f32[T, 8]",
        "moe_down(%x, %p, %s, %w, %a) : f32[T, 8, 2048]",
    ),
    "moe_gather_up": (
        MOE_GATHER_UP, "%x: bf16[1, 2048], %i: i32[1, 8], %w: weight bf16[128, 1536, 2048], %g: weight bf16[2048]",
        "norm_moe_gather_up(%x, %i, %w, %g) {eps=1e-06} : bf16[8, 768]",
    ),
    "moe_gather_down": (
        MOE_GATHER_DOWN,
        "%x: bf16[4, 2880], %i: i32[1, 4], %w: weight bf16[32, 2880, 2880], %a: bf16[1, 4], %r: bf16[1, 2880], "
        "%b: weight bf16[32, 2880]",
        "moe_gather_down(%x, %i, %w, %a, %r, %b) : bf16[1, 2880]",
    ),
    "moe_combine": (MOE_COMBINE, "%x: bf16[T, 8, 2048], %r: bf16[T, 2048]", "moe_combine(%x, %r) : bf16[T, 2048]"),
    "topk_map": (
        TOPK_MAP, "%x: f32[T, 128]",
        'topk_map(%x) {k=8, before="div(exp(sub(a0, row_max(a0))), row_sum(exp(sub(a0, row_max(a0)))))", '
        'after="div(a0, row_sum(a0))", dtype="bf16"} : bf16[T, 8], i32[T, 8]',
    ),
    "topk_route": (
        TOPK_ROUTE, "%x: bf16[1, 32]",
        'topk_route(%x) {k=4, after="div(exp(sub(a0, row_max(a0))), row_sum(exp(sub(a0, row_max(a0)))))"} '
        ": bf16[1, 4], i32[4], i32[33]",
    ),
    "quantized_moe_up": (
        QUANTIZED_MOE_UP,
        "%x: bf16[T, 2880], %p: i32[4*T], %s: i32[33], %w: weight u8[32, 5760, 1440], %c: weight bf16[32, 90, 5760],"
        " %b: weight bf16[32, 5760]",
        'quantized_moe_up(%x, %p, %s, %w, %c, %b) {k=4, block=[1, 32], values="e2m1", bits=4, half=32} '
        ": bf16[4*T, 2880]",
    ),
    "quantized_moe_down": (
        QUANTIZED_MOE_DOWN,
        f"%x: bf16[8*T, 768], {PAIRS}, %w: weight f8e4m3[128, 2048, 768], %c: weight f32[128, 16, 6], %a: f32[T, 8]",
        "quantized_moe_down(%x, %p, %s, %w, %c, %a) {block=[128, 128]} : f32[T, 8, 2048]",
    ),
    "scaled_moe_up": (
        SCALED_MOE_UP,
        f"%x: f8e4m3[T, 2048], {PAIRS}, %w: weight f8e4m3[128, 1536, 2048], %c: weight f32[128, 12, 16],"
        " %v: f32[T, 16]",
        'scaled_moe_up(%x, %p, %s, %w, %c, %v) {k=8, block=[128, 128], dtype="bf16"} : bf16[8*T, 768]',
    ),
    "scaled_moe_down": (
        SCALED_MOE_DOWN,
        f"%x: i8[8*T, 768], {PAIRS}, %w: weight i8[128, 2048, 768], %c: weight f32[128, 2048, 1], %v: f32[8*T, 1],"
        " %a: f32[T, 8]",
        "scaled_moe_down(%x, %p, %s, %w, %c, %v, %a) {block=[1, 0]} : f32[T, 8, 2048]",
    ),
    "router": (TOPK, "%x: f32[T, 60]", "topk(%x) {k=8} : f32[T, 8], i64[T, 8]"),
}  # fmt: skip


def source(name: str) -> str:
    kernel, inputs, text = NODES[name]
    outs = ", ".join(f"%y{i}" for i in range(text.rpartition(" : ")[2].count("[")))
    m = parse(f"sym T in [1, 64]\ngraph @main({inputs}) {{\n  {outs} = {text}\n  return {outs}\n}}", OPS)
    (node,) = m.graphs["main"].nodes
    return kernel.emit(node, kernel.schedules(node, sm_90())[0], sm_90()).text


@pytest.mark.parametrize("name", NODES)
def test_source(name: str) -> None:
    text = source(name)
    path = GOLDEN / f"{name}.triton"
    if os.environ.get("LLMC_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; to accept it: LLMC_GOLDEN=write, and read git diff"
