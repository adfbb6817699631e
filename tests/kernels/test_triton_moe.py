"""The experts' kernels in Triton's interpreter compared with their references, and other dtypes as binaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draw import generator
from kernels.cases import CLAMPED, SQUARED
from kernels.harness import Case
from kernels.triton_harness import ONE_TARGET, TARGETS, run_case, some
from kernels.triton_order import memory_order, ttir

from llmc.codegen.backends.triton.moe import MOE_COMBINE, MOE_DOWN, MOE_ROUTE, MOE_UP
from llmc.codegen.backends.triton.topk_map import TOPK_MAP, TOPK_ROUTE
from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain
from llmc.codegen.kernel import READ_BEFORE_WAIT, Kernel
from llmc.ir.graph import Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU, moe_route, parts
from llmc.ir.scalar import arg
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target

# tokens, experts of each, experts
pytestmark = pytest.mark.drawn
ROUTINGS = ((1, 1, 1), (1, 3, 5), (7, 2, 6), (40, 4, 9), (33, 2, 130))


def gated(name: str) -> str:
    """The body that multiplies up by an activation of the gate."""
    activation = OPS[name].scalar
    assert activation is not None
    return str(activation({}) * arg(1))


def graph(op: str, types: list[Any], attrs: dict[str, Any]) -> Graph:
    g = Graph("test")
    operands = [g.input(f"x{i}", t, weight=i == 3) for i, t in enumerate(types)]
    node = g.add(OPS[op], operands, attrs)
    g.outputs = list(node.results)
    return g


def route(t: Any, k: int, experts: int, dtype: str = "i32") -> Graph:
    return graph("moe_route", [tensor(dtype, t, k)], {"experts": experts})


def up(
    t: Any, k: int, experts: int, n: int, d: int, x: str = "bf16", w: str = "bf16", body: str = SWIGLU, bias: str = ""
) -> Graph:
    pairs = tensor("i32", t, k).numel
    rows = parts(body) * n
    types = [tensor(x, t, d), tensor("i32", pairs), tensor("i32", experts + 1), tensor(w, experts, rows, d)]
    return graph("moe_up", types + ([tensor(bias, experts, rows)] if bias else []), {"k": k, "body": body})


def down(t: Any, k: int, experts: int, n: int, d: int, x: str = "bf16", w: str = "bf16", bias: str = "") -> Graph:
    pairs = tensor("i32", t, k).numel
    types = [tensor(x, pairs, n), tensor("i32", pairs), tensor("i32", experts + 1), tensor(w, experts, d, n)]
    return graph("moe_down", [*types, tensor(x, t, k)] + ([tensor(bias, experts, d)] if bias else []), {})


def chosen(t: int, k: int, experts: int) -> np.ndarray:
    """Draw distinct experts for each token, if possible without the last expert."""
    rng = generator()
    free = max(k, experts - 1)
    return np.stack([rng.permutation(free)[:k] for _ in range(t)]).astype(np.int32)


def check(kernel: Kernel, g: Graph, t: int, k: int, experts: int, schedule: Any = None, idx: Any = None) -> None:
    rng = generator()
    order, starts = moe_route.ref(chosen(t, k, experts) if idx is None else idx, experts=experts)
    drawn = [rng.standard_normal([int(d.subs({"T": t})) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    arrays = [drawn[0], order.astype(np.int32), starts.astype(np.int32), drawn[3] / 4, *drawn[4:]]
    (node,) = g.nodes
    s = schedule or kernel.schedules(node, sm_90())[0]
    run_case(Case(f"{kernel.name} {t} {k} {experts} {s}", g, kernel, s, arrays, atol=2e-2, sizes={"T": t}))


def check_routing(g: Graph, idx: np.ndarray) -> None:
    """Run every schedule."""
    (node,) = g.nodes
    for s in MOE_ROUTE.schedules(node, sm_90()):
        run_case(Case(f"route {idx.shape} {s}", g, MOE_ROUTE, s, [idx], sizes={"T": len(idx)}))


@pytest.mark.parametrize(("t", "k", "experts"), ROUTINGS)
@pytest.mark.parametrize("dtype", ("i32", "i64"))
def test_routing(t: int, k: int, experts: int, dtype: str) -> None:
    for size in (t, "T"):
        check_routing(route(size, k, experts, dtype), chosen(t, k, experts))


def test_routing_of_more_pairs_than_a_chunk() -> None:
    """Of all tokens the same expert, or another one for each."""
    check_routing(route("T", 2, 3), chosen(700, 2, 3))
    check_routing(route("T", 1, 3), np.full((1100, 1), 1, np.int32))
    check_routing(route("T", 1, 80), np.arange(80, dtype=np.int32)[:, None])


@pytest.mark.parametrize(("t", "k", "experts"), ROUTINGS)
def test_products(t: int, k: int, experts: int) -> None:
    for size in (t, "T"):
        check(MOE_UP, up(size, k, experts, 10, 37), t, k, experts)
        check(MOE_DOWN, down(size, k, experts, 21, 34), t, k, experts)


@pytest.mark.parametrize(("x", "w"), (("f32", "f32"), ("f16", "f16"), ("f32", "bf16")))
def test_dtypes_and_activations(x: str, w: str) -> None:
    for name in ("gelu", "gelu_tanh", "relu"):
        check(MOE_UP, up("T", 2, 5, 9, 20, x, w, gated(name)), 6, 2, 5)
    check(MOE_DOWN, down("T", 2, 5, 9, 20, x, w), 6, 2, 5)


@pytest.mark.parametrize(("w", "bias"), (("bf16", "bf16"), ("f32", "f32"), ("bf16", "f32")))
def test_biases_and_a_clamped_gate(w: str, bias: str) -> None:
    """Columns beyond the last block of columns have no bias, and experts without rows none either."""
    for t, k, experts in ROUTINGS[1:4]:
        check(MOE_UP, up("T", k, experts, 21, 20, w, w, CLAMPED, bias), t, k, experts)
        check(MOE_DOWN, down("T", k, experts, 21, 34, w, w, bias), t, k, experts)


@pytest.mark.parametrize(("w", "bias"), (("bf16", ""), ("f32", "f32")))
def test_experts_without_a_gate(w: str, bias: str) -> None:
    """A stack has the rows of one product only; of all schedules some."""
    for t, k, experts in ROUTINGS[1:4]:
        check(MOE_UP, up("T", k, experts, 21, 20, w, w, SQUARED, bias), t, k, experts)
    g = up("T", 2, 3, 70, 150, w, w, SQUARED, bias)
    for s in some(MOE_UP.schedules(next(iter(g.nodes)), sm_90()), 0.2):
        check(MOE_UP, g, 40, 2, 3, s)


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
def test_every_schedule(dtype: str) -> None:
    """Of all schedules some. More rows of some experts than a block has, and sizes that are no multiple of anything."""
    for kernel, g in (
        (MOE_UP, up("T", 2, 3, 70, 150, dtype, dtype)),
        (MOE_DOWN, down("T", 2, 3, 150, 70, dtype, dtype)),
    ):
        for s in some(kernel.schedules(next(iter(g.nodes)), sm_90()), 0.4):
            check(kernel, g, 40, 2, 3, s)


@pytest.mark.parametrize("choice", ("the same", "one each"))
def test_skewed_choices(choice: str) -> None:
    """All tokens choose the same experts, or each another one."""
    t, k, experts = 50, 1 if choice == "one each" else 2, 50
    idx = np.arange(t)[:, None] if choice == "one each" else np.tile(generator().permutation(experts)[:k], (t, 1))
    check(MOE_UP, up("T", k, experts, 10, 37), t, k, experts, idx=idx)
    check(MOE_DOWN, down("T", k, experts, 21, 34), t, k, experts, idx=idx)


COMBINED = ((1, 5, "", "bf16"), (8, 300, "bf16", ""), (3, 1100, "f32", ""), (2, 64, "f16", "bf16"))


@pytest.mark.parametrize(("choices", "columns", "residual", "dtype"), COMBINED)
@pytest.mark.parametrize("y", ("f32", "bf16"))
def test_sums_of_choices(choices: int, columns: int, residual: str, dtype: str, y: str) -> None:
    types = [tensor(y, "T", choices, columns)] + ([tensor(residual, "T", columns)] if residual else [])
    g = graph("moe_combine", types, {"dtype": dtype})
    (node,) = g.nodes
    drawn = [generator().standard_normal([int(d.subs({"T": 7})) for d in t.shape]).astype(np.float32) for t in types]
    for s in MOE_COMBINE.schedules(node, sm_90()):
        run_case(Case(f"combine {choices} {columns} {s}", g, MOE_COMBINE, s, drawn, sizes={"T": 7}))


SOFTMAX = "div(exp(sub(a0, row_max(a0))), row_sum(exp(sub(a0, row_max(a0)))))"
SELECTED = (
    (128, 8, SOFTMAX, "div(a0, row_sum(a0))", "f32", "bf16"),
    (37, 4, "a0", SOFTMAX, "bf16", ""),
    (60, 6, "sigmoid(a0)", "mul(div(a0, add(row_sum(a0), 1e-20)), 2.5)", "f32", ""),
    (5, 5, "a0", "a0", "f16", "f32"),
    (9, 1, "neg(a0)", "row_mean(a0)", "f32", ""),
    (4096, 3, "tanh(a0)", "sub(a0, row_max(a0))", "f32", ""),
)


@pytest.mark.parametrize(("n", "k", "before", "after", "x", "dtype"), SELECTED)
def test_selection(n: int, k: int, before: str, after: str, x: str, dtype: str) -> None:
    g = graph("topk_map", [tensor(x, "T", n)], {"k": k, "before": before, "after": after, "dtype": dtype})
    (node,) = g.nodes
    drawn = generator().permuted(np.tile(np.linspace(-3, 3, n), (7, 1)), axis=1).astype(np.float32)
    for s in TOPK_MAP.schedules(node, sm_90()):
        run_case(Case(f"topk_map {n} {k} {s}", g, TOPK_MAP, s, [drawn], sizes={"T": 7}))


@pytest.mark.parametrize(("n", "k", "before", "after", "x", "dtype"), SELECTED[:4])
def test_selection_and_routing_of_one_token(n: int, k: int, before: str, after: str, x: str, dtype: str) -> None:
    g = graph("topk_route", [tensor(x, 1, n)], {"k": k, "before": before, "after": after, "dtype": dtype})
    (node,) = g.nodes
    drawn = generator().permutation(np.linspace(-3, 3, n)).astype(np.float32)[None]
    for s in TOPK_ROUTE.schedules(node, sm_90()):
        run_case(Case(f"topk_route {n} {k} {s}", g, TOPK_ROUTE, s, [drawn]))


def test_selection_among_equals_and_odd_values() -> None:
    """The lower index comes first among equals; infinities are numbers, and NaN is below all of them."""
    x = np.array([[1, 2, 2, 2, -1, 2], [np.inf, -np.inf, np.nan, 0, 5, -0.0]], np.float32)
    g = graph("topk_map", [tensor("f32", 2, 6)], {"k": 5})
    run_case(Case("equals", g, TOPK_MAP, {"warps": 1}, [x]))


@pytest.mark.parametrize("settled", [False, True])
def test_settled_starts_are_read_before_the_wait(settled: bool) -> None:
    """The second product reads rows that the previous launch writes, but not where the rows of an expert begin."""
    target = next(t for t in TARGETS if t.has("pdl"))
    (node,) = down("T", 8, 128, 768, 2048).nodes
    schedule = {**first(MOE_DOWN, node, target, 128), **({READ_BEFORE_WAIT: 1} if settled else {})}
    order = memory_order(MOE_DOWN.emit(node, schedule, target), target)
    at = order.index("wait")
    assert set(order[:at]) == ({"load x2"} if settled else set())
    assert {"load x0", "load x1", "load x3", "store y0"} <= set(order[at:]) and order.count("wait") == 1


def test_likely_weights_are_prefetched_before_the_wait() -> None:
    """By the first product, whose weights no launch writes; the second one's launch would take the bandwidth of it."""
    target = next(t for t in TARGETS if t.has("pdl"))
    for kernel, g, before in (
        (MOE_UP, up("T", 8, 128, 768, 2048), True),
        (MOE_DOWN, down("T", 8, 128, 768, 2048), False),
    ):
        (node,) = g.nodes
        text = ttir(kernel.emit(node, first(kernel, node, target, 128), target), target)
        assert ("prefetch.global.L2" in text[: text.index("griddepcontrol.wait")]) == before
        assert "prefetch.global.L2" not in text[text.index("griddepcontrol.wait") :]


def first(kernel: Kernel, node: Node, target: Target, tokens: int) -> dict[str, int]:
    return min(kernel.schedules(node, target), key=lambda s: kernel.cost_us(node, s, target, {"T": tokens}))


def test_first_schedules() -> None:
    """Qwen3-30B-A3B: blocks of few rows for few tokens, of many for prompts."""
    (node,) = up("T", 8, 128, 768, 2048).nodes
    assert [first(MOE_UP, node, sm_90(), t)["bm"] for t in (1, 16, 128, 2048)] == [16, 16, 16, 128]


@pytest.mark.parametrize("target", ONE_TARGET, ids=lambda t: t.name)
def test_binaries(target: Target, tmp_path: Path) -> None:
    graphs = (
        (MOE_ROUTE, route("T", 8, 128)), (MOE_ROUTE, route(1, 8, 128, "i64")), (MOE_UP, up("T", 8, 128, 768, 2048)),
        (MOE_UP, up(1, 8, 128, 768, 2048, body=gated("gelu_tanh"))), (MOE_DOWN, down("T", 8, 128, 768, 2048)),
        (MOE_DOWN, down("T", 8, 128, 768, 2048, "f32", "bf16")),
        (MOE_UP, up("T", 4, 32, 2880, 2880, body=CLAMPED, bias="bf16")),
        (MOE_DOWN, down("T", 4, 32, 2880, 2880, bias="bf16")),
        (MOE_UP, up("T", 6, 128, 1856, 2688, body=SQUARED)),
    )  # fmt: skip
    sources = []
    for kernel, g in graphs:
        (node,) = g.nodes
        sources += [kernel.emit(node, first(kernel, node, target, t), target) for t in (1, 2048)]
    made = TritonToolchain.find(target).compile([(s, "") for s in sources], tmp_path, jobs=1)
    assert all(c.shared <= target.limits.shared for c in made.values())


def test_rejected_nodes() -> None:
    (node,) = up(1, 1, 5000, 1, 8).nodes
    assert "5000 experts" in str(MOE_UP.reject(node, sm_90()))
