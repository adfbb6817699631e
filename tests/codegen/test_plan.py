"""What emitters know of the launches around a node: operands already written, a next launch that needs the units."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from llmc.codegen.kernel import EAGER, LATE, SETTLED, Kernel, Schedule, Source
from llmc.codegen.launch_plan import emit_graph, may_read_early
from llmc.codegen.memory import Storage
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.types import state, tensor
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target


@dataclass(frozen=True)
class Said(Kernel):
    """A kernel whose source consists of the arguments of emit."""

    def early(self, node: Node) -> tuple[int, ...]:
        return (1,) if node.op.name == "add" else ()

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        return Source("f", "triton", f"{self.name} {sorted(schedule)}", (), grid=(D("T"),))


BOUNDS = {"T": (1, 8), "R": (0, 8)}


def chain() -> tuple[Graph, Storage]:
    """a = exp(x); b = exp(a) and its reshape; y = b + a."""
    g = Graph("main")
    b = Builder(g, OPS)
    a = b.exp(g.input("x", tensor("f32", "T", 8)))
    seen = b.reshape(b.reshape(b.exp(a), shape=("T", 2, 4)), shape=("T", 8))
    g.outputs = [b.add(seen, a)]
    return g, Storage(g)


@pytest.mark.parametrize(
    ("early", "grid", "expected"),
    [
        ((1,), D("T"), True),  # written by the launch before the one in front
        ((0,), D("T"), False),  # a view of what the one in front writes
        ((0, 1), D("T"), False),
        ((), D("T"), False),
        ((1,), D("R"), False),  # the one in front may be left out, and the one that writes `a` is in front then
    ],
)
def test_settled(early: tuple[int, ...], grid: Dim, expected: bool) -> None:
    g, storage = chain()
    _, before, *_, last = g.nodes
    assert (before.op.name, last.op.name) == ("exp", "add")
    source = Source("f", "triton", "", (), grid=(grid,))
    assert may_read_early(early, last, before, source, storage, BOUNDS) == expected


def test_a_state_that_the_launch_in_front_writes_is_not_settled() -> None:
    g = Graph("main")
    b = Builder(g, OPS)
    pool = g.input("kv", state("f32", "P", 2, 1, 16, 8))
    k, v, slots = (g.input(n, t) for n, t in zip("kvs", (tensor("f32", "T", 1, 8),) * 2 + (tensor("i32", "T"),)))
    first = b.kv_append(pool, k, v, slots)
    second = b.kv_append(first, v, k, slots)
    g.outputs = [second]
    before, last = g.nodes
    source = Source("f", "triton", "", (), grid=(D("T"),))
    assert not may_read_early((0,), last, before, source, Storage(g), BOUNDS)
    assert may_read_early((1, 2, 3), last, before, source, Storage(g), BOUNDS)


@pytest.mark.parametrize(("yields", "crowds"), [(True, True), (True, False), (False, True)])
def test_the_schedule_of_a_kernel_that_yields_shows_a_next_launch_that_crowds(yields: bool, crowds: bool) -> None:
    g, _ = chain()
    kernels = {"a": Said("a", yields=yields), "b": Said("b", crowds=crowds)}
    for n in g.nodes:
        n.choice = {"kernel": "b" if n.op.name == "add" else "a"}
    made = emit_graph(g, BOUNDS, kernels, sm_90(), {})
    late = [LATE] * (yields and crowds)
    assert [s.text for s in made.sources] == ["a []", f"a {late}", f"b {[SETTLED]}"]


@pytest.mark.parametrize(("crowds", "second"), [(False, "exp"), (True, "exp"), (False, "add")])
def test_a_kernel_that_hurries_lets_only_readers_of_weights_begin_at_once(crowds: bool, second: str) -> None:
    """Not one that needs whole multiprocessors, nor one that reads before its wait what an earlier launch writes."""
    g = Graph("main")
    b = Builder(g, OPS)
    x = g.input("x", tensor("f32", "T", 8))
    a = b.exp(x)
    g.outputs = [b.exp(a) if second == "exp" else b.add(a, x)]
    kernels = {"a": Said("a", hurries=True), "b": Said("b", crowds=crowds)}
    for n, kernel in zip(g.nodes, "ab", strict=True):
        n.choice = {"kernel": kernel}
    made = emit_graph(g, BOUNDS, kernels, sm_90(), {})
    assert made.sources[0].text == f"a {[EAGER] if not crowds and second == 'exp' else []}"
