"""Products of few tokens whose columns the warps divide: schedules, binaries, rejected nodes, and when it is chosen;
and the blocks of a grid whose last tiles are halved.

tests/gpu/test_cuda_kernels.py runs both kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draw import generator

from llmc.codegen.backends.cuda.quantized_wgmma import QUANTIZED_WGMMA
from llmc.codegen.backends.cuda.skinny_slices import MAX_WARPS, SKINNY_SLICES, STRIP, SlicedProduct
from llmc.codegen.cubin import read_entry
from llmc.codegen.pack import Pack
from llmc.codegen.select import Select
from llmc.extension import load
from llmc.ir.graph import Module, Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.passes.base import Ctx
from llmc.targets.gpu_targets import sm_80, sm_90

SILU = "mul(mul(a0, sigmoid(a0)), a1)"


Sizes = tuple[str, int, int, int, int, bool]


def module(tokens: str, n: int, k: int, parts: int = 1, group: int = 128, zeros: bool = False) -> Module:
    """A product over codes that are not packed."""
    rows, table, passed = n * parts, "", ""
    if zeros:
        table, passed = f", %z: weight u8[{rows}, {k // group}]", ", %z"
    body, zero = (SILU if parts == 2 else "a0"), ("zeros=true" if zeros else "zero_point=8")
    attrs = f'block=[1, {group}], parts={parts}, body="{body}", {zero}, bits=4'
    text = f"""
sym T in [1, 16]
graph @main(%x: bf16[{tokens}, {k}], %w: weight u8[{rows}, {k}], %s: weight bf16[{rows}, {k // group}]{table}) {{
  %y = quantized_linear(%x, %w, %s{passed}) {{{attrs}}} : bf16[{tokens}, {n}]
  return %y
}}
"""
    return parse(text, OPS)


def product(*sizes: Any) -> Node:
    (node,) = module(*sizes).graphs["main"].nodes
    return node


def chosen(*sizes: Any, prefer: tuple[str, ...] = ()) -> Node:
    """The product with its kernel, over packed codes if that kernel packs them."""
    m, ctx = module(*sizes), Ctx(OPS, sm_90(), load().kernels)
    for p in (Select(prefer=prefer), Pack()):
        p.run(m, ctx)
    return next(n for n in m.graphs["main"].nodes if n.op.name.endswith("_linear"))


NODES = (
    ("16", 6144, 4096, 1, 128, False), ("16", 14336, 4096, 2, 128, False), ("9", 4096, 14336, 1, 128, True),
    ("5", 320, 4096, 1, 16, True), ("T", 192, 576, 1, 32, True), ("16", 128, 1216, 2, 64, False),
)  # fmt: skip


@pytest.mark.parametrize("sizes", NODES, ids=str)
def test_schedules_cover_the_weight_and_fit(sizes: Sizes) -> None:
    node, target = product(*sizes), sm_90()
    assert SKINNY_SLICES.reject(node, target) is None
    p, found = SlicedProduct(node), SKINNY_SLICES.schedules(node, target)
    assert {s["tokens"] for s in found} == ({8, 16} if sizes[0] == "T" else {8} if int(sizes[0]) <= 8 else {16})
    for s in found:
        assert s["groups"] * s["slices"] <= MAX_WARPS and s["strips"] % p.parts == 0
        assert p.steps(s) * s["slices"] * s["split"] * p.step(s) >= p.k and p.k % p.step(s) == 0
        assert p.rows(s) == s["groups"] * s["strips"] * STRIP // p.parts
        assert p.shared(s) <= target.limits.shared and s["stages"] <= p.steps(s)
        assert s["groups"] == 1 or p.token_steps(s) == p.steps(s)
        assert SKINNY_SLICES.cost_us(node, s, target, {"T": 16}) > 0


@pytest.mark.parametrize("sizes", NODES, ids=str)
def test_a_drawn_schedule_becomes_a_binary_of_sm_90(sizes: Sizes, tmp_path: Path) -> None:
    target, node = sm_90(), chosen(*sizes, prefer=("cuda/skinny_slices",))
    assert node.op.name == "packed_fragments_linear" and node.choice["kernel"] == "cuda/skinny_slices"
    tool, found = load().toolchains["cuda"](target), SKINNY_SLICES.schedules(node, target)
    s = found[generator().integers(len(found))]
    source = SKINNY_SLICES.emit(node, s, target)
    made = tool.compile([(source, "")], tmp_path)[tool.key(source)]
    assert made.shared == SlicedProduct(node).shared(s) and made.boxes == (((s["tokens"], 64), 3),)
    assert made.threads == s["groups"] * s["slices"] * 32
    assert read_entry(made.binary, source.entry).sizes == (128, *(8,) * (3 + sizes[5]), 4)
    assert source.cluster == ((s["split"], 1, 1) if s["split"] > 1 else ())


def test_what_it_refuses() -> None:
    assert "17 tokens; at most 16" in str(SKINNY_SLICES.reject(product("17", 256, 512), sm_90()))
    assert "208 for each scale" in str(SKINNY_SLICES.reject(product("4", 256, 832, 1, 208), sm_90()))
    assert "does not have wgmma" in str(SKINNY_SLICES.reject(product("4", 256, 512), sm_80()))


def test_it_is_chosen_where_it_was_measured() -> None:
    assert chosen("T", 6144, 4096).choice["kernel"] == "cuda/skinny_slices"
    assert chosen("T", 6144 + 64, 4096).choice["kernel"] != "cuda/skinny_slices"


@pytest.mark.parametrize("tokens", [129, 256, 300, 512, 600, 2048, 4095])
def test_halved_tiles_cover_every_token_once(tokens: int) -> None:
    """The blocks of a grid, with the arithmetic of quantized_wgmma.cu."""
    target, (n, rows) = sm_90(), (14336, 64)
    node = product(str(tokens), n, 4096, 2)
    way = next(s for s in QUANTIZED_WGMMA.schedules(node, target) if s.get("halves"))
    b, units = QUANTIZED_WGMMA.bind(node, way, target), target.limits.units
    assert way["rows"] == rows and way["tokens"] == 256 and b.constants["ROUND"] == units
    tiles = -(-tokens // 256) * (n // rows)
    left, done = tiles % units, list[tuple[int, int]]()
    for block in range(int(b.grid[0])):
        half = block - (tiles - left)
        if 2 * left <= units and half >= 0:
            done.append((tiles - left + half // 2, half % 2))
        elif block < tiles:
            done += [(block, 0), (block, 1)]
    assert sorted(done) == [(tile, half) for tile in range(tiles) for half in (0, 1)]
