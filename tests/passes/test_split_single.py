"""Which graphs `split-single` splits, with and without a kernel that leads for the prompts' rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.passes.split.split_single import SplitSingle
from llmc.targets.gpu_targets import sm_90


class Prompts:
    """A kernel that leads for rows of several tokens in steps of at least 512."""

    name, language = "test/prompts", "cute"

    def __init__(self, missing: str = "") -> None:
        self._missing = missing

    def claims(self, node: Any) -> bool:
        return bool(node.op.name == "paged_attention")

    def reject(self, node: Any, target: Any) -> str | None:
        return None

    def missing(self) -> str:
        return self._missing

    def leads(self, node: Any, target: Any, env: Mapping[str, int]) -> bool:
        return node.attrs["least"] == 2 and env["T"] >= 512


@pytest.mark.parametrize(
    ("tokens", "kernels", "split"),
    [
        (511, {"test/prompts": Prompts()}, False),
        (512, {"test/prompts": Prompts()}, True),
        (768, {"test/prompts": Prompts("its package is not installed")}, False),
        (768, {}, False),
        (769, {}, True),
    ],
)  # fmt: skip
def test_rows_are_separated_where_a_kernel_leads_for_prompts(
    tokens: int, kernels: Mapping[str, Any], split: bool
) -> None:
    m = parse(
        f"""
sym T in [1, {tokens}]
sym R in [1, 64]
graph @step(%q: bf16[T, 8, 128], %kv: state bf16[64, 2, 2, 16, 128], %pages: state i32[64, 64], %rows: i32[R],
    %starts: i32[R+1], %pos: i32[T]) {{
  %y = paged_attention(%q, %kv, %pages, %rows, %starts, %pos) {{scale=0.5}} : bf16[T, 8, 128]
  return %y
}}
""",
        OPS,
    )
    assert SplitSingle().run(m, Ctx(OPS, sm_90(), kernels)) == split
    ops = [n.op.name for n in m.graphs["step"].nodes]
    assert ops == (["paged_attention", "paged_attention_single"] if split else ["paged_attention"])
