"""The CUDA C++ product of many tokens and codes of 4 bits: its tiles, its binaries, and rejected nodes.

tests/gpu/test_cuda_kernels.py runs it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from llmc.codegen.backends.cuda.cuda_kernel import _text
from llmc.codegen.backends.cuda.quantized_tiles import QUANTIZED_TILES
from llmc.codegen.cubin import read_entry
from llmc.extension import load
from llmc.ir.graph import Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.targets.gpu_targets import sm_80, sm_90

SILU = "mul(mul(a0, sigmoid(a0)), a1)"
FILE = "llmc.codegen.backends.cuda.kernels:quantized_tiles.cu"


def product(n: int = 4096, k: int = 4096, parts: int = 1, group: int = 128, tokens: str = "T") -> Node:
    """A packed product whose result is added to a residual, or one of two parts."""
    body = SILU if parts == 2 else "add(a1, a0)"
    residual = "" if parts == 2 else f", %r: bf16[{tokens}, {n}]"
    rows = n * parts
    attrs = f'block=[1, {group}], parts={parts}, zero_point=8, body="{body}"'
    text = f"""
sym T in [1, 8192]
graph @main(
  %x: bf16[{tokens}, {k}], %w: weight u8[{rows}, {k // 2}], %s: weight bf16[{k // group}, {rows}]{residual}
) {{
  %y = packed_fragments_linear(%x, %w, %s{", %r" * bool(residual)}) {{{attrs}}} : bf16[{tokens}, {n}]
  return %y
}}
"""
    (node,) = parse(text, OPS).graphs["main"].nodes
    return node


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize(("tokens", "width"), [(160, 160), (256, 128)])
def test_tiles_cover_every_token_and_column_once(tokens: int, width: int, tmp_path: Path) -> None:
    """The text of the kernel that finds tiles, as a program for the CPU: random sizes and numbers of blocks."""
    text = _text(FILE)
    begin, end = text.index("struct Tile {"), text.index("// The weights.")
    blocks, clusters, m = random.choice((1, 2)), random.randrange(1, 140), random.randrange(1, 5000)
    columns, sharing = random.randrange(1, 70), random.randrange(1, 9)
    program = f"""
#include <algorithm>
#include <cstdio>
#define __device__
using std::min;
constexpr int TOKENS = {tokens}, WIDTH = {width}, WIDTHS = TOKENS / WIDTH, ROWS = 1, ALONG_N = {blocks};
constexpr int COLUMNS = {columns}, GROUP_SIZE_M = {sharing};
struct Index {{ int x; }} blockIdx, gridDim = {{{clusters} * ALONG_N}};
{text[begin:end]}
int main() {{
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {{
    const Tiles tiles({m});
    for (int i = blockIdx.x / ALONG_N; i < tiles.count(); i += gridDim.x / ALONG_N) {{
      const Tile t = tiles.find(i);
      printf("%d %d %d %d\\n", blockIdx.x, t.token, t.column, t.widths);
    }}
  }}
}}
"""
    (tmp_path / "tiles.cpp").write_text(program)
    subprocess.run(["c++", "-std=c++17", "-o", str(tmp_path / "tiles"), str(tmp_path / "tiles.cpp")], check=True)
    out = subprocess.run([str(tmp_path / "tiles")], check=True, stdout=subprocess.PIPE, text=True).stdout
    case = f"m={m} columns={columns} blocks={blocks} clusters={clusters} sharing={sharing}"
    covered: dict[tuple[int, int], int] = {}
    work = [0] * clusters * blocks
    for line in out.splitlines():
        block, token, column, widths = map(int, line.split())
        work[block] += widths
        for i in range(widths):
            at = token + i * width, column
            covered[at] = covered.get(at, 0) + 1
    assert set(covered.values()) == {1}, case
    inside = {at for at in covered if at[0] < m}
    assert inside == {(t, c) for t in range(0, m, width) for c in range(columns * blocks)}, case
    assert max(work) - min(work) <= tokens // width, case


def test_schedules_become_binaries_of_sm_90(tmp_path: Path) -> None:
    """What they share fits, no sums are spilled, and products run while codes are converted.

    NVCC waits after every product if it finds a register that both write (its warning C7513).
    """
    target = sm_90()
    tool = load().toolchains["cuda"](target)
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    for node in (product(), product(14336, 4096, 2), product(6144, group=32)):
        found = QUANTIZED_TILES.schedules(node, target)
        assert {s["tokens"] for s in found} == {128, 160, 192, 256} and {s["along_n"] for s in found} == {1, 2}
        for s in random.sample(found, 2):
            source = QUANTIZED_TILES.emit(node, s, target)
            made = tool.compile([(source, "")], tmp_path)[tool.key(source)]
            width = 128 if s["tokens"] == 256 else s["tokens"]  # tiles of 256 tokens may be halved
            assert made.shared <= target.limits.shared and made.boxes == (((width, 64), 3),)
            assert made.threads == (512 if s["rows"] == 192 else 384)
            extras = len(node.operands) - 3
            assert read_entry(made.binary, source.entry).sizes == (128, 8, 8, *[8] * extras, 8, 4)
            assert source.cluster == ((2, 1, 1) if s["along_n"] == 2 else ())
            (tmp_path / "kernel.cubin").write_bytes(made.binary)
            command = [str(dump), "-c", str(tmp_path / "kernel.cubin")]
            code = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            products, begins = code.count("HGMMA"), code.count("WARPGROUP.ARRIVE")
            expected = (16, 4) if s["tokens"] == 256 or s["rows"] == 256 else (8, 2)
            assert (products, begins) == expected, s
            assert "LDL" not in code, s


def test_rejected_nodes() -> None:
    target = sm_90()
    assert QUANTIZED_TILES.reject(product(), target) is None
    assert "does not have wgmma" in str(QUANTIZED_TILES.reject(product(), sm_80()))
    assert "16 tokens; at least 129" in str(QUANTIZED_TILES.reject(product(tokens="16"), target))
    assert "1 parts of 64 x 4096" in str(QUANTIZED_TILES.reject(product(64), target))
    assert "1 parts of 128 x 64" in str(QUANTIZED_TILES.reject(product(128, 64, group=64), target))
    assert "192 columns that share a scale" in str(QUANTIZED_TILES.reject(product(128, 384, group=192), target))
