"""Which operands a launch may read before it waits for the one in front: those that this one does not write."""

from __future__ import annotations

import pytest

from llmc.codegen.kernel import Source
from llmc.codegen.memory import Storage
from llmc.codegen.plan import settled
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph
from llmc.ir.ops import OPS
from llmc.ir.types import state, tensor

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
    assert settled(early, last, before, source, storage, BOUNDS) == expected


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
    assert not settled((0,), last, before, source, Storage(g), BOUNDS)
    assert settled((1, 2, 3), last, before, source, Storage(g), BOUNDS)
