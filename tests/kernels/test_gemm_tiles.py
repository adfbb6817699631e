"""The CUDA C++ product in large tiles: its binaries, rejected nodes, and the operand that goes through shared memory.

tests/gpu/test_large_tiles.py runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.test_cuda_linear import TEXT, disassembled, module, product

from llmc.codegen.backends.cuda.gemm_tiles import GEMM_TILES, ROWS, stages
from llmc.codegen.cubin import read_entry
from llmc.extension import load
from llmc.ir.graph import Node
from llmc.targets.gpu_targets import sm_90, sm_100

EXTRAS = """
sym T in [1, 4096]
graph @main(%x: bf16[T, 520], %w: weight bf16[264, 520], %c: f32[264], %r: bf16[T, 264], %s: f16[T, 264]) {
  %y = linear_map(%x, %w, %c, %r, %s) {parts=1, body="add(add(mul(a0, a1), a2), a3)"} : bf16[T, 264]
  return %y
}
"""


def extras(text: str = EXTRAS) -> Node:
    return next(iter(module(text).graphs["main"].nodes))


def test_tiles_become_binaries_without_spills_or_fences(tmp_path: Path) -> None:
    """A fence of the GPU in the loop would take a microsecond; the tensor cores would wait for sums in memory."""
    node, target = product(module()), sm_90()
    tool = load().toolchains["cuda"](target)
    schedules = GEMM_TILES.schedules(node, target)
    assert {s["rows"] for s in schedules} == set(ROWS) and len(schedules) == 3 * len(ROWS)
    ways = [s for s in schedules if s["rows"] in (256, 160)]
    sources = [GEMM_TILES.emit(node, s, target) for s in ways]
    made = tool.compile([(s, "") for s in sources], tmp_path, jobs=2)
    for way, source in zip(ways, sources, strict=True):
        c = made[tool.key(source)]
        blocks = way["along_m"] * way["along_n"]
        assert c.threads == 384 and c.shared <= target.limits.shared
        assert c.boxes == (((64, 64), 3), ((way["rows"] // 4, 64), 3))
        assert read_entry(c.binary, source.entry).sizes == (128, 128, 8, 4)
        assert source.grid[0] == 132 and source.cluster == ((2, 1, 1) if blocks == 2 else ())
        assembly = disassembled(c.binary, tmp_path)
        assert not any(x in assembly for x in ("STL", "LDL", "MEMBAR.ALL.GPU"))
        assert ("UTMALDG.2D.MULTICAST" in assembly) == (blocks == 2)


def test_as_many_steps_are_under_way_as_fit() -> None:
    assert [stages(rows, sm_90()) for rows in ROWS] == [4, 4, 4, 5, 6]


def test_the_first_operand_like_the_result_goes_through_shared_memory() -> None:
    way = {"rows": 256, "along_m": 2, "along_n": 1}
    text = GEMM_TILES.emit(extras(), way, sm_90()).text
    assert "constexpr int STAGED = 1;" in text and "#define FIRST_POINTER e1" in text
    (loads,) = (line for line in text.splitlines() if "void load_others(" in line)
    assert "load_pair(to.e0," in loads and "load_pair(to.e2," in loads and "to.e1" not in loads
    assert "constexpr int STAGED = 0;" in GEMM_TILES.emit(product(module()), way, sm_90()).text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TEXT.replace("bf16", "f16"), "operand type f16"),
        (TEXT.replace("520", "516"), "264 x 516 are not constant multiples of 8 and 8"),
        (TEXT.replace("520", "192"), "3 steps of 64 columns; the minimum is 4"),
    ],
)
def test_rejected_nodes(text: str, why: str) -> None:
    assert why in str(GEMM_TILES.reject(product(module(text)), sm_90()))


def test_a_result_of_four_bytes_is_rejected() -> None:
    text = EXTRAS.replace('a3)"}', 'a3)", dtype="f32"}').replace(": bf16[T, 264]\n  return", ": f32[T, 264]\n  return")
    assert GEMM_TILES.reject(extras(text), sm_90()) == "a result of f32"


def test_other_targets_than_hopper_are_rejected() -> None:
    node = product(module())
    assert GEMM_TILES.reject(node, sm_90()) is None
    assert "does not have wgmma" in str(GEMM_TILES.reject(node, sm_100()))


def test_a_last_round_of_few_tiles_is_predicted_to_take_half_a_round() -> None:
    node, target = product(module(TEXT.replace("520", "4096").replace("264", "4096"))), sm_90()
    way = {"rows": 256, "along_m": 2, "along_n": 1}
    one, more, two = (GEMM_TILES.cost_us(node, way, target, {"T": n}) for n in (1024, 1152, 2048))
    assert one < more < two and more - one == pytest.approx(two - more, rel=0.01)
