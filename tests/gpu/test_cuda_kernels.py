"""The CUDA C++ kernels on a GPU against the references of their ops, run as in test_kernels.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from gpu.kernel_cases import CACHE, Job, sampled
from gpu.launcher import Card
from gpu.rounded_weights import RoundedWeights
from gpu.test_kernels import failures
from kernels.cases import CLAMPED
from kernels.harness import Case
from kernels.test_triton_moe import down, up

from llmc.codegen.backends.cuda.gemm_wgmma import GEMM_WGMMA
from llmc.codegen.backends.cuda.grouped_wgmma import GROUPED_WGMMA
from llmc.codegen.backends.cuda.nvrtc_toolchain import NvrtcToolchain
from llmc.codegen.backends.cuda.quantized_tiles import QUANTIZED_TILES
from llmc.codegen.backends.cuda.quantized_wgmma import QUANTIZED_WGMMA, TiledProduct
from llmc.codegen.backends.cuda.skinny_gemm import SKINNY_FIXED, SKINNY_GEMM, SkinnyGemm
from llmc.codegen.backends.cuda.skinny_slices import SKINNY_SLICES, TOKENS
from llmc.codegen.backends.cuda.skinny_wgmma import SKINNY_WGMMA, SKINNY_WGMMA_BF16
from llmc.codegen.kernel import READ_BEFORE_WAIT, TRIGGER_AFTER_LOADS, Kernel, Schedule
from llmc.extension import resolve
from llmc.ir.example import example_graph
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU, moe_route
from llmc.ir.text import parse
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
ARRIVES = "constexpr bool EVERY_THREAD_ARRIVES = {};"
SILU = "mul(mul(a0, sigmoid(a0)), a1)"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cuda-kernel"
# Tokens, columns, depth, parts, epilogue, dtype of the result: a single token, partial tiles in every direction, depths
# below and above the ring's, several tiles of a block, odd numbers of tiles for pairs, operands that vary by token, by
# column and by neither.
PRODUCTS = (
    (1, 8, 8, 1, "", "bf16"),
    (3, 264, 72, 1, "add(a0, a1)", "bf16"),
    (128, 256, 64, 2, SILU, "bf16"),
    (130, 520, 1032, 1, "add(mul(a0, a2), a1)", "bf16"),
    (300, 1536, 1024, 2, SILU, "bf16"),
    (700, 1000, 392, 2, "add(mul(a0, sigmoid(a1)), a2)", "f32"),
    (2100, 640, 320, 1, "", "bf16"),
    (4096, 2056, 136, 1, "add(mul(a0, a2), a1)", "f16"),
    (200, 4096, 512, 1, "add(a0, a1)", "bf16"),
    (40, 2048, 1024, 2, SILU, "f32"),
    (256, 1536, 1024, 2, SILU, "bf16"),
    (255, 4096, 2048, 1, "add(a0, a1)", "bf16"),
    (385, 2304, 4096, 1, "", "bf16"),
)


def product(m: int, n: int, k: int, parts: int, body: str, out: str, schedule: Schedule) -> Case:
    """A product of m tokens, a run-time size; its body may have a residual and a factor of each column."""
    others = sum(f"a{parts + i}" in body for i in range(2))
    kinds = [(f"bf16[T, {n}]", (m, n)), (f"f32[{n}]", (n,))][:others]
    more = "".join(f", %e{i}: {kind}" for i, (kind, _) in enumerate(kinds))
    passed = "".join(f", %e{i}" for i in range(others))
    op = f'linear_map(%x, %w{passed}) {{parts={parts}, body="{body}", dtype="{out}"}}' if body else "linear(%x, %w)"
    text = f"""
sym T in [1, 4096]
graph @main(%x: bf16[T, {k}], %w: weight bf16[{n * parts}, {k}]{more}) {{
  %y = {op} : {out}[T, {n}]
  return %y
}}
"""
    rng = generator()
    sizes = ((m, k), (n * parts, k), *(size for _, size in kinds))
    inputs = [rng.standard_normal(s).astype(np.float32) / (k**0.25 if i < 2 else 1) for i, s in enumerate(sizes)]
    name = f"{m}x{n}x{k} parts={parts} {body} {out} {schedule}"
    return Case(name, parse(text, OPS).graphs["main"], GEMM_WGMMA, schedule, inputs, atol=1e-2)


# Tokens, columns of a part, depth, parts, columns that share a scale, whether groups have zero points, the epilogue.
CODES = (
    (1, 64, 512, 1, 128, False, "a0"),
    (7, 192, 1024, 1, 64, True, "add(a1, a0)"),
    (16, 128, 512, 2, 128, False, SILU),
    (33, 128, 576, 1, 32, True, "add(a0, a1)"),
    (65, 64, 1152, 2, 64, True, SILU),
    (130, 256, 1024, 1, 1024, False, "add(a1, a0)", "f16"),
    (300, 128, 2048, 1, 128, False, "add(add(a0, a1), a2)"),
    (520, 192, 256, 2, 16, True, SILU),
    (13, 192, 4096, 1, 128, True, "add(add(a0, a1), a2)"),
    (16, 128, 4096, 2, 256, False, SILU),
    (2100, 1152, 256, 1, 128, False, "add(a1, a0)"),
)
# The same for few tokens, and the dtype of the scales. 576 and 1,216 columns do not divide evenly among the warps, and
# 19 tokens are more than a tile.
FEW = (
    (1, 64, 512, 1, 128, False, "a0", "bf16"),
    (3, 192, 576, 1, 32, True, "add(a1, a0)", "f16"),
    (8, 2176, 4096, 2, 128, False, SILU, "bf16"),
    (11, 320, 1024, 1, 1024, True, "add(add(a0, a1), a2)", "bf16"),
    (16, 128, 1216, 2, 64, True, SILU, "f16"),
    (16, 448, 8192, 1, 128, False, "add(a1, a0)", "bf16"),
    (19, 192, 1024, 1, 128, False, "a0", "bf16"),
)

# The same where each warp has a slice of the columns: tiles that reach beyond the columns of y, several zero points in
# a step, memory for tokens that is reused, and more rows than one round of blocks has.
SLICED = (
    (5, 320, 4096, 1, 16, True, "a0", "bf16"),
    (16, 4032, 2048, 2, 128, True, SILU, "f16"),
    (12, 1088, 14336, 1, 128, False, "add(a1, a0)", "bf16"),
    (16, 6144, 512, 1, 512, False, "a0", "bf16"),
)

# The same of many tokens: fewer than a tile has, tiles that are halved, last tokens that fill half a tile, more tiles
# than multiprocessors, odd numbers of tiles for pairs, several scales in a step, and one for several steps.
MANY = (
    (100, 128, 128, 1, 128, False, "a0", "bf16"),
    (300, 384, 512, 1, 128, True, "add(a1, a0)", "bf16"),
    (300, 192, 1024, 2, 64, True, SILU, "f16"),
    (640, 1536, 256, 2, 128, False, SILU, "bf16"),
    (700, 640, 1152, 1, 384, False, "add(mul(a0, a2), a1)", "bf16"),
    (2100, 2304, 256, 1, 16, False, "add(a1, a0)", "f16"),
    (4096, 1024, 384, 2, 32, False, SILU, "bf16"),
)


def fragments(
    m: int, n: int, k: int, parts: int, group: int, zeros: bool, body: str, scale: str = "bf16", tokens: str = "T",
    normed: bool = False,
) -> Case:  # fmt: skip
    """A product over codes of 4 bits; by default, the number of tokens is a run-time size. Sums are near 1.

    normed: the product includes the RMS norm of the tokens, whose magnitudes then differ.
    """
    rows, others = n * parts, max(0, body.count("a1") + body.count("a2") - (parts == 2))
    names = [(f"bf16[{tokens}, {n}]", (m, n)), (f"f32[{n}]", (n,))][:others]
    more = "".join(f", %e{i}: {t}" for i, (t, _) in enumerate(names))
    table = f", %z: weight u8[{k // group}, {rows}]" if zeros else ""
    gain, passed_gain = (f", %g: weight bf16[{k}]", ", %g") if normed else ("", "")
    op = "norm_fragments_linear" if normed else "packed_fragments_linear"
    passed = passed_gain + ", %z" * zeros + "".join(f", %e{i}" for i in range(len(names)))
    attrs = (
        "eps=0.01, " * normed
        + f'block=[1, {group}], parts={parts}, body="{body}", {"zeros=true" if zeros else "zero_point=8"}'
    )
    text = f"""
sym T in [1, 4096]
graph @main(
  %x: bf16[{tokens}, {k}], %w: weight u8[{rows}, {k // 2}], %s: weight {scale}[{k // group}, {rows}]{gain}{table}{more}
) {{
  %y = {op}(%x, %w, %s{passed}) {{{attrs}}} : bf16[{tokens}, {n}]
  return %y
}}
"""
    rng = generator()
    scales = rng.uniform(0.5, 2.0, (k // group, rows)) / 5 / np.sqrt(k)
    sizes = np.geomspace(0.1, 10, m)[:, None] if normed else 1.0
    inputs = [sizes * rng.standard_normal((m, k)), rng.integers(0, 256, (rows, k // 2)), scales]
    inputs += [rng.uniform(0.5, 1.5, k)] * normed
    inputs += [rng.integers(0, 16, (k // group, rows))] * zeros + [rng.standard_normal(s) for _, s in names]
    stored = [x if x.dtype.kind == "i" else x.astype(np.float32) for x in inputs]
    name = f"{m}x{n}x{k} parts={parts} group={group} zeros={zeros} {scale}{' normed' * normed}"
    return Case(name, parse(text, OPS).graphs["main"], QUANTIZED_WGMMA, {}, stored)


def over_codes(case: Case, kernel: Kernel, s: Schedule) -> Case:
    """A case of `fragments` by a schedule. With few tokens, sums are scaled, otherwise weights, rounded to bf16."""
    step, group = TiledProduct(case.node).step, case.node.attrs["block"][1]
    rounds = kernel is QUANTIZED_TILES or s["tokens"] > 32 or step > group
    kind = RoundedWeights if rounds else Case
    return kind(f"{case.name} {s}", case.graph, kernel, s, case.inputs, atol=TOLERANCE)


# Few tokens of 8-bit codes or bf16: tokens, columns of a part, depth, parts, whether there is a residual, the dtype of
# the result. Sizes are no multiples of tiles and steps, or fill them; depths are below and above the ring's; 70 tokens
# are several tiles.
FEW_TOKENS = (
    (1, 8, 16, 1, False, "bf16"),
    (3, 264, 208, 1, True, "bf16"),
    (8, 128, 4096, 2, False, "bf16"),
    (11, 72, 1168, 2, False, "f32"),
    (16, 4096, 2048, 1, True, "bf16"),
    (19, 96, 400, 3, False, "f16"),
    (33, 328, 1024, 2, False, "bf16"),
    (64, 192, 14336, 1, True, "bf16"),
    (70, 456, 640, 1, True, "f32"),
)
TOLERANCE = 2e-3  # of products over codes whose reference rounds where the kernel does
MOST_WAYS = 24  # schedules of a product of few tokens that are drawn


def few_tokens(m: int, n: int, k: int, parts: int, residual: bool, out: str, code: str) -> Case:
    """A product of m tokens, a run-time size, with scales of columns and tokens as in a model. Results are near 1.

    code: the dtype of both factors."""
    sums = [f"mul(mul(a{i}, a{parts + i}), a{2 * parts})" for i in range(parts)]
    body = f"mul(mul({sums[0]}, sigmoid({sums[0]})), {sums[1]})" if parts == 2 else sums[0]
    for other in sums[1:] if parts > 2 else ():
        body = f"add({body}, {other})"
    scales = [f"%s{i}: weight f32[{n}]" for i in range(parts)]
    more = [*scales, "%t: f32[T, 1]", *([f"%r: bf16[T, {n}]"] if residual else [])]
    body = f"add(a3, {body})" if residual else body
    names = ", ".join(x.partition(":")[0] for x in more)
    text = f"""
sym T in [1, 4096]
graph @main(%x: {code}[T, {k}], %w: weight {code}[{n * parts}, {k}], {", ".join(more)}) {{
  %y = linear_map(%x, %w, {names}) {{parts={parts}, body="{body}", dtype="{out}"}} : {out}[T, {n}]
  return %y
}}
"""
    rng = generator()
    factors = [rng.standard_normal(s) for s in ((m, k), (n * parts, k))]
    if code == "i8":
        factors = [np.clip(np.rint(x * 40), -127, 127) for x in factors]
    unit = (40.0**2 if code == "i8" else 1.0) * np.sqrt(k)
    inputs = [*factors, *(rng.uniform(0.5, 1.5, n) / unit for _ in range(parts)), rng.uniform(0.5, 1.5, (m, 1))]
    inputs += [rng.standard_normal((m, n))] * residual
    name = f"{m}x{n}x{k} parts={parts} {code} {out}"
    stored = [x.astype(np.float32) for x in inputs]
    # Hopper's tensor cores keep about 14 bits of a sum of products of e4m3.
    tolerance = 1e-2 if code == "f8e4m3" else 4e-3
    kernel = SKINNY_WGMMA_BF16 if code == "bf16" else SKINNY_WGMMA
    return Case(name, parse(text, OPS).graphs["main"], kernel, {}, stored, atol=tolerance)


def norm(rows: int, width: int, dtype: str, kernel: Kernel, schedule: Schedule) -> Case:
    """rms_norm of drawn rows."""
    rng = np.random.default_rng(width)
    inputs = [rng.standard_normal(s).astype(np.float32) for s in ((rows, width), (width,))]
    graph = example_graph(OPS["rms_norm"], inputs, {"eps": 1e-5}, dtype).graphs["main"]
    return Case(f"{dtype}-{rows}x{width}-{schedule}", graph, kernel, schedule, inputs)


# Tokens, experts of each, experts, columns, depth, the bias's dtype, and how tokens choose their experts. Sizes are no
# multiples of tiles; an expert has several tiles of rows, a single row, or none.
MIXTURES = (
    (1, 8, 128, 48, 72, "", "even"),
    (5, 2, 6, 136, 200, "bf16", "even"),
    (40, 4, 9, 264, 64, "f32", "even"),
    (33, 2, 400, 40, 392, "", "even"),
    (300, 8, 32, 96, 520, "bf16", "even"),
    (700, 2, 8, 520, 136, "", "even"),
    (260, 4, 64, 128, 256, "bf16", "the same"),
    (1, 1, 1, 8, 8, "", "even"),
    (64, 1, 64, 200, 320, "", "one each"),
    (2100, 1, 3, 72, 328, "", "the same"),
)


SOME = 4  # schedules of a mixture's product


def routing(t: int, k: int, experts: int, choice: str) -> list[np.ndarray]:
    """Return the order of the pairs and the starts of the experts."""
    rng = generator()
    if choice == "even":
        chosen = np.stack([rng.permutation(experts)[:k] for _ in range(t)])
    else:
        chosen = (
            np.arange(t)[:, None] % experts if choice == "one each" else np.tile(rng.permutation(experts)[:k], (t, 1))
        )
    return [x.astype(np.int32) for x in moe_route.ref(chosen, experts=experts)]


def mixture(
    t: int, k: int, experts: int, n: int, d: int, bias: str, choice: str, body: str = SWIGLU
) -> list[Case]:  # fmt: skip
    """The two products of a mixture of experts, by some schedules."""
    rng = generator()
    routed = routing(t, k, experts, choice)
    found = []
    for graph in (up("T", k, experts, n, d, body=body, bias=bias), down("T", k, experts, n, d, bias=bias)):
        shapes = [[int(size.subs({"T": t})) for size in v.type.shape] for v in graph.inputs]
        drawn = [rng.standard_normal(s).astype(np.float32) for s in shapes]
        inputs = [drawn[0], *routed, drawn[3] / shapes[3][-1] ** 0.5, *drawn[4:]]
        node = next(iter(graph.nodes))
        assert GROUPED_WGMMA.reject(node, sm_90()) is None
        name = f"{node.op.name} {t} {k} {experts} {n} {d} {bias} {choice}"
        for i, at in enumerate(rng.permutation(len(schedules := GROUPED_WGMMA.schedules(node, sm_90())))[:SOME]):
            s = {**schedules[at], **({READ_BEFORE_WAIT: 1} if i % 2 else {})}
            found.append(Case(f"{name} {s}", graph, GROUPED_WGMMA, s, inputs, atol=1e-2, sizes={"T": t}))
    return found


def check(cases: Sequence[Case], card: Card, cache: Path = CACHE) -> None:
    """Run every case, or a sample, alone and after a kernel that writes its operands with a delay."""
    target, cases = sm_90(), sampled(cases, card.sample)
    tool = NvrtcToolchain.find(target)
    sources = [c.kernel.emit(c.node, c.schedule, target) for c in cases]
    if card.every_thread_arrives:
        sources = [replace(s, text=s.text.replace(ARRIVES.format("false"), ARRIVES.format("true"))) for s in sources]
        assert all("warp_arrive" not in s.text or ARRIVES.format("true") in s.text for s in sources)
    settled = [c.kernel.reads_before_wait(c.node) if READ_BEFORE_WAIT in c.schedule else () for c in cases]
    jobs = [Job(c, s, tool.key(s), early) for c, s, early in zip(cases, sources, settled, strict=True)]
    binaries: dict[str, Any] = dict(tool.compile([(s, "") for s in sources], cache, jobs=os.cpu_count() or 1))
    found = failures(card, jobs, binaries)
    assert not found, "\n".join(found)


def ways(problem: tuple[Any, ...]) -> list[Case]:
    """A product by every schedule."""
    found = product(*problem, {})
    assert GEMM_WGMMA.reject(found.node, sm_90()) is None
    schedules = GEMM_WGMMA.schedules(found.node, sm_90())
    return [replace(found, schedule=s, name=f"{found.name} {s}") for s in schedules]


@pytest.mark.parametrize("problem", PRODUCTS, ids=str)
def test_products(problem: tuple[Any, ...], card: Card) -> None:
    check(ways(problem), card)


@pytest.mark.parametrize("problem", MIXTURES, ids=str)
def test_experts(problem: tuple[Any, ...], card: Card) -> None:
    check(mixture(*problem), card)


def test_experts_with_a_clamped_gate(card: Card) -> None:
    check(mixture(90, 4, 32, 96, 200, "bf16", "even", CLAMPED), card)


@pytest.mark.parametrize("problem", CODES, ids=str)
def test_4_bit_codes(problem: tuple[Any, ...], card: Card) -> None:
    case = fragments(*problem)
    assert QUANTIZED_WGMMA.reject(case.node, sm_90()) is None
    found = QUANTIZED_WGMMA.schedules(case.node, sm_90())
    found = [{**s, **({TRIGGER_AFTER_LOADS: 1} if i % 4 == 0 else {})} for i, s in enumerate(found)]
    check([over_codes(case, QUANTIZED_WGMMA, s) for s in found], card)


@pytest.mark.parametrize("problem", MANY, ids=str)
def test_4_bit_codes_of_many_tokens(problem: tuple[Any, ...], card: Card) -> None:
    case = fragments(*problem)
    assert QUANTIZED_TILES.reject(case.node, sm_90()) is None
    check([over_codes(case, QUANTIZED_TILES, s) for s in QUANTIZED_TILES.schedules(case.node, sm_90())], card)


@pytest.mark.parametrize("kernel", [SKINNY_GEMM, SKINNY_FIXED], ids=lambda k: k.name)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("problem", FEW, ids=str)
def test_4_bit_codes_few_tokens(problem: tuple[Any, ...], normed: bool, kernel: Kernel, card: Card) -> None:
    assert isinstance(kernel, SkinnyGemm)
    case = fragments(*problem, tokens=str(problem[0]) if problem[0] <= max(kernel.tiles) else "T", normed=normed)
    found = kernel.schedules(case.node, sm_90())
    assert found and kernel.reject(case.node, sm_90()) is None
    # A token times the gain is rounded to bf16: an error of up to 2 ** -9 of each term.
    tolerance = (6e-2 if case.node.attrs["parts"] == 2 else 2e-2) if normed and kernel is SKINNY_GEMM else 2e-3
    check(
        [replace(case, kernel=kernel, schedule=s, name=f"{case.name} {s}", atol=tolerance) for s in found],
        card,
    )


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("problem", [*FEW, *SLICED], ids=str)
def test_4_bit_codes_in_slices(problem: tuple[Any, ...], normed: bool, card: Card) -> None:
    case = fragments(*problem, tokens=str(problem[0]) if problem[0] <= max(TOKENS) else "T", normed=normed)
    found = SKINNY_SLICES.schedules(case.node, sm_90())
    assert found and SKINNY_SLICES.reject(case.node, sm_90()) is None
    tolerance = (6e-2 if case.node.attrs["parts"] == 2 else 2e-2) if normed else 2e-3
    drawn = [found[i] for i in generator().permutation(len(found))[:MOST_WAYS]]
    check(
        [replace(case, kernel=SKINNY_SLICES, schedule=s, name=f"{case.name} {s}", atol=tolerance) for s in drawn],
        card,
    )


@pytest.mark.parametrize("code", ["f8e4m3", "i8", "bf16"])
@pytest.mark.parametrize("problem", FEW_TOKENS, ids=str)
def test_few_tokens_in_wgmma(problem: tuple[Any, ...], code: str, card: Card) -> None:
    case = few_tokens(*problem, code)
    found = case.kernel.schedules(case.node, sm_90())
    assert found and case.kernel.reject(case.node, sm_90()) is None
    drawn = generator().permutation(len(found))[:MOST_WAYS]
    check([replace(case, schedule=found[i], name=f"{case.name} {found[i]}") for i in drawn], card)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_example_package(dtype: str, card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    kernel = resolve("rms_norm_cuda.kernel:KERNEL")
    schedules = kernel.schedules(norm(1, 1, dtype, kernel, {}).node, sm_90())
    check([norm(r, w, dtype, kernel, s) for r, w in ((1, 1), (7, 333), (64, 4096)) for s in schedules], card, tmp_path)
