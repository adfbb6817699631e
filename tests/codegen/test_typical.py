"""The sizes for which times of nodes are predicted and measured."""

from __future__ import annotations

from llmc.codegen.candidates import typical
from llmc.ir.ops import OPS
from llmc.ir.text import parse

TEXT = """sym T in [1, 8192]
sym R in [1, {rows}]
graph @step(%x: bf16[T, 64], %last: i32[R], %w: weight bf16[32, 64]){range} {{
  %y = take(%x, %last) : bf16[R, 64]
  %z = linear(%y, %w) : bf16[R, 32]
  return %z
}}
"""


def sizes(range: str, rows: int = 256) -> list[dict[str, int]]:
    m = parse(TEXT.format(range=range, rows=rows), OPS)
    g = m.graphs["step"]
    return [typical(m, g, n) for n in g.nodes]


def test_prompts_come_beside_rows_that_decode() -> None:
    assert sizes(" where T in [129, 512]") == [{"T": 512, "R": 96}] * 2
    assert sizes(" where T in [129, 512]", rows=16)[1]["R"] == 16


def test_one_graph_for_all_steps_is_as_before() -> None:
    assert sizes("") == [{"T": 256, "R": 8}] * 2


def test_a_range_of_rows_stands() -> None:
    assert sizes(" where R in [3, 4]")[1]["R"] == 4


def test_the_last_range_is_represented_by_whole_tiles() -> None:
    assert sizes(" where T in [2049, 8192]")[0]["T"] == 4096
    assert sizes(" where R in [129, 256]")[1]["R"] == 256
