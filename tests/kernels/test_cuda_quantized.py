"""The CUDA C++ product over 4-bit codes: the order of its codes, binaries, rejected nodes, and when it is chosen.

tests/gpu/test_cuda_kernels.py runs it.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import triton
from draw import generator

from llmc.codegen.backends.cuda import nvrtc_toolchain
from llmc.codegen.backends.cuda.cuda_epilogue import epilogue
from llmc.codegen.backends.cuda.cuda_kernel import _text
from llmc.codegen.backends.cuda.quantized_wgmma import QUANTIZED_WGMMA, WIDTH, TiledProduct, slices
from llmc.codegen.backends.cuda.skinny_gemm import SKINNY_FIXED, SKINNY_GEMM, SkinnyGemm
from llmc.codegen.cubin import read_entry
from llmc.codegen.kernel import TRIGGER_AFTER_LOADS, Schedule
from llmc.codegen.launch_plan import check_packed
from llmc.codegen.pack import Pack
from llmc.codegen.product import ProductNode
from llmc.codegen.select import Select
from llmc.codegen.toolchain import Compiled
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.interp import run
from llmc.ir.ops import OPS
from llmc.ir.ops.common import NUMPY
from llmc.ir.ops.packed_codes import pack_fragments, unpack_fragments
from llmc.ir.scalar import evaluate, parse_expr
from llmc.ir.text import parse
from llmc.ir.types import tensor
from llmc.passes.base import Ctx
from llmc.passes.fuse.fuse_norm_quantized import FuseNormQuantized
from llmc.targets.gpu_targets import sm_80, sm_90

SILU = "mul(mul(a0, sigmoid(a0)), a1)"
TEXT = """
sym T in [1, 4096]
graph @main(%x: bf16[T, 512], %w: weight u8[256, 512], %s: weight bf16[256, 4], %z: weight u8[256, 4]) {
  %y = quantized_linear(%x, %w, %s, %z) {block=[1, 128], zeros=true, bits=4, parts=2, body="BODY"} : bf16[T, 128]
  return %y
}
graph @one(%x: bf16[1, 512], %w: weight u8[256, 512], %s: weight bf16[256, 4], %z: weight u8[256, 4]) {
  %y = quantized_linear(%x, %w, %s, %z) {block=[1, 128], zeros=true, bits=4, parts=2, body="BODY"} : bf16[1, 128]
  return %y
}
""".replace("BODY", SILU)


def module(*changes: tuple[str, str]) -> Module:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text, OPS)


def the_product(g: Graph) -> Node:
    return next(n for n in g.nodes if n.op.name.endswith("_linear"))


def packed(select: Select = Select(prefer=("cuda/quantized_wgmma",)), *changes: tuple[str, str]) -> Module:  # noqa: B008
    m = module(*changes)
    ctx = Ctx(OPS, sm_90(), load().kernels)
    for p in (select, Pack()):
        p.run(m, ctx)
    return m


def test_a_thread_finds_its_codes_in_one_word() -> None:
    """The definition of the left factor in the instruction set's manual, for random places."""
    codes = generator().integers(0, 16, (128, 192)).astype(np.uint8)
    raw = pack_fragments.ref(codes)
    np.testing.assert_array_equal(unpack_fragments(raw), codes)
    words = np.frombuffer(raw.tobytes(), "<u4").reshape(2, 3, 4, 32, 4)
    for _ in range(300):  # blocks of rows and of columns
        rows, columns, warp, thread, step = place = [random.randrange(n) for n in words.shape]
        register, pair = random.randrange(4), random.randrange(2)
        row = 64 * rows + 16 * warp + thread // 4 + 8 * (register % 2)
        column = 64 * columns + 16 * step + 2 * (thread % 4) + pair + 8 * (register // 2)
        assert int(words[tuple(place)]) >> (4 * register + 16 * pair) & 15 == codes[row, column]


def test_entry_points_share_the_layout_that_suits_them_together() -> None:
    """Triton's layout would suit one token as well, but many tokens much less."""
    large = [
        ("[256, 512]", "[28672, 4096]"),
        ("512]", "4096]"),
        ("[256, 4]", "[28672, 32]"),
        (" : bf16[T, 128]", " : bf16[T, 14336]"),
    ]
    m = packed(Select(), *large, (" : bf16[1, 128]", " : bf16[1, 14336]"))
    chosen = {name: the_product(g).choice["kernel"] for name, g in m.graphs.items()}
    assert chosen == {"main": "cuda/quantized_tiles", "one": "cuda/skinny_fixed"}
    for g in m.graphs.values():
        assert [n.op.name for n in g.nodes] == ["pack_fragments", "transpose", "transpose", "packed_fragments_linear"]
    small = packed(Select())
    assert {the_product(g).op.name for g in small.graphs.values()} == {"packed_nibbles_linear"}


def test_packing_changes_no_result() -> None:
    rng = generator()
    inputs = [
        rng.standard_normal((3, 512)), rng.integers(0, 16, (256, 512)), rng.uniform(0.01, 0.02, (256, 4)),
        rng.integers(0, 16, (256, 4)),
    ]  # fmt: skip
    held = [x if x.dtype.kind == "i" else x.astype(np.float32) for x in inputs]
    for plain, after in zip(module().graphs.values(), packed().graphs.values(), strict=True):
        mine = [held[0][:1], *held[1:]] if plain.name == "one" else held
        np.testing.assert_array_equal(run(plain, mine, {"T": 3})[0], run(after, mine, {"T": 3})[0])


def test_ways_become_binaries_of_sm_90(tmp_path: Path) -> None:
    target = sm_90()
    node = the_product(packed().graphs["main"])
    ways = QUANTIZED_WGMMA.schedules(node, target)
    assert {w["tokens"] for w in ways} == {8, 16, 32, 64, 128, 256}
    tool = load().toolchains["cuda"](target)
    for way in [
        *random.sample(ways, 4),
        *(random.choice([w for w in ways if w.get("halves", 0) == x]) for x in (0, 1)),
    ]:
        source = QUANTIZED_WGMMA.emit(node, {**way, TRIGGER_AFTER_LOADS: random.randrange(2)}, target)
        made = tool.compile([(source, "")], tmp_path)[tool.key(source)]
        box = min(way["tokens"], WIDTH)  # a block may compute half of the tokens of a tile of 256
        assert made.shared <= target.limits.shared and made.boxes == (((box, 64), 3),)
        assert made.threads == 2 * 128 + (128 if way["tokens"] == 256 else 32)
        assert read_entry(made.binary, source.entry).sizes == (128, 8, 8, 8, 8, 4)
        assert source.cluster == ((way["split"], 1, 1) if way["split"] > 1 else ())


def residual(tokens: int) -> Node:
    """A packed product of 256 rows and 4,096 columns, whose result is added to a residual."""
    attrs = 'block=[1, 128], zero_point=8, body="add(a1, a0)"'
    text = f"""
graph @main(%x: bf16[{tokens}, 4096], %w: weight u8[256, 2048], %s: weight bf16[32, 256], %r: bf16[{tokens}, 256]) {{
  %y = packed_fragments_linear(%x, %w, %s, %r) {{{attrs}}} : bf16[{tokens}, 256]
  return %y
}}
"""
    return the_product(parse(text, OPS).graphs["main"])


def machine_code(node: Node, way: Schedule, folder: Path) -> tuple[Compiled, list[str]]:
    """Return a binary, and its instructions by the disassembler that comes with Triton."""
    target = sm_90()
    tool = load().toolchains["cuda"](target)
    source = QUANTIZED_WGMMA.emit(node, way, target)
    made = tool.compile([(source, "")], folder)[tool.key(source)]
    (folder / "kernel.cubin").write_bytes(made.binary)
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [str(dump), "-c", str(folder / "kernel.cubin")]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return made, [line for line in text.splitlines() if line.lstrip().startswith("/*")]


def overwritten(code: Sequence[str]) -> list[str]:
    """Return the instructions that write a register which a product may still read as its left factor.

    The code, a loop up to its last product, is read twice. A product reads four registers until the next wait for all.
    """
    running: set[int] = set()
    found = []
    for line in [*code, *code]:
        opcode, _, operands = line.partition("*/")[2].strip().removesuffix(";").partition(" ")
        registers = [int(n) for n in re.findall(r"\bR(\d+)", operands)]
        if opcode.startswith("WARPGROUP.DEPBAR"):
            running.clear()
        elif opcode.startswith("HGMMA"):
            running.update(range(registers[1], registers[1] + 4))
        elif re.match(r"R\d+", operands) and not opcode.startswith(("ST", "RED", "SYNCS", "R2UR")):
            width = int((re.search(r"\.(64|128)$", opcode) or [0, "32"])[1]) // 32
            if running & set(range(registers[0], registers[0] + width)):
                found.append(line)
    return found


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
def test_warpgroups_divide_columns(tokens: int, tmp_path: Path) -> None:
    """Slices of few tokens: every column has one, what they share fits, and no product loses its left factor."""
    node, target = residual(tokens), sm_90()
    ways = [way for way in QUANTIZED_WGMMA.schedules(node, target) if slices(way) > 1]
    assert {slices(way) for way in ways} == {2, 4} and {way["split"] for way in ways} == {1, 2}
    p = TiledProduct(node)
    assert all(p.shared(way) <= target.limits.shared and p.consumers(way) <= 4 for way in ways)
    way = random.choice([way for way in ways if way["tokens"] == tokens])
    made, code = machine_code(node, way, tmp_path)
    assert made.threads == p.consumers(way) * 128 + 32 and made.shared == p.shared(way)
    products = [i for i, line in enumerate(code) if "HGMMA" in line]
    begin = next(i for i, line in enumerate(code) if "TRYWAIT" in line)
    assert len(products) in (8, 16) and not overwritten(code[begin : products[-1] + 1])


def test_other_operands_are_loaded_together(tmp_path: Path) -> None:
    """A thread loads eight groups of a residual before it stores a result: it waits for memory once for them."""
    way = {"tokens": 256, "rows": 128, "split": 1, "stages": 3}
    _, code = machine_code(residual(256), way, tmp_path)
    first = next(i for i, line in enumerate(code) if "STG" in line)
    assert sum("LDG" in line for line in code[:first]) >= 16


@pytest.mark.parametrize("kernel", [SKINNY_GEMM, SKINNY_FIXED], ids=lambda k: k.name)
def test_ways_for_few_tokens_become_binaries_of_sm_90(kernel: SkinnyGemm, tmp_path: Path) -> None:
    """Every way of few tokens: all columns have a warp, and what the blocks copy and share fits."""
    target = sm_90()
    tool = load().toolchains["cuda"](target)
    node = the_product(packed(Select(prefer=(kernel.name,))).graphs["one"])
    ways = kernel.schedules(node, target)
    assert {w["tokens"] for w in ways} == {min(kernel.tiles)} and node.choice["kernel"] == kernel.name
    for way in ways:
        assert 64 * way["chunks"] * way["warps"] * way["split"] >= 512
        source = kernel.emit(node, way, target)
        made = tool.compile([(source, "")], tmp_path)[tool.key(source)]
        assert made.shared <= target.limits.shared and made.threads == 32 * way["warps"] and not made.boxes
        assert read_entry(made.binary, source.entry).sizes == (8, 8, 8, 8, 8, 4)


NORMED_TEXT = """
graph @one(
  %x: bf16[1, 512], %g: weight bf16[512], %w: weight u8[256, 512], %s: weight bf16[256, 4], %z: weight u8[256, 4]
) {
  %h = rms_norm(%x, %g) {eps=1e-05} : bf16[1, 512]
  %y = quantized_linear(%h, %w, %s, %z) {block=[1, 128], zeros=true, bits=4} : bf16[1, 256]
  return %y
}
"""


def test_a_product_of_normed_tokens_becomes_a_binary_of_sm_90(tmp_path: Path) -> None:
    """The norm is fused, the codes are packed as for the plain product, and the gain is a parameter of the binary."""
    target = sm_90()
    m = parse(NORMED_TEXT, OPS)
    ctx = Ctx(OPS, target, load().kernels)
    for p in (FuseNormQuantized(), Select(), Pack()):
        p.run(m, ctx)
    node = the_product(m.graphs["one"])
    assert node.op.name == "norm_fragments_linear" and node.choice["kernel"] == "cuda/skinny_fixed"
    assert [v.name for v in node.operands if v.name in ("x", "g")] == ["x", "g"]
    tool = load().toolchains["cuda"](target)
    for kernel, way in [(k, way) for k in (SKINNY_GEMM, SKINNY_FIXED) for way in k.schedules(node, target)]:
        source = kernel.emit(node, way, target)
        made = tool.compile([(source, "")], tmp_path)[tool.key(source)]
        assert made.shared <= target.limits.shared
        assert read_entry(made.binary, source.entry).sizes == (8, 8, 8, 8, 8, 8, 4)


@pytest.fixture
def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise ModuleNotFoundError("NVRTC is not installed")

    monkeypatch.setattr(nvrtc_toolchain, "nvrtc_version", absent)


@pytest.mark.usefixtures("without_nvrtc")
def test_without_nvrtc_triton_multiplies_and_notes_say_why() -> None:
    """The kernels that would have been chosen are named with what installs their compiler, and so are the choices."""
    large = [
        ("[256, 512]", "[28672, 4096]"), ("512]", "4096]"), ("[256, 4]", "[28672, 32]"),
        (" : bf16[T, 128]", " : bf16[T, 14336]"), (" : bf16[1, 128]", " : bf16[1, 14336]"),
    ]  # fmt: skip
    m, ctx = module(*large), Ctx(OPS, sm_90(), load().kernels)
    Select().run(m, ctx)
    assert all(the_product(g).choice["kernel"].startswith("triton/") for g in m.graphs.values())
    notes = [note for note in ctx.notes if "without the kernel" in note]
    for name in ("cuda/quantized_tiles", "cuda/skinny_fixed"):
        (note,) = [note for note in notes if f" {name}: " in note]
        assert "NVRTC is not installed; " in note and "[nvrtc]" in note
    for choice in ctx.choices:
        assert "NVRTC is not installed; " in choice["refused"]["cuda/quantized_wgmma"]


@pytest.mark.usefixtures("without_nvrtc")
def test_without_nvrtc_no_norm_is_fused_that_only_cuda_kernels_compute() -> None:
    m = parse(NORMED_TEXT, OPS)
    ctx = Ctx(OPS, sm_90(), load().kernels)
    for p in (FuseNormQuantized(), Select()):
        p.run(m, ctx)
    g = m.graphs["one"]
    assert any("NVRTC is not installed" in str(miss) for miss in ctx.misses)
    assert [n.op.name for n in g.nodes] == ["rms_norm", "quantized_linear"]
    assert the_product(g).choice["kernel"].startswith("triton/")


def test_rejected_nodes_of_few_tokens() -> None:
    node = the_product(module().graphs["main"])
    assert SKINNY_GEMM.reject(node, sm_90()) is None
    assert {s["tokens"] for s in SKINNY_GEMM.schedules(node, sm_90())} == {8, 16}
    many = the_product(module(("bf16[T", "bf16[17"), ("sym T in [1, 4096]\n", "")).graphs["main"])
    assert "17 tokens; at most 16" in str(SKINNY_GEMM.reject(many, sm_90()))
    odd = the_product(module(("512]", "832]"), ("block=[1, 128]", "block=[1, 208]")).graphs["main"])
    assert "208 for each scale" in str(SKINNY_GEMM.reject(odd, sm_90()))
    some = the_product(module(("bf16[T", "bf16[5"), ("sym T in [1, 4096]\n", "")).graphs["main"])
    assert SKINNY_GEMM.reject(some, sm_90()) is None
    assert "5 tokens; at most 4" in str(SKINNY_FIXED.reject(some, sm_90()))
    narrow = the_product(module(("[256, 4]", "[256, 32]"), ("block=[1, 128]", "block=[1, 16]")).graphs["main"])
    assert SKINNY_GEMM.reject(narrow, sm_90()) is None
    assert "groups of 16 columns are not a multiple of 32" in str(SKINNY_FIXED.reject(narrow, sm_90()))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([("bf16[T", "f16[T"), ("bf16[1", "f16[1")], "activations of f16"),
        ([("weight bf16[", "weight f32[")], "scales of f32"),
        ([("bits=4", "bits=8")], "codes of 4 bits"),
        (
            [("[256", "[192"), (" : bf16[T, 128]", " : bf16[T, 96]"), (" : bf16[1, 128]", " : bf16[1, 96]")],
            "multiples of 64",
        ),
        ([("block=[1, 128]", "block=[1, 171]"), ("[256, 4]", "[256, 3]")], "blocks of [1, 171]"),
        ([("%w: weight", "%w:")], "not known at compile time"),
    ],
)
def test_rejected_nodes(changes: list[tuple[str, str]], why: str) -> None:
    node = the_product(module(*changes).graphs["main"])
    assert why in str(QUANTIZED_WGMMA.reject(node, sm_90()))


def test_it_is_for_hopper_and_for_packed_codes() -> None:
    node = the_product(module().graphs["main"])
    assert QUANTIZED_WGMMA.reject(node, sm_90()) is None
    assert "does not have wgmma" in str(QUANTIZED_WGMMA.reject(node, sm_80()))
    with pytest.raises(Diagnostic, match="E430"):
        check_packed(QUANTIZED_WGMMA, node, QUANTIZED_WGMMA.schedules(node, sm_90())[0], sm_90())


BODIES = (
    SILU,
    "add(mul(a0, a2), a1)",
    "select(and(gt(a0, a1), not(lt(a2, 0.5))), max(a0, a1), min(a1, neg(a2)))",
    "add(add(tanh(a0), erf(a1)), exp(floor(a2)))",
    "add(sqrt(abs(a0)), add(rsqrt(add(abs(a1), 1.0)), pow(abs(a2), 1.5)))",
    "add(add(sin(a0), cos(a1)), log(add(abs(a2), 1.0)))",
)


@pytest.mark.parametrize("body", BODIES)
def test_generated_epilogues_compute_their_expression(body: str, tmp_path: Path) -> None:
    """As C++ of this machine: one sum, a bias of one element a column, and a residual."""
    g = Graph("main")
    operands = [g.input(f"x{i}", tensor("f32", *shape)) for i, shape in enumerate((("T", 8), (4, 8), (4,), ("T", 4)))]
    text = epilogue(ProductNode(g.add(OPS["linear_map"], operands, {"parts": 1, "body": body})))
    a, bias, residual = (generator().standard_normal(s).astype(np.float32) for s in ((3, 4), (4,), (3, 4)))
    values = "".join(
        f"static const float {name}[] = {{{', '.join(f'{v!r}f' for v in x.ravel().tolist())}}};\n"
        for name, x in (("sums", a), ("bias", bias), ("residual", residual))
    )
    program = (
        "#include <cmath>\n#include <cstdio>\n#define __device__\nconstexpr int N = 4;\n"
        "inline float to_float(float x) { return x; }\n"
        + _text("scalar_math.cuh")
        + text
        + "\n"
        + values
        + "int main() {\n"
        "  for (int i = 0; i < 12; i++) {\n    const float a[1] = {sums[i]};\n"
        '    std::printf("%.9g\\n", (double)epilogue(a, i / 4, i % 4, bias, residual));\n  }\n}\n'
    )
    (tmp_path / "t.cpp").write_text(program)
    subprocess.run(["g++", "-std=c++17", "-o", str(tmp_path / "t"), str(tmp_path / "t.cpp")], check=True)
    lines = subprocess.run([str(tmp_path / "t")], check=True, capture_output=True, text=True).stdout.split()
    want = evaluate(parse_expr(body), NUMPY, [a, bias, residual])
    np.testing.assert_allclose(np.array(lines, np.float32).reshape(3, 4), want, rtol=2e-5, atol=2e-6)
