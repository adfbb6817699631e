"""`llmc diff`: equal artifacts have no differences, each kind of difference is reported, value names do not count."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from artifact import tiny
from draw import generator
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import Limits
from report.conftest import Made

from llmc.artifact.write import PackedWeights, write_artifact
from llmc.cli import main
from llmc.codegen.build import Binary
from llmc.report.diff import diff, render
from llmc.report.graph_diff import compare_graphs
from llmc.report.ir_lines import stage

HEAD = "sym T in [1, 64]\n"
BODY = """graph @main(%x: f32[T, 8],
    %layers.0.w: weight f32[8, 8],
    %layers.1.w: weight f32[8, 8]) {
  %0 = linear(%x, %layers.0.w) {kernel="cpu/linear", rows=4, arena=[0]} : f32[T, 8]  // layers.0
  %1 = linear(%0, %layers.1.w) {kernel="cpu/linear", rows=4, arena=[256]} : f32[T, 8]  // layers.1
  %2 = sub(%0, %1) : f32[T, 8]
  return %2
}
"""


def differences(a: str, b: str) -> dict[str, list[dict[str, object]]]:
    return compare_graphs(stage(a, "a").graphs, stage(b, "b").graphs)


def test_names_and_places_are_no_difference() -> None:
    other = BODY.replace("%0", "%first").replace("%2", "%out").replace("arena=[256]", "arena=[512]")
    assert other != BODY and differences(BODY, other) == {"graphs": [], "choices": []}


def test_nodes_that_came_and_went_are_counted_by_place() -> None:
    other = BODY.replace("  %2 = sub(%0, %1) : f32[T, 8]\n", "").replace("return %2", "return %1")
    (row,) = differences(BODY, other)["graphs"]
    assert row["changes"] == [{"side": "a", "count": 1, "node": "sub : f32[T, 8]", "loc": ""}]
    halves = BODY.replace("f32[8, 8]", "bf16[8, 8]")
    changes = differences(BODY, halves)["graphs"][0]["changes"]
    assert [(c["side"], c["count"], c["node"]) for c in changes] == [
        ("a", 2, "input layers.*.w: weight f32[8, 8]"), ("b", 2, "input layers.*.w: weight bf16[8, 8]")
    ]  # fmt: skip


def test_wiring_and_ranges_are_reported() -> None:
    (row,) = differences(BODY, BODY.replace("sub(%0, %1)", "sub(%1, %0)"))["graphs"]
    assert row["changes"] == [] and row["wiring"] == "sub at ? reads #0, #1 and #1, #0"
    (row,) = differences(BODY, BODY.replace("return %2", "return %1"))["graphs"]
    assert row["wiring"] == "the outputs are different values"
    (row,) = differences(BODY, BODY.replace(") {\n  %0", ") where T in [1, 4] {\n  %0"))["graphs"]
    assert row["changes"] == [{"side": "b", "count": 1, "node": "input where: T in [1, 4]", "loc": ""}]
    assert differences(BODY, BODY.replace("@main", "@other"))["graphs"] == [
        {"graph": "main", "only": "a"}, {"graph": "other", "only": "b"}
    ]  # fmt: skip


def test_choices_are_reported_apart_from_nodes() -> None:
    found = differences(BODY, BODY.replace("rows=4, arena=[256]", "rows=8, arena=[256]"))
    assert found["graphs"] == []
    assert found["choices"] == [
        {"graph": "main", "node": "linear : f32[T, 8]", "loc": "layers.*", "count": 1,
         "a": 'kernel="cpu/linear", rows=4', "b": 'kernel="cpu/linear", rows=8'}
    ]  # fmt: skip


def test_every_stage_of_a_compile_is_read_line_by_line(made: Made) -> None:
    """As many nodes, inputs and attributes as the real parser finds."""
    from llmc.extension import load
    from llmc.ir.text import parse

    for path in (made.artifact / "ir").iterdir():
        text = path.read_text()
        graphs = parse(text, load().opset()).graphs
        mine = stage(text, path.name).graphs
        assert mine.keys() == graphs.keys()
        for name, g in graphs.items():
            assert [n.op for n in mine[name].nodes] == [n.op.name for n in g.nodes]
            assert [n.loc for n in mine[name].nodes] == [n.loc for n in g.nodes]
            assert [bool(n.choice) for n in mine[name].nodes] == [bool(n.choice) for n in g.nodes]
            assert len([x for x in mine[name].inputs if not x.startswith("where")]) == len(g.inputs)
            assert len(mine[name].outputs) == len(g.outputs)


def test_stages_of_one_artifact(made: Made, tmp_path: Path) -> None:
    a = str(made.artifact)
    found = diff(f"{a}:canonicalize", f"{a}:fuse-norm")
    plus = [(c["node"], c["count"]) for c in found["graphs"][0]["changes"] if c["side"] == "b"]
    assert not found["same"] and sum(n for node, n in plus if node.startswith("rms_norm")) == 5
    text = render(found)
    assert "+ 2 x rms_norm" in text and "// model.layers.*.input_layernorm" in text
    out = io.StringIO()
    assert main(["diff", f"{a}:00-traced", str(made.artifact / "ir/00-traced.llir")], out) == 0
    assert "are identical" in out.getvalue()
    lines = (made.artifact / "ir/00-traced.llir").read_text()
    (tmp_path / "x.llir").write_text(lines.replace("sym T in [1, 512]", "sym T in [1, 9]"))
    found = diff(f"{a}:traced", str(tmp_path / "x.llir"))
    assert found["about"] == [{"what": "sym T", "a": "in [1, 512]", "b": "in [1, 9]"}]
    for wrong in ((a, f"{a}:traced"), (f"{a}:nothing", f"{a}:traced")):
        with pytest.raises(LlmcError, match="E129"):
            diff(*wrong)


@pytest.mark.drawn
def test_two_compiles(made: Made, tmp_path: Path) -> None:
    """Other limits and another pipeline: header, graphs, choices and memory differ; the weights are the same."""
    other = tmp_path / "other.llmc"
    args = ["--max-num-seqs", "6", "--pipeline", "serve, without fuse-pointwise, without fuse-linear"]
    assert main(["compile", str(made.model), "-o", str(other), "--cache", str(made.cache), *args]) == 0
    found = diff(str(made.artifact), str(other))
    about = {r["what"]: (r["a"], r["b"]) for r in found["about"]}
    assert about["max_num_seqs"] == (4, 6) and "option pipeline" in about and "target" not in about
    assert found["graphs"] and found["kernels"] and found["memory"] and found["time"]
    out = io.StringIO()
    assert main(["diff", str(made.artifact), str(other), "--json"], out) == 1
    assert json.loads(out.getvalue()) == json.loads(json.dumps(found))
    text = render(found, max_lines=3)
    assert "max_num_seqs: 4 -> 6" in text and "more lines (--all, --json)" in text
    copy = tmp_path / "copy.llmc"
    shutil.copytree(made.artifact, copy)
    assert diff(str(made.artifact), str(copy))["same"]


def test_weights_of_other_bytes_or_types_are_named(tmp_path: Path) -> None:
    parts = tiny.parts(tmp_path)
    write_artifact(tmp_path / "a.llmc", parts)
    assert isinstance(parts.weights, PackedWeights)
    table = tiny.table()
    table[generator().integers(len(table))] += 1
    changed = PackedWeights(parts.weights.graph, tiny.Checkpoint(table=table))
    write_artifact(tmp_path / "b.llmc", replace(parts, weights=changed))
    found = diff(str(tmp_path / "a.llmc"), str(tmp_path / "b.llmc"))
    assert found["weights"] == [{"name": "table", "how": "different bytes", "count": 1}]
    assert {k for k, v in found.items() if v} == {"a", "b", "weights"}
    assert "1 x table: different bytes" in render(found)
    write_artifact(tmp_path / "c.llmc", replace(parts, weights=7))
    (row,) = diff(str(tmp_path / "b.llmc"), str(tmp_path / "c.llmc"))["weights"]  # no bytes to compare with
    assert row["how"] == "packed and random"


def test_another_kernel_and_another_limit_are_reported(tmp_path: Path) -> None:
    parts = tiny.parts(tmp_path)
    write_artifact(tmp_path / "a.llmc", parts)
    old = parts.kernels[0]
    new = Binary("f" * 32, old.source + "// slower\n", old.binary, old.entry)
    programs = tuple(
        replace(p, launches=tuple(replace(x, kernel=new.hash) for x in p.launches)) for p in parts.programs
    )
    other = replace(parts, kernels=(new, parts.kernels[1]), programs=programs, limits=Limits(tiny.MAXLEN, 3, 48))
    write_artifact(tmp_path / "b.llmc", other)
    found = diff(str(tmp_path / "a.llmc"), str(tmp_path / "b.llmc"))
    assert found["kernels"] == [{"entry": "toy", "a": [old.hash], "b": [new.hash]}]
    assert found["about"] == [{"what": "max_num_seqs", "a": 4, "b": 3}]
    assert "toy: -1" in render(found)
