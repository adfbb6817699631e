"""cuda/decode_attention: its binaries, tensor maps, what it rejects, and where it is chosen.

tests/gpu/test_decode_attention.py runs it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kernels.test_cuda_skinny_wgmma import disassembled

from llmc.codegen.backends.cuda import nvrtc_toolchain
from llmc.codegen.backends.cuda.decode_attention import DECODE_ATTENTION, SINGLE, SPLIT, Problem
from llmc.codegen.candidates import candidates
from llmc.codegen.cubin import read_entry
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.codegen.tuning_records import Tuning
from llmc.extension import load
from llmc.ir.graph import Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.targets.gpu_targets import sm_90, sm_100
from llmc.targets.target import Target, deterministic


def attention(
    op: str = "paged_attention", q: str = "bf16", pool: str = "", heads: tuple[int, int, int] = (32, 8, 128),
    page: int = 16, attrs: str = "", tokens: str = "R", rows: str = "R",
) -> Node:  # fmt: skip
    """Return a node of one of the ops of paged attention."""
    h, g, d = heads
    types = {
        "q": f"{q}[{tokens}, {h}, {d}]", "kv": f"state {pool or q}[P, 2, {g}, {page}, {d}]",
        "pages": "state i32[R, 64]", "rows": f"i32[{rows}]", "starts": "i32[R+1]", "positions": f"i32[{tokens}]",
        "y": f"{q}[{tokens}, {h}, {d}]", "scales": f"f32[{2 * g}]",
    }  # fmt: skip
    split, single = op.endswith("split"), op.endswith("single")
    names = [n for n in types if {"starts": not split, "y": single, "scales": pool == "f8e4m3"}.get(n, True)]
    results = f"f32[{tokens}, {h}, 4, {d}], f32[{tokens}, {h}, 4]" if split else types["q"]
    attrs = f"scale=0.1{', splits=4' * split}{attrs}"
    text = f"""
sym T in [1, 4096]
sym R in [1, 512]
sym P in [1, 65536]
graph @main({", ".join(f"%{n}: {types[n]}" for n in names)}) {{
  %out{", %lse" * split} = {op}({", ".join(f"%{n}" for n in names)}) {{{attrs}}} : {results}
  return %out
}}
"""
    return next(iter(parse(text, OPS).graphs["main"].nodes))


@pytest.mark.parametrize(
    "node",
    [
        attention(), attention("paged_attention_split", heads=(16, 2, 256), attrs=", softcap=3.0"),
        attention("paged_attention_single", tokens="T", pool="f8e4m3"), attention(q="f16", pool="f8e4m3", page=64),
        attention(heads=(64, 4, 64), attrs=", window=100"),
    ],
    ids=("whole", "parts", "beside longer rows", "8-bit floats", "window"),
)  # fmt: skip
def test_schedules_become_binaries(node: Node, tmp_path: Path) -> None:
    """Two of them: blocks fit into a multiprocessor, nothing spills, and a tile is one bulk copy."""
    target, p = sm_90(), Problem.of(node)
    assert DECODE_ATTENTION.reject(node, target) is None
    found = random.sample(DECODE_ATTENTION.schedules(node, target), 2)
    sources = [DECODE_ATTENTION.emit(node, {**s, READ_BEFORE_WAIT: 1}, target) for s in found]
    tool = load().toolchains["cuda"](target)
    made = tool.compile([(s, "") for s in sources], tmp_path, jobs=1)
    for s, source in zip(found, sources, strict=True):
        binary = made[tool.key(source)]
        assert binary.threads == 32 * s["warps"] and binary.shared * p.resident(s, target) <= target.limits.shared
        ((box, _),) = binary.boxes
        assert box == (1, 1, p.size // p.stripe, 16, p.stripe) and box[2] * box[4] == p.size
        assert len(read_entry(binary.binary, source.entry).sizes) == len(source.passes)
        assembly = disassembled(binary.binary, tmp_path)
        assert assembly.count("UTMALDG.5D") and "HMMA" in assembly and "STL" not in assembly and "LDL" not in assembly


@pytest.mark.parametrize("item", ["bf16", "f8e4m3"])
def test_the_map_covers_the_pool_exactly(item: str) -> None:
    """Random sizes: the last element that the map can address is the last one of the pool."""
    for _ in range(50):
        heads, page, size = random.randint(1, 9), 16 * random.randint(1, 4), 64 * random.randint(1, 4)
        if item != "bf16" and size == 192:
            continue
        node = attention(heads=(heads, heads, size), page=page, pool=item if item != "bf16" else "")
        assert DECODE_ATTENTION.reject(node, sm_90()) is None
        pages = random.randint(1, 1000)
        m = Problem.of(node).map(node.operands[1].type.shape[0])
        shape = [int(d.subs({"P": pages}).const or 0) for d in m.shape]
        strides = [*(int(d.const or 0) for d in m.strides), 1]
        assert 1 + sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) == pages * 2 * heads * page * size


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (attention(q="f32"), "queries of f32"),
        (attention(q="f16", pool="bf16"), "a pool of bf16"),
        (attention(heads=(32, 8, 80)), "heads of 80"),
        (attention(heads=(8, 2, 192), pool="f8e4m3"), "heads of 192"),
        (attention(page=8), "pages of 8 tokens"),
        (attention(heads=(34, 2, 64)), "34 query heads of 64 for 2 key heads"),
        (attention(heads=(16, 1, 256)), "16 query heads of 256 for 1 key heads"),
        (attention(attrs=", least=2"), "rows of several tokens"),
        (attention(tokens="T"), "rows of several tokens"),
    ],
)
def test_what_it_rejects(node: Node, why: str) -> None:
    assert why in str(DECODE_ATTENTION.reject(node, sm_90()))


def best(node: Node, rows: int, target: Target) -> str:
    sizes = {"T": max(rows, 2048), "R": rows, "P": 256}
    return candidates(node, load().kernels, target, sizes, Tuning.shipped(target))[0].kernel.name


@pytest.mark.parametrize("rows", [1, 7, 64, 512])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (32, 8, 64), (32, 4, 128), (8, 2, 256)])
@pytest.mark.parametrize("pool", ["", "f8e4m3"])
def test_the_rule_takes_single_tokens(rows: int, heads: tuple[int, int, int], pool: str) -> None:
    """Without a measurement of it, whatever was measured of others; but not for deterministic targets."""
    nodes = [attention(op, heads=heads, pool=pool) for op in ("paged_attention", SPLIT)]
    beside = attention(SINGLE, heads=heads, pool=pool, tokens="T")
    assert {best(n, rows, sm_90()) for n in (*nodes, beside)} == {DECODE_ATTENTION.name}
    fixed = candidates(nodes[0], load().kernels, deterministic(sm_90(), 0), {"R": rows, "P": 256}, Tuning())
    assert all(o.kernel.language == "triton" for o in fixed)


@pytest.mark.parametrize(
    ("node", "stages"),
    [
        (attention(), 2), (attention(SPLIT), 2), (attention(SINGLE, tokens="T"), 1), (attention(heads=(8, 2, 256)), 1),
        (attention(SPLIT, tokens="1", rows="1"), 1),
    ],
)  # fmt: skip
def test_the_first_schedule(node: Node, stages: int) -> None:
    first, *_ = candidates(node, load().kernels, sm_90(), {"T": 256, "R": 256, "P": 256}, Tuning())
    assert first.schedule == {"warps": 4, "stages": stages}


def test_without_its_compiler_others_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_toolchain, "missing", lambda: "NVRTC is not installed")
    assert best(attention(), 256, sm_90()) == "triton/decode_attention"


def test_only_hopper() -> None:
    assert "sm_90" in str(DECODE_ATTENTION.reject(attention(), sm_100()))
