"""Tuning files: the recorded fields, the lookup of a node's records, and the choices as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import cost_rule
from llmc.codegen.candidates import candidates
from llmc.codegen.kernel_table import CUDA, TRITON
from llmc.codegen.tuning_records import Tuning, machine, node_text, read, record, save, sizes_of
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.graph import Node
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.measure.tune import choices, render, show
from llmc.targets.gpu_targets import sm_80, sm_90

TEXT = """sym R in [1, 256]
sym T in [1, 512]
graph @main(%x: bf16[R, 64], %w: weight bf16[96, 64], %l: state i32[16], %t: i32[T]) {
  %y = linear(%x, %w) : bf16[R, 96]  // model.layers.3
  %s, %r, %p = row_spans(%t, %t, %l) {tokens=R} : i32[T+1], i32[R], i32[R]
  return %y, %s, %r, %p
}
"""
A, B = {"warps": 4}, {"warps": 8}


def nodes() -> list[Node]:
    return list(parse(TEXT, OPS).graphs["main"].nodes)


def test_a_node_is_known_by_its_text_and_the_sizes_that_it_uses() -> None:
    linear, spans = nodes()
    assert node_text(linear) == "linear(bf16[R, 64], bf16[96, 64]) -> bf16[R, 96]"
    assert "state i32)" in node_text(spans), "tables of rows are as long as a compile's limits say"
    env = {"T": 256, "R": 8, "P": 99}
    assert sizes_of(linear, env) == (("R", 8),)
    assert sizes_of(spans, env) == (("T", 256), ("R", 8))


def test_exact_sizes_hold_and_then_close_ones(tmp_path: Path) -> None:
    linear, _ = nodes()
    path = tmp_path / "t.jsonl"
    for rows, a, b in ((1, 3.0, 4.0), (64, 9.0, 6.0)):
        env = {"R": rows}
        save(path, [record(linear, "k", s, sm_90(), us, env) for s, us in ((A, a), (B, b))])
    tuning = Tuning.load(path)

    def found(rows: int) -> list[float | None]:
        return tuning.lookup(linear, "k", (A, B), sm_90(), {"R": rows, "T": 1})

    assert found(1) == [3.0, 4.0]
    assert found(64) == found(48) == found(90) == [9.0, 6.0]
    assert found(2) == found(32) == found(128) == [None, None], "what is best at other sizes is no measure"
    assert tuning.lookup(linear, "other", [A], sm_90(), {"R": 1}) == [None]
    assert tuning.lookup(linear, "k", [A], sm_80(), {"R": 1}) == [None], "of another machine"
    assert Tuning().lookup(linear, "k", [A], sm_90()) == [None]


def test_tokens_and_rows_are_equivalent_for_a_node_that_has_one_of_them(tmp_path: Path) -> None:
    of_rows, spans = nodes()
    path = tmp_path / "t.jsonl"
    of_tokens = next(iter(parse(TEXT.replace("%x: bf16[R", "%x: bf16[T").replace("bf16[R, 96]", "bf16[T, 96]"), OPS)
                          .graphs["main"].nodes))  # fmt: skip
    save(
        path,
        [record(of_tokens, "k", A, sm_90(), 5.0, {"T": 512}), record(spans, "k", A, sm_90(), 7.0, {"T": 8, "R": 4})],
    )
    tuning = Tuning.load(path)
    assert tuning.lookup(of_rows, "k", [A], sm_90(), {"R": 512, "T": 1}) == [5.0]
    assert tuning.lookup(of_rows, "k", [A], sm_90(), {"R": 1, "T": 512}) == [None]
    assert tuning.lookup(spans, "k", [A], sm_90(), {"T": 4, "R": 8}) == [None], "two sizes keep their names"
    save(path, [record(of_rows, "k", A, sm_90(), 4.0, {"R": 512})])
    assert Tuning.load(path).lookup(of_rows, "k", [A], sm_90(), {"R": 512}) == [4.0], "its own record comes first"


def test_a_file_is_sorted_and_a_second_measurement_replaces_the_first(tmp_path: Path) -> None:
    linear, _ = nodes()
    path = tmp_path / "t.jsonl"
    save(path, [record(linear, "k", s, sm_90(), 3.14159, {"R": n}) for n in (64, 1) for s in (B, A)])
    save(path, [record(linear, "k", A, sm_90(), 2.0, {"R": 1})])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    result = [(r["sizes"]["R"], r["schedule"]["warps"], r["us"]) for r in rows]
    assert result == [(1, 4, 2.0), (1, 8, 3.142), (64, 4, 3.142), (64, 8, 3.142)]
    assert {r["target"] for r in rows} == {machine(sm_90())} == {"cuda+sm_90+pdl"}


@pytest.mark.parametrize("change", [{"sizes": {"Q": 1}}, {"us": "fast"}, {"us": float("nan")}, {"schedule": 4}])
def test_a_line_that_is_no_record_is_named(change: dict[str, object], tmp_path: Path) -> None:
    linear, _ = nodes()
    path = tmp_path / "t.jsonl"
    good = record(linear, "k", A, sm_90(), 3.0, {"R": 1}).line()
    path.write_text(f"{good}\n{json.dumps(json.loads(good) | change)}\n")
    with pytest.raises(Diagnostic, match=r"E432.*line 2") as error:
        Tuning.load(path)
    assert error.value.remedy


def test_the_choices_are_a_table_and_data(tmp_path: Path) -> None:
    linear, _ = nodes()
    path = tmp_path / "t.jsonl"
    save(path, [record(linear, "k", s, sm_90(), us, {"R": 8}) for s, us in ((A, 5.0), (B, 4.0))])
    (best,) = show(path)
    assert (best["kernel"], json.loads(best["schedule"]), best["us"], best["next_us"]) == ("k", B, 4.0, 5.0)
    assert render([best]).splitlines()[1].split()[:4] == ["R=8", "4", "5", "2"]
    assert choices([]) == []


def test_shipped_records_are_readable_and_only_for_their_target() -> None:
    for target in (sm_80(), sm_90()):
        tuning = Tuning.shipped(target)
        assert {m for m, _ in tuning.records} <= {machine(target)}
        assert bool(tuning.records) == bool(tuning.name)


def test_no_line_that_ships_is_of_an_op_or_a_kernel_as_it_was() -> None:
    """A node is found by its text: an attribute more, and its measurements would be silently lost."""
    found = read(cost_rule.SHIPPED)
    assert {r.kernel for r in found} <= {*CUDA, *TRITON}
    for node in {r.node for r in found}:
        attributes = re.search(r"\) \{(.*)\} -> ", node)
        written = re.findall(r"(\w+)=", re.sub(r'"[^"]*"', '""', attributes[1])) if attributes else []
        assert sorted(written) == sorted(OPS[node.partition("(")[0]].attrs), node


def test_the_source_of_choices_is_reported() -> None:
    linear, _ = nodes()
    one = record(linear, "k", A, sm_90(), 3.0, {"R": 1})
    tuning = Tuning({(one.target, one.node): {one.sizes: {(one.kernel, one.schedule): one.us}}}, "h200")
    assert tuning.summary(4, 9, sm_90()).endswith(
        "of 9 nodes are chosen by measurements of h200, the others by the cost rule"
    )
    assert "cost rule: there are no measurements for cuda+sm_80" in Tuning().summary(0, 9, sm_80())
    assert "of h200 contain none of this model's nodes" in tuning.summary(0, 9, sm_80())


def test_the_cost_rule_chooses_products_nearly_as_well_as_measurements() -> None:
    """Measured on an H200. A bad ranking would slow down every model without measurements."""
    ratios = [ratio for ratio, _ in cost_rule.rows(cost_rule.measured(read(cost_rule.SHIPPED)))]
    assert len(ratios) > 50 and sum(ratios) / len(ratios) < 1.12 and max(ratios) < 2.0


def test_slow_measurements_do_not_precede_the_estimates_of_deterministic_kernels() -> None:
    """Of the kernels with a fixed order, only large tiles have been measured for one token."""
    module = parse(
        "graph @decode_1(%x: bf16[1, 14336], %w: weight bf16[4096, 14336], %r: bf16[1, 4096]) {\n"
        '  %y = linear_map(%x, %w, %r) {parts=1, body="add(a1, a0)"} : bf16[1, 4096]\n  return %y\n}\n',
        OPS,
    )
    (node,) = module.graphs["decode_1"].nodes
    kernels, tuning = load().kernels, Tuning.shipped(sm_90())
    ordinary = candidates(node, kernels, sm_90(), {}, tuning)[0]
    assert ordinary.measured and tuning.fastest(node, sm_90()) == ordinary.us
    fixed = candidates(node, kernels, replace(sm_90(), deterministic=True), {}, tuning)
    assert fixed[0].kernel.name == "triton/gemm_small" and fixed[0].us < 2 * ordinary.us
    assert any(o.measured for o in fixed[1:]) and Tuning().fastest(node, sm_90()) == float("inf")
