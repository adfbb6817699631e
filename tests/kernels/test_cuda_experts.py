"""The CUDA C++ products of experts: binaries, rejected nodes, the order of schedules, and when they are chosen.

tests/gpu/test_cuda_kernels.py runs them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.cases import CLAMPED, SQUARED
from kernels.test_triton_moe import down, up

from llmc.codegen.backends.cuda import nvrtc_toolchain
from llmc.codegen.backends.cuda.grouped_wgmma import GROUPED_WGMMA
from llmc.codegen.candidates import Candidate
from llmc.codegen.candidates import candidates as node_candidates
from llmc.codegen.cubin import read_entry
from llmc.codegen.expert_stack import chosen_experts, row_blocks
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.codegen.tuning_records import Tuning
from llmc.extension import load
from llmc.ir.graph import Graph, Node
from llmc.targets.gpu_targets import sm_90, sm_100

OURS = "cuda/grouped_wgmma"


def node_of(g: Graph) -> Node:
    (node,) = g.nodes
    return node


@pytest.mark.parametrize(
    "g",
    [
        up("T", 8, 128, 768, 2048), down("T", 8, 128, 768, 2048), up(1, 4, 32, 2880, 2880, body=CLAMPED, bias="f32"),
        down("T", 4, 32, 2880, 2880, bias="bf16"),
    ],
    ids=("up", "down", "clamped", "biased"),
)  # fmt: skip
def test_binaries(g: Graph, tmp_path: Path) -> None:
    """Of the schedules the one with the most registers, the one with the most buffers, and one that begins early."""
    node, target = node_of(g), sm_90()
    assert GROUPED_WGMMA.reject(node, target) is None
    ways = ({"bm": 128, "bn": 256}, {"bm": 64, "bn": 64}, {"bm": 128, "bn": 96, READ_BEFORE_WAIT: 1})
    assert all({k: w[k] for k in ("bm", "bn")} in GROUPED_WGMMA.schedules(node, target) for w in ways)
    tool = load().toolchains["cuda"](target)
    sources = [GROUPED_WGMMA.emit(node, s, target) for s in ways]
    made = tool.compile([(s, "") for s in sources], tmp_path, jobs=2)
    sizes = (8, 8, 8, 128, *(8 for _ in node.operands[4:]), 8)
    for way, source in zip(ways, sources, strict=True):
        c = made[tool.key(source)]
        assert c.threads == 128 + 2 * way["bm"] and c.shared <= target.limits.shared
        assert c.boxes == (((way["bn"] // 2, 64), 3),) and read_entry(c.binary, source.entry).sizes == sizes
        assert [str(d) for d in source.grid] == ["132", "1", "1"]  # for any number of tokens


@pytest.mark.parametrize(
    ("g", "why"),
    [
        (up("T", 2, 4, 16, 32, "f16", "f16"), "operand type f16"),
        (up("T", 2, 4, 12, 32), "the experts' sizes 24 x 32 are not constant multiples of 16 and 8"),
        (down("T", 2, 4, 12, 32), "the experts' sizes 32 x 12 are not constant multiples of 8 and 8"),
        (up("T", 2, 513, 16, 32), "513 experts; the maximum is 512"),
        (up("T", 2, 4, 16, 32, body=SQUARED), "experts without a gate"),
    ],
)
def test_rejected_nodes(g: Graph, why: str) -> None:
    assert why in str(GROUPED_WGMMA.reject(node_of(g), sm_90()))


def test_other_targets_than_hopper_are_rejected() -> None:
    node = node_of(up("T", 8, 128, 768, 2048))
    assert "does not have wgmma" in str(GROUPED_WGMMA.reject(node, sm_100()))
    assert "does not have wgmma" in str(GROUPED_WGMMA.reject(node, replace(sm_90(), features=frozenset({"interpret"}))))


def first(g: Graph, tokens: int, **options: Any) -> Candidate:
    return node_candidates(node_of(g), load().kernels, sm_90(), {"T": tokens}, Tuning(), **options)[0]


@pytest.mark.parametrize("g", [up("T", 8, 128, 768, 2048), down("T", 2, 8, 14336, 4096)], ids=["qwen3", "mixtral"])
def test_prompts_take_it_without_measurements(g: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [first(g, t).kernel.name for t in (512, 2048, 8192)] == [OURS] * 3
    assert first(g, 8192).schedule["bm"] == 128

    def absent() -> None:
        raise ModuleNotFoundError("NVRTC is not installed")

    monkeypatch.setattr(nvrtc_toolchain, "nvrtc_version", absent)
    assert first(g, 2048).kernel.name.startswith("triton/moe_")


def test_deterministic_targets_do_without_it() -> None:
    target = replace(sm_90(), deterministic=True)
    found = node_candidates(node_of(up("T", 8, 128, 768, 2048)), load().kernels, target, {"T": 2048}, Tuning())
    assert {o.kernel.name for o in found} == {"triton/moe_up"}


@pytest.mark.parametrize(("pairs", "experts"), [(1, 1), (8, 128), (300, 7), (16384, 128), (9000, 3)])
def test_mean_numbers_of_experts_and_blocks(pairs: int, experts: int) -> None:
    """Compared with the mean of 400 draws, whose standard error is at most a fortieth of a draw's deviation."""
    rng = generator()
    draws = [np.bincount(rng.integers(0, experts, pairs), minlength=experts) for _ in range(400)]
    chosen = [np.count_nonzero(d) for d in draws]
    assert abs(chosen_experts(pairs, experts) - np.mean(chosen)) <= 0.3 * np.std(chosen) + 1e-9
    for height in (16, 64, 128):
        blocks = [int(sum(-(-d // height))) for d in draws]
        assert abs(row_blocks(pairs, experts, height) - np.mean(blocks)) <= 0.3 * np.std(blocks) + 0.02 * np.mean(
            blocks
        )
