"""The memory plan: no two live values share bytes, in random graphs; aliases; the plan as text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.codegen.memory import ALIGN, Arena, Memory, Slot, Storage, read_slots, report
from llmc.codegen.select import Select
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.graph import Builder, Graph, Module, Value
from llmc.ir.ops import OPS
from llmc.ir.text import parse, show
from llmc.ir.types import tensor
from llmc.passes.base import Ctx


def overlaps(slots: list[Slot]) -> list[tuple[Slot, Slot]]:
    """Return pairs of slots that are live at the same time and share bytes.

    A result that reuses an operand's memory starts at the node where the operand ends, at the same offset; that is not
    an overlap.
    """
    out = []
    for i, a in enumerate(slots):
        for b in slots[i + 1 :]:
            in_time = a.first <= b.last and b.first <= a.last
            in_space = a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
            handed_on = a.last == b.first and a.offset == b.offset and a.nbytes == b.nbytes and a.first < b.first
            if in_time and in_space and not handed_on:
                out.append((a, b))
    return out


def random_module(seed: int) -> Module:
    """A graph of pointwise ops, reshapes, transposes and norms over values of a few sizes."""
    rng = random.Random(seed)
    m = Module(symbols={"T": (1, rng.choice([1, 8, 100]))})
    g = m.graphs["main"] = Graph("main")
    b = Builder(g, OPS)
    values = [g.input(f"x{i}", tensor("f32", "T", rng.choice([8, 24]))) for i in range(2)]
    for _ in range(rng.randint(1, 40)):
        v = rng.choice(values[-6:] if rng.random() < 0.8 else values)
        flat = v.type.rank == 2
        kind = rng.choice(["exp", "add", "reshape", "transpose", "softmax", "slice"])
        if kind == "add":
            twin = rng.choice([w for w in values if w.type == v.type])
            values.append(b.add(v, twin))
        elif kind == "reshape":
            width = v.type.shape[1] * (v.type.shape[2] if not flat else 1)
            shape = ("T", 4, (width.const or 0) // 4) if flat else ("T", width)
            values.append(b.reshape(v, shape=shape))
        elif kind == "transpose":
            values.append(b.transpose(b.transpose(v, perm=[1, 0]), perm=[1, 0]) if flat else b.exp(v))
        elif kind == "slice":
            values.append(b.slice(v, axis=1, start=0, stop=v.type.shape[1]))
        else:
            values.append(b.softmax(v, axis=-1) if kind == "softmax" else b.exp(v))
    made = [v for v in values if v.node is not None]
    g.outputs = rng.sample(made, k=min(len(made), rng.randint(1, 3)))
    return m


def reads_what_was_written(g: Graph, slots: list[Slot]) -> None:
    """Simulate the plan: every reader of a value finds the bytes that the value's node wrote."""
    storage, place = Storage(g), iter(slots)
    where: dict[Value, Slot] = {}
    writer: dict[int, Value] = {}  # unit of ALIGN bytes -> the value that wrote it last
    for n in g.nodes:
        for v in n.operands:
            if (root := storage.root[v]) in where:
                s = where[root]
                assert all(writer[u] is root for u in range(s.offset // ALIGN, (s.offset + s.nbytes) // ALIGN))
        for r in n.results:
            if storage.root[r] is r and storage.kind[r] == "arena":
                s = where[r] = next(place)
                writer.update(dict.fromkeys(range(s.offset // ALIGN, (s.offset + s.nbytes) // ALIGN), r))


def planned_module(seed: int) -> Module:
    """A random module after the pass `memory`."""
    m, ctx = random_module(seed), Ctx(OPS, load().target("cpu:portable"), load().kernels)
    Select().run(m, ctx)
    Memory().run(m, ctx)
    return m


@pytest.mark.drawn(seconds=12)
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_live_values_never_share_bytes(seed: int) -> None:
    m = planned_module(seed)
    g = m.graphs["main"]
    slots = read_slots(g, m.symbols)
    assert not overlaps(slots)
    assert all(s.offset % ALIGN == 0 and s.nbytes % ALIGN == 0 for s in slots)
    reads_what_was_written(g, slots)
    assert sum(s.nbytes for s in slots) >= report(m)["main"]["arena_bytes"]
    again = parse(show(m), OPS)
    assert read_slots(again.graphs["main"], again.symbols) == slots


def test_the_check_sees_an_overlap() -> None:
    m = planned_module(7)
    slots = read_slots(m.graphs["main"], m.symbols)
    live = next((a, b) for a in slots for b in slots if a is not b and a.first < b.first <= a.last)
    moved = [s if s is not live[1] else replace(s, offset=live[0].offset, nbytes=999) for s in slots]
    assert overlaps(moved)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=60))
def test_the_arena_gives_each_byte_once_and_takes_all_back(steps: list[tuple[int, int]]) -> None:
    arena, held = Arena(), list[tuple[int, int]]()
    for size, drop in steps:
        nbytes = size * ALIGN
        at = arena.allocate(nbytes)
        assert at + nbytes <= arena.top
        assert all(at + nbytes <= o or o + n <= at for o, n in held)
        held.append((at, nbytes))
        if drop < len(held):
            arena.release(*held.pop(drop))
    for h in held:
        arena.release(*h)
    assert arena.free == [(0, arena.top)]


PLAN = """
sym T in [1, 10]
graph @main(%x: f32[T, 64], %s: state f32[4, 2, 1, 2, 64], %i: i32[T]) {
  %a = exp(%x) : f32[T, 64]
  %b = reshape(%a) {shape=[T, 1, 64]} : f32[T, 1, 64]
  %s1 = kv_append(%s, %b, %b, %i) : state f32[4, 2, 1, 2, 64]
  %c = neg(%a) : f32[T, 64]
  %d = transpose(%c) {perm=[1, 0]} : f32[64, T]
  return %d, %s1
}
"""


def test_aliases_and_places_are_attributes() -> None:
    m = parse(PLAN, OPS)
    ctx = Ctx(OPS, load().target("cpu:portable"), load().kernels)
    Select().run(m, ctx)
    assert Memory().run(m, ctx) == 2
    assert Memory().run(m, ctx) == 0, "a second run changes nothing"
    nodes = {n.op.name: n for n in m.graphs["main"].nodes}
    assert nodes["exp"].choice["arena"] == (0,)
    assert nodes["neg"].choice["arena"] == (0,), "neg takes over the memory of exp, which nobody reads again"
    assert "arena" not in nodes["reshape"].choice and "arena" not in nodes["kv_append"].choice
    assert report(m)["main"]["arena_bytes"] == 10 * 64 * 4
    storage = Storage(m.graphs["main"])
    x, s, _ = m.graphs["main"].inputs
    assert storage.root[nodes["reshape"].result] is nodes["exp"].result
    assert storage.root[nodes["kv_append"].result] is s
    assert storage.kind[storage.root[nodes["transpose"].result]] == "output" and storage.kind[x] == "input"


def test_reshapes_that_are_outputs_of_inputs_are_copied() -> None:
    text = "graph @main(%x: f32[6]) {\n  %y = reshape(%x) {shape=[2, 3]} : f32[2, 3]\n  return %y\n}"
    g = parse(text, OPS).graphs["main"]
    storage = Storage(g)
    assert storage.copies == set(g.nodes)
    with pytest.raises(Diagnostic, match="E440"):
        Storage(parse("graph @main(%x: f32[6]) {\n  return %x\n}", OPS).graphs["main"])
