"""The cost rule of expert products over codes of 8 bits, beside measurements on an H200 (bench/RESULTS.md)."""

from __future__ import annotations

import pytest

from llmc.codegen.backends.triton.scaled_moe import SCALED_MOE_DOWN
from llmc.codegen.candidates import candidates
from llmc.codegen.kernel import Schedule
from llmc.codegen.tuning_records import Tuning
from llmc.extension import load
from llmc.ir.graph import Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.targets.gpu_targets import sm_90

DOWN = """sym T in [1, 8192]
graph @main(%x: f8e4m3[8*T, 768], %o: i32[8*T], %s: i32[129], %w: weight f8e4m3[128, 2048, 768],
            %c: weight f32[128, 2048, 1], %a: f32[8*T, 1], %f: bf16[T, 8]) {
  %y = scaled_moe_down(%x, %o, %s, %w, %c, %a, %f) {block=[1, 0], dtype="bf16"} : bf16[T, 8, 2048]
  return %y
}
"""


def down() -> Node:
    (node,) = parse(DOWN, OPS).graphs["main"].nodes
    return node


def first_choice(tokens: int) -> Schedule:
    """The schedule that the rule chooses without measurements."""
    return candidates(down(), load().kernels, sm_90(), {"T": tokens}, Tuning())[0].schedule


@pytest.mark.parametrize("tokens", [512, 2048, 4096])
def test_steps_that_leave_room_for_a_second_program_are_chosen(tokens: int) -> None:
    """Steps of 256 columns took 1.3 to 1.6 times as long as the best at these sizes."""
    chosen = first_choice(tokens)
    assert chosen["bk"] == 128
    assert SCALED_MOE_DOWN.resident(SCALED_MOE_DOWN.experts(down()), chosen, sm_90()) > 1


def test_blocks_of_experts_that_are_not_evenly_filled_count() -> None:
    """With 128 rows for each expert on average, half of them have more, and need a second block of 128 rows."""
    assert first_choice(2048)["bm"] == 64
