"""Batched products of activations in Triton's interpreter compared with the reference, and as binaries."""

from __future__ import annotations

from pathlib import Path

import pytest
from draw import generator
from kernels.cases import SIZES, Text
from kernels.harness import Case
from kernels.triton_harness import ONE_TARGET, run_case

from llmc.codegen.backends.triton.matmul import MATMUL
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target

TEXTS = (
    Text("f32[2, 7, 21]; f32[2, 21, 41]", "matmul", "f32[2, 7, 41]"),
    Text("bf16[T, 133]; bf16[133, 5]", "matmul", "bf16[T, 5]"),
    Text("f16[R, 2, T, 20]; f16[R, 2, 20, T]", "matmul", "f16[R, 2, T, T]"),
    Text("bf16[3, 1, T]; f32[3, T, 70]", "matmul", "bf16[3, 1, 70]"),
    Text("bf16[1, 1, 1]; bf16[1, 1, 1]", "matmul", "bf16[1, 1, 1]"),
    Text("f32[130, 35]; f32[35, 97]", "matmul", "f32[130, 97]"),
)


@pytest.mark.parametrize("t", TEXTS, ids=lambda t: t.types)
def test_products(t: Text) -> None:
    g = t.graph()
    (node,) = g.nodes
    for i, s in enumerate(MATMUL.schedules(node, sm_90())):
        inputs = t.inputs(g, generator())
        run_case(Case(f"{t.types} {i}", g, MATMUL, s, inputs, atol=2e-3 if "f16" in t.types else 2e-5, sizes=SIZES))


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_binaries(target: Target, tmp_path: Path) -> None:
    nodes = [next(iter(t.graph().nodes)) for t in TEXTS[:4]]
    sources = [MATMUL.emit(n, MATMUL.schedules(n, target)[0], target) for n in nodes]
    made = TritonToolchain.find(target).compile([(s, "") for s in sources], tmp_path, jobs=1)
    assert all(c.shared <= target.limits.shared for c in made.values())


def test_first_schedules() -> None:
    """Large tiles if there is work for all multiprocessors, small ones for few rows."""
    for types, m in (("bf16[64, 4096, 128]; bf16[64, 128, 4096]", 128), ("bf16[8, 3, 128]; bf16[8, 128, 64]", 16)):
        a, c = ([int(x) for x in part.strip()[5:-1].split(",")] for part in types.split(";"))
        (node,) = Text(types, "matmul", f"bf16[{a[0]}, {a[1]}, {c[2]}]").graph().nodes
        found = MATMUL.schedules(node, sm_90())
        assert min(found, key=lambda s: MATMUL.cost_us(node, s, sm_90(), {}))["bm"] == m
