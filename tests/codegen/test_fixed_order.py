"""All entry points compute their common nodes with one order of sums."""

from __future__ import annotations

import pytest

from llmc.codegen.fixed_order import Orders, agreed_orders, key_of
from llmc.codegen.kernel import EXACT
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.dim import D
from llmc.ir.graph import Graph, Node
from llmc.ir.ops import OPS
from llmc.ir.types import Type, tensor
from llmc.passes.fuse.fuse_experts import FuseExperts
from llmc.passes.pipeline import parse_pipeline
from llmc.targets.cpu_targets import portable
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import Target, deterministic

Member = tuple[Graph, Node, Orders]


def member(graph: str, orders: Orders, weight: str = "w") -> Member:
    """A product in a graph; its kernels add in these orders, at these relative times."""
    g = Graph(graph)
    operands = [g.input("x", tensor("bf16", 4, 16)), g.input(weight, tensor("bf16", 8, 16), weight=True)]
    return g, g.add(OPS["linear"], operands, {}, loc="mlp"), orders


def agreed(*members: Member) -> list[str]:
    found = agreed_orders(members)
    return [found[key_of(g, n)] for g, n, _ in members]


def test_the_fastest_common_order() -> None:
    step, decode = member("step_128", {"a": 1.0, "b": 1.5, "c": 3.0}), member("decode", {"c": 1.0, "b": 1.2})
    assert agreed(step, decode) == ["b", "b"]
    other = member("step_128", {"a": 1.0}, "v"), member("decode", {"a": 1.0}, "v")
    assert agreed(step, decode, *other) == ["b", "b", "a", "a"]


def test_rows_of_different_sizes_are_different_computations() -> None:
    """Such as the roundings of activations before two products of one layer."""

    def rounding(graph: str, columns: int, order: str) -> Member:
        g = Graph(graph)
        x = g.input("x", tensor("bf16", D("T"), columns))
        return (
            g,
            g.add(OPS["round_groups"], [x], {"body": "a0", "dtype": "f8e4m3", "group": 64}, loc="layer"),
            {order: 1.0},
        )

    narrow, wide = ([rounding(g, *of) for g in ("step", "decode")] for of in ((128, "a"), (384, "b")))
    assert agreed(*narrow, *wide) == ["a", "a", "b", "b"]


def test_no_common_order() -> None:
    with pytest.raises(Diagnostic, match="@step add in the orders a, those of @decode in b") as e:
        agreed(member("step", {"a": 1.0}), member("decode", {"b": 1.0}))
    assert e.value.code == "E442"


def test_a_value_that_another_entry_point_lacks() -> None:
    with pytest.raises(Diagnostic, match="that @decode computes by other ops") as e:
        agreed(member("step", {"a": 1.0}), member("decode", {"a": 1.0}, "v"))
    assert e.value.code == "E443"
    both = member("step", {"a": 1.0}), member("decode", {"a": 1.0})
    assert agreed(*both, member("step", {EXACT: 1.0}, "v")) == ["a", "a", EXACT]


def test_drafts_need_no_order() -> None:
    assert agreed(member("draft_fill", {"a": 1.0}), member("draft_next", {"b": 1.0})) == ["a", "b"]


STATES = (("kv", "bf16", (9, 2, 1, 16, 8)), ("pages", "i32", (4, 8)))


def test_parts_of_attention_are_the_same_computation() -> None:
    """Whatever weights an op has: a sink is an operand of the whole attention, not of its parts."""
    g = Graph("decode_1")
    state = [g.input(n, Type(t, tuple(map(D, dims)), True)) for n, t, dims in STATES]
    q, rows, starts = (
        g.input("q", tensor("bf16", 1, 2, 8)),
        *(g.input(x, tensor("i32", n)) for x, n in (("r", 1), ("s", 2))),
    )
    sinks = g.input("sinks", tensor("bf16", 2), weight=True)
    whole = g.add(OPS["paged_attention"], [q, *state, rows, starts, rows, sinks], {"scale": 1.0}, loc="attn")
    attrs = {"scale": 1.0, "splits": 2, "part": 64}
    parts = g.add(OPS["paged_attention_parts"], [q, *state, rows, rows], attrs, loc="attn")
    assert key_of(Graph("step"), whole) == key_of(g, parts) == ("paged_attention", "attn", ())


def test_experts_of_a_single_token_are_chosen_and_sorted_by_the_ops_of_all_graphs() -> None:
    passes = parse_pipeline(deterministic(sm_90(), 0).pipeline, load().passes)
    assert FuseExperts(route=False) in passes and "gather-experts" not in [p.name for p in passes]


@pytest.mark.parametrize("target", [sm_90(), portable()], ids=lambda target: str(target.name))
def test_no_pass_computes_a_value_by_other_ops_in_some_graphs(target: Target) -> None:
    names = {p.name for p in parse_pipeline(deterministic(target, 0).pipeline, load().passes)}
    assert not names & {"narrow-tokens", "fuse-norm-linear", "split-single", "gather-experts"}
