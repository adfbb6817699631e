"""The number of parts that split-kv chooses, by rows, key heads and elements of a head."""

from __future__ import annotations

import pytest

from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.passes.split.split_kv import SplitKv
from llmc.targets.gpu_targets import sm_90


@pytest.mark.parametrize(
    ("rows", "heads", "size", "parts"),
    [
        ((1, 1), 8, 128, 16), ((1, 1), 8, 64, 32), ((5, 8), 8, 128, 2), ((5, 8), 8, 64, 4), ((5, 8), 8, 256, 2),
        ((17, 32), 8, 128, 2), ((17, 32), 8, 64, 2), ((33, 64), 8, 128, 1), ((33, 64), 8, 64, 1),
        ((129, 256), 8, 64, 1),
    ],
)  # fmt: skip
def test_narrow_heads_have_more_parts(rows: tuple[int, int], heads: int, size: int, parts: int) -> None:
    q = f"bf16[R, {4 * heads}, {size}]"
    m = parse(
        f"""
sym R in [{rows[0]}, {rows[1]}]
graph @decode(%q: {q}, %kv: state bf16[64, 2, {heads}, 16, {size}], %pages: state i32[256, 512], %rows: i32[R],
    %starts: i32[R+1], %pos: i32[R]) {{
  %y = paged_attention(%q, %kv, %pages, %rows, %starts, %pos) {{scale=0.5}} : {q}
  return %y
}}
""",
        OPS,
    )
    SplitKv().run(m, Ctx(OPS, sm_90(), {}))
    found = [n.attrs["splits"] for n in m.graphs["decode"].nodes if n.op.name == "paged_attention_split"]
    assert found == ([parts] if parts > 1 else [])
