"""Facts about neighbouring launches that emitters use: operands that are complete, a next launch that fills the GPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from llmc.codegen.backends.triton.moe import MOE_DOWN, MOE_ROUTE, MOE_UP
from llmc.codegen.backends.triton.topk_map import TOPK_MAP
from llmc.codegen.kernel import READ_BEFORE_WAIT, TRIGGER_AFTER_LOADS, TRIGGER_BEFORE_WAIT, Kernel, Schedule, Source
from llmc.codegen.launch_plan import early_triggers, emit_graph, may_read_early, may_run
from llmc.codegen.memory import Storage
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU
from llmc.ir.types import state, tensor
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target


@dataclass(frozen=True)
class Said(Kernel):
    """A kernel whose source consists of the arguments of emit."""

    waits_first = True

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        return (1,) if node.op.name == "add" else ()

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        return Source("f", "triton", f"{self.name} {sorted(schedule)}", (), grid=(D("T"),))


BOUNDS = {"T": (1, 8), "R": (0, 8)}


def source(size: Dim) -> Source:
    """A kernel with as many programs as `size`."""
    return Source("f", "triton", "", (), grid=(size,))


def chain() -> tuple[Graph, Storage]:
    """a = exp(x); b = exp(a) and its reshape; y = b + a."""
    g = Graph("main")
    b = Builder(g, OPS)
    a = b.exp(g.input("x", tensor("f32", "T", 8)))
    seen = b.reshape(b.reshape(b.exp(a), shape=("T", 2, 4)), shape=("T", 8))
    g.outputs = [b.add(seen, a)]
    return g, Storage(g)


@pytest.mark.parametrize(
    ("early", "size", "first", "expected"),
    [
        ((1,), "T", True, True),  # written by the launch before the one in front, which is complete
        ((0,), "T", True, False),  # a view of what the one in front writes
        ((0, 1), "T", True, False),
        ((), "T", True, False),
        ((1,), "R", True, False),  # the one in front may be left out, and the one that writes `a` is in front then
        ((1,), "T", False, False),  # the one in front may allow the next launch before it waits for the first
    ],
)
def test_settled(early: tuple[int, ...], size: str, first: bool, expected: bool) -> None:
    g, storage = chain()
    *before, last = [n for n in g.nodes if n.op.name != "reshape"]
    count = may_run([True, first], [source(D("T")), source(D(size))], BOUNDS)
    assert (count is not None and may_read_early(early, last, before[-count:], storage)) == expected


def test_a_state_that_the_launch_in_front_writes_is_not_settled() -> None:
    g = Graph("main")
    b = Builder(g, OPS)
    pool = g.input("kv", state("f32", "P", 2, 1, 16, 8))
    k, v, slots = (g.input(n, t) for n, t in zip("kvs", (tensor("f32", "T", 1, 8),) * 2 + (tensor("i32", "T"),)))
    first = b.kv_append(pool, k, v, slots)
    second = b.kv_append(first, v, k, slots)
    g.outputs = [second]
    before, last = g.nodes
    assert not may_read_early((0,), last, [before], Storage(g))
    assert may_read_early((1, 2, 3), last, [before], Storage(g))


@pytest.mark.parametrize("first", list(itertools.product((False, True), repeat=4)))
def test_every_launch_that_may_still_run_counts(first: tuple[bool, ...]) -> None:
    """A launch may read the result of an earlier one before it waits if one between them waits first."""
    g = Graph("main")
    b = Builder(g, OPS)
    values = [g.input("x", tensor("f32", "T", 8))]
    for _ in first:
        values.append(b.exp(values[-1]))
    *before, last = [*g.nodes, b.add(values[-1], values[-1]).node]
    count = may_run(first, [source(D("T"))] * len(first), BOUNDS)
    for i in range(len(first)):
        last.operands = (values[-1], values[1 + i])
        early = count is not None and may_read_early((1,), last, before[-count:], Storage(g))
        assert early == any(first[i + 1 :]), i


@pytest.mark.parametrize(("late", "fills"), [(True, True), (True, False), (False, True)])
def test_a_kernel_triggers_late_if_the_next_one_fills_multiprocessors(late: bool, fills: bool) -> None:
    g, _ = chain()
    kernels = {"a": Said("a", can_trigger_after_loads=late), "b": Said("b", fills_multiprocessors=fills)}
    for n in g.nodes:
        n.choice = {"kernel": "b" if n.op.name == "add" else "a"}
    made = emit_graph(g, BOUNDS, kernels, sm_90(), {})
    key = [TRIGGER_AFTER_LOADS] * (late and fills)
    assert [s.text for s in made.sources] == ["a []", f"a {key}", f"b {[READ_BEFORE_WAIT]}"]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("preloads", [False, True])
@pytest.mark.parametrize("crowds", [False, True])
def test_a_launch_before_one_that_preloads_is_eager(eager: bool, preloads: bool, crowds: bool) -> None:
    """The launch before an eager one triggers its successor, which then reads no results of the first one early."""
    g, _ = chain()
    kernels = {
        "a": Said("a", can_trigger_after_loads=True), "b": Said("b", can_trigger_before_wait=eager),
        "c": Said("c", preloads=preloads, fills_multiprocessors=crowds),
    }  # fmt: skip
    for n, name in zip([n for n in g.nodes if n.op.name != "reshape"], "abc", strict=True):
        n.choice = {"kernel": name}
    made = emit_graph(g, BOUNDS, kernels, sm_90(), {})
    both = eager and preloads
    expected = [
        f"a {[TRIGGER_AFTER_LOADS] * (both and crowds)}",
        f"b {[TRIGGER_BEFORE_WAIT] * both}",
        f"c {[READ_BEFORE_WAIT] * (not both)}",
    ]
    assert [s.text for s in made.sources] == expected


def test_short_launches_before_one_that_preloads_are_a_chain() -> None:
    """Every launch of random programs is early if only early ones lie between it and one that preloads."""
    for _ in range(200):
        early, preloads = ([random.random() < 0.6 for _ in range(8)] for _ in range(2))
        chosen = [Said("k", can_trigger_before_wait=e, preloads=p) for e, p in zip(early, preloads, strict=True)]
        for i, found in enumerate(early_triggers(chosen)):
            behind = next((j for j in range(i + 1, 8) if preloads[j] or not early[j]), None)
            assert found == (early[i] and behind is not None and preloads[behind]), (early, preloads)


def test_only_the_second_product_of_a_mixture_reads_where_experts_begin_before_its_wait() -> None:
    """The first one begins while `moe_route` writes the starts; when the second one begins, these are complete."""
    g = Graph("main")
    b = Builder(g, OPS)
    logits, x = g.input("logits", tensor("f32", "T", 128)), g.input("x", tensor("bf16", "T", 2048))
    up, down = (
        g.input(n, tensor("bf16", *t), weight=True) for n, t in (("up", (128, 1536, 2048)), ("down", (128, 2048, 768)))
    )
    weights, idx = b.topk_map(logits, k=8, before="a0", after="a0", dtype="bf16")
    order, starts = b.moe_route(idx, experts=128)
    h = b.moe_up(x, order, starts, up, k=8, body=SWIGLU)
    g.outputs = [b.moe_down(h, order, starts, down, weights)]
    kernels = {kernel.name: kernel for kernel in (TOPK_MAP, MOE_ROUTE, MOE_UP, MOE_DOWN)}
    for n, (name, kernel) in zip(g.nodes, kernels.items(), strict=True):
        n.choice = {"kernel": name, **kernel.schedules(n, sm_90())[0]}
    choose, route, first, second = (s.text for s in emit_graph(g, BOUNDS, kernels, sm_90(), {}).sources)
    assert choose.index("gdc_launch_dependents()") < choose.index("gdc_wait()") and "EAGER_LAUNCH=True" in route
    assert "EARLY_ROWS=False" in first and "EARLY_ROWS=True" in second
