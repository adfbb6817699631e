"""The CUDA C++ product of few tokens with 8 bits or bf16: its binaries, what it refuses, and where it is chosen.

tests/gpu/test_cuda_kernels.py runs it.
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from llmc.codegen.backends.cuda.skinny_wgmma import SKINNY_WGMMA, SKINNY_WGMMA_BF16, SkinnyProduct, SkinnyWgmma
from llmc.codegen.backends.cuda.wgmma import multiply
from llmc.codegen.candidates import candidates
from llmc.codegen.cubin import read_entry
from llmc.codegen.tuning_records import Tuning
from llmc.extension import load
from llmc.ir.graph import Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.targets.gpu_targets import sm_90, sm_100

SILU = "mul(mul(mul(a0, a2), sigmoid(mul(a0, a2))), mul(a1, a2))"


def text(k: int = 1040, parts: int = 2, body: str = SILU) -> str:
    """A product of `parts` times 136 rows of the weight, of k columns."""
    return f"""
sym T in [1, 4096]
graph @main(%x: f8e4m3[T, {k}], %w: weight f8e4m3[{136 * parts}, {k}], %s: f32[T, 1]) {{
  %y = linear_map(%x, %w, %s) {{parts={parts}, body="{body}", dtype="bf16"}} : bf16[T, 136]
  return %y
}}
"""


TEXT = text()


def product(source: str = TEXT) -> Node:
    return next(iter(parse(source, OPS).graphs["main"].nodes))


@pytest.mark.parametrize(
    ("kernel", "dtype", "instruction", "columns"),
    [
        (SKINNY_WGMMA, "f8e4m3", "QGMMA", 128), (SKINNY_WGMMA, "i8", "IGMMA", 128),
        (SKINNY_WGMMA_BF16, "bf16", "HGMMA", 64),
    ],
)  # fmt: skip
def test_schedules_become_binaries_of_sm_90(
    kernel: SkinnyWgmma, dtype: str, instruction: str, columns: int, tmp_path: Path
) -> None:
    """Four of them: all weights have a block, what a block copies fits, and the tensor cores multiply the elements."""
    node, target = product(TEXT.replace("f8e4m3", dtype)), sm_90()
    tool = load().toolchains["cuda"](target)
    found = kernel.schedules(node, target)
    assert {s["tokens"] for s in found} == {8, 16, 32, 64} and {s["split"] for s in found} >= {1, 2}
    assert len({tuple(s.items()) for s in found}) == len(found)
    drawn = random.sample(found, 4)
    sources = [kernel.emit(node, s, target) for s in drawn]
    made = tool.compile([(s, "") for s in sources], tmp_path, jobs=1)
    for s, source in zip(drawn, sources, strict=True):
        binary = made[tool.key(source)]
        assert binary.shared <= target.limits.shared and binary.threads == s["rows"] * 2 // 64 * 128 + 32
        assert binary.boxes == (((s["tokens"], columns), 3), ((s["rows"], columns), 3))
        assert source.cluster == ((s["split"], 1, 1) if s["split"] > 1 else ())
        blocks = -(-136 // s["rows"]) * s["split"]
        assert source.grid[0].subs({"T": 65}).const == -(-65 // s["tokens"]) * blocks
        assert read_entry(binary.binary, source.entry).sizes == (128, 128, 8, 8, 4)
    assembly = disassembled(made[tool.key(sources[0])].binary, tmp_path)
    assert assembly.count(instruction) > 0 and "HMMA" not in assembly and "STL" not in assembly


def disassembled(binary: bytes, folder: Path) -> str:
    """Return the machine code of a cubin as text, by the disassembler that comes with Triton."""
    import triton

    tool, path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm", folder / "kernel.cubin"
    path.write_bytes(binary)
    return subprocess.run([str(tool), "-c", str(path)], check=True, stdout=subprocess.PIPE, text=True).stdout


def test_every_block_of_a_cluster_has_columns() -> None:
    """Random depths: the last block has the rest of the steps."""
    for _ in range(300):
        k, parts = 16 * random.randrange(1, 1200), random.randrange(1, 5)
        node = product(text(k, parts, "a0"))
        p, found = SkinnyProduct(node), SKINNY_WGMMA.schedules(node, sm_90())
        assert found and SKINNY_WGMMA.reject(node, sm_90()) is None
        for s in found:
            steps = -(-p.steps(s) // s["split"])
            assert steps * s["split"] >= p.steps(s) > steps * (s["split"] - 1)
            assert s["rows"] * parts % 64 == 0 and 1 <= s["stages"] <= steps and s["tokens"] % s["split"] == 0
            assert p.shared(s) <= sm_90().limits.shared


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("f8e4m3", "bf16"), "factors of bf16"),
        (("weight f8e4m3", "weight i8"), "factors of f8e4m3"),
        (("1040", "1032"), "272 x 1032 are not constant multiples of 16 and 16"),
        (("%w: weight", "%w:"), "the weight is not known before"),
        (("[T,", "[65,"), "65 tokens; at most 64"),
    ],
)
def test_rejected_nodes(change: tuple[str, str], why: str) -> None:
    assert why in str(SKINNY_WGMMA.reject(product(TEXT.replace(*change)), sm_90()))


def test_products_of_bf16() -> None:
    """Rows of 16 bytes are eight columns; it is used only where it was measured."""
    bf16 = TEXT.replace("f8e4m3", "bf16").replace("1040", "1032")
    assert SKINNY_WGMMA_BF16.opt_in and SKINNY_WGMMA_BF16.reject(product(bf16), sm_90()) is None
    assert "272 x 1036" in str(SKINNY_WGMMA_BF16.reject(product(bf16.replace("1032", "1036")), sm_90()))
    assert "factors of f8e4m3" in str(SKINNY_WGMMA_BF16.reject(product(), sm_90()))


def test_where_bf16_was_measured() -> None:
    """The shipped records choose it for a rank's down product of Llama-3.1-8B at 32 rows, and nowhere unmeasured."""

    def best(columns: int) -> str:
        text = f"""
sym R in [17, 32]
graph @main(%x: bf16[R, {columns}], %w: weight bf16[4096, {columns}]) {{
  %y = linear(%x, %w) : bf16[R, 4096]
  return %y
}}
"""
        return candidates(product(text), load().kernels, sm_90(), {"R": 32}, Tuning.shipped(sm_90()))[0].kernel.name

    assert best(7168) == SKINNY_WGMMA_BF16.name and best(7176) != SKINNY_WGMMA_BF16.name


def test_only_hopper_has_wgmma() -> None:
    assert "does not have wgmma" in str(SKINNY_WGMMA.reject(product(), sm_100()))


def test_instructions_by_dtype() -> None:
    assert "m64n16k32.s32.s8.s8" in multiply(16, "i8") and "int (&d)[8]" in multiply(16, "i8")
    assert "m64n8k32.f32.e4m3.e4m3" in multiply(8, "f8e4m3")
    with pytest.raises(ValueError, match="12 columns"):
        multiply(12, "i8")
