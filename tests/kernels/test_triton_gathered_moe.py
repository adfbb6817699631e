"""The experts' products for few tokens in Triton's interpreter compared with their references, and as binaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.cases import CLAMPED
from kernels.harness import Case
from kernels.test_triton_moe import chosen, gated
from kernels.triton_harness import ONE_TARGET, run_case, some

from llmc.codegen.backends.triton.gathered_moe import MOE_GATHER_DOWN, MOE_GATHER_UP
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.codegen.kernel import Kernel, Schedule
from llmc.ir.graph import Graph
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target

pytestmark = pytest.mark.drawn
# tokens, experts of each, experts, columns, depth: sizes below and above a program's, and no multiples of them
SIZES = ((1, 1, 1, 1, 1), (1, 3, 5, 10, 37), (1, 8, 128, 9, 300), (3, 2, 6, 5, 700), (2, 4, 9, 18, 64))


def graph(op: str, types: list[Any], attrs: dict[str, Any]) -> Graph:
    g = Graph("test")
    node = g.add(OPS[op], [g.input(f"x{i}", t, weight=i == 2) for i, t in enumerate(types)], attrs)
    g.outputs = list(node.results)
    return g


def up(
    t: Any, k: int, experts: int, n: int, d: int, x: str = "bf16", w: str = "bf16", body: str = SWIGLU, bias: str = "",
    eps: float | None = None, idx: str = "i32",
) -> Graph:  # fmt: skip
    """The first product; eps: with the norm before it."""
    types = [tensor(x, t, d), tensor(idx, t, k), tensor(w, experts, 2 * n, d)]
    types += [tensor(w, d)] * (eps is not None) + ([tensor(bias, experts, 2 * n)] if bias else [])
    attrs = {"body": body} | ({"eps": eps} if eps is not None else {})
    return graph("moe_gather_up" if eps is None else "norm_moe_gather_up", types, attrs)


def down(
    t: Any, k: int, experts: int, n: int, d: int, x: str = "bf16", w: str = "bf16", bias: str = "", residual: str = ""
) -> Graph:  # fmt: skip
    """The second product, of n columns and depth d."""
    pairs = tensor("i32", t, k).numel
    types = [tensor(x, pairs, d), tensor("i32", t, k), tensor(w, experts, n, d), tensor(x, t, k)]
    types += [tensor(residual or x, t, n)] + ([tensor(bias, experts, n)] if bias else [])
    return graph("moe_gather_down", types, {})


def case(kernel: Kernel, g: Graph, t: int, schedule: Schedule) -> Case:
    """Draw operands: rows of different magnitudes, and sums near 1."""
    rng = generator()
    k, experts = (int(g.inputs[i].type.shape[axis]) for i, axis in ((1, 1), (2, 0)))
    drawn = [rng.standard_normal([int(d.subs({"T": t})) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    normed = next(iter(g.nodes)).op.name.startswith("norm")
    scale = np.geomspace(0.1, 10, len(drawn[0]))[:, None].astype(np.float32) if normed else np.float32(1)
    stack = drawn[2] / np.float32(drawn[2].shape[-1] ** 0.5)
    inputs = [drawn[0] * scale, chosen(t, k, experts), stack, *drawn[3:]]
    return Case(f"{kernel.name} {t} {schedule}", g, kernel, schedule, inputs, atol=2e-2, sizes={"T": t})


def check(kernel: Kernel, g: Graph, t: int, share: float = 0.0) -> None:
    """Run the first schedule, or with `share` that part of them."""
    (node,) = g.nodes
    assert kernel.reject(node, sm_90()) is None
    found = kernel.schedules(node, sm_90())
    for s in some(found, share) if share else found[:1]:
        run_case(case(kernel, g, t, s))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products(sizes: tuple[int, int, int, int, int]) -> None:
    t, *rest = sizes
    for size in (t, "T"):
        check(MOE_GATHER_UP, up(size, *rest), t)
        check(MOE_GATHER_UP, up(size, *rest, eps=1e-5), t)
        check(MOE_GATHER_DOWN, down(size, *rest), t)


@pytest.mark.parametrize(("x", "w"), (("f32", "f32"), ("f16", "f16"), ("f32", "bf16")))
def test_dtypes_and_activations(x: str, w: str) -> None:
    for name in ("gelu", "gelu_tanh", "relu"):
        check(MOE_GATHER_UP, up("T", 2, 5, 9, 20, x, w, gated(name), idx="i64", eps=0.01), 3)
    check(MOE_GATHER_DOWN, down("T", 2, 5, 9, 20, x, w, residual="f32"), 3)


@pytest.mark.parametrize(("w", "bias"), (("bf16", "bf16"), ("f32", "f32"), ("bf16", "f32")))
def test_biases_and_a_clamped_gate(w: str, bias: str) -> None:
    for t, *rest in SIZES[1:4]:
        check(MOE_GATHER_UP, up(t, *rest, w, w, CLAMPED, bias), t)
        check(MOE_GATHER_UP, up(t, *rest, w, w, CLAMPED, bias, eps=1e-6), t)
        check(MOE_GATHER_DOWN, down(t, *rest, w, w, bias), t)


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
def test_every_schedule(dtype: str) -> None:
    check(MOE_GATHER_UP, up(1, 2, 3, 6, 2500, dtype, dtype, eps=1e-5), 1, 0.4)
    check(MOE_GATHER_DOWN, down(1, 3, 4, 11, 1300, dtype, dtype), 1, 0.4)


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_binaries(target: Target, tmp_path: Path) -> None:
    graphs = (
        (MOE_GATHER_UP, up(1, 8, 128, 768, 2048, eps=1e-6)),
        (MOE_GATHER_UP, up("T", 4, 32, 2880, 2880, body=CLAMPED, bias="bf16")),
        (MOE_GATHER_DOWN, down(1, 8, 128, 2048, 768)), (MOE_GATHER_DOWN, down("T", 4, 32, 2880, 2880, bias="bf16")),
    )  # fmt: skip
    sources = []
    for kernel, g in graphs:
        (node,) = g.nodes
        sources += [kernel.emit(node, s, target) for s in some(kernel.schedules(node, target), 0.3)]
    made = TritonToolchain.find(target).compile([(s, "") for s in sources], tmp_path, jobs=1)
    assert all(c.shared <= target.limits.shared for c in made.values())


def test_rejected_nodes() -> None:
    (node,) = down(1, 2, 4, 8, "T").nodes
    assert "not constant" in str(MOE_GATHER_DOWN.reject(node, sm_90()))
