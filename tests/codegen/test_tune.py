"""`llmc tune` on this machine's CPU, from a module to a choice, and from a model to a file."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from llmc_runtime.format import expr
from llmc_runtime.format.program import Buffer, Launch, Program
from models.cases import LISTED
from models.kit import save as save_model

from llmc.cli import main
from llmc.codegen.select import Select
from llmc.codegen.tuning_records import Tuning, record, save
from llmc.diagnostics import Diagnostic
from llmc.driver import compile_model
from llmc.extension import load
from llmc.ir.ops import OPS
from llmc.ir.text import parse
from llmc.measure import tune as tuning
from llmc.measure.timing import Timer, Trial, _places
from llmc.options import Options
from llmc.passes.base import Ctx
from llmc.targets.cpu_targets import native

TEXT = """sym T in [1, 512]
graph @main(%x: f32[T, 300]) {
  %y = exp(%x) : f32[T, 300]
  %z = exp(%y) : f32[T, 300]
  return %z
}
"""


def test_the_fastest_way_is_measured_and_then_chosen(tmp_path: Path) -> None:
    registry, target = load(), native()
    m = parse(TEXT, OPS)
    tuned = tuning.Tuned("")
    (work,) = tuning.tuning_work(m, registry, target, tuned)
    assert work.launches == 2 and {o.kernel.name for o in work.candidates} >= {"cpu/rows", "cpu/elements"}
    (beside,) = tuning.tuning_work(m, registry, target, tuned, kernels=("cpu/elements",))
    assert {o.kernel.name for o in beside.candidates} == {"cpu/elements", "cpu/rows"}
    assert len([o for o in beside.candidates if o.kernel.name == "cpu/rows"]) <= tuning.MAX_RIVALS
    held = record(work.node, "cpu/rows", {}, target, 1.0, work.env)
    for at, kernels in ((held, {"cpu/elements"}), (replace(held, sizes=(("T", 3),)), {"cpu/elements", "cpu/rows"})):
        save(tmp_path / f"{len(kernels)}.jsonl", [at])
        known = Tuning.load(tmp_path / f"{len(kernels)}.jsonl")
        (added,) = tuning.tuning_work(m, registry, target, tuned, kernels=("cpu/elements",), measured=known)
        assert {o.kernel.name for o in added.candidates} == kernels
    timer = Timer(target, registry, tmp_path / "cache", jobs=2, context=64, page=16)
    found = [Trial(work.node, work.graph, work.env, o.kernel, o.schedule) for o in work.candidates]
    times = timer.microseconds(found, m.symbols)
    assert all(0 < us < 1e5 for us in times)
    without_pauses = timer.sustained(found, m.symbols, 0.02)
    assert all(0 < r.us < 1e5 and r.begin < r.end for r in without_pauses)
    assert all(a.end < b.begin for a, b in pairwise(without_pauses))
    timer.sustained_seconds = 0.02
    assert all(0 < us < 1e5 for us in timer.microseconds(found, m.symbols))
    path = tmp_path / "t.jsonl"
    save(path, [record(c.node, c.kernel.name, c.schedule, target, us, c.env) for c, us in zip(found, times)])
    best = found[times.index(min(times))]
    Select(tuning=str(path)).run(m, Ctx(OPS, target, registry.kernels))
    assert [n.choice["kernel"] for n in m.graphs["main"].nodes] == [best.kernel.name] * 2


SHARDED = """sym T in [1, 8]
sym K in [0, 1]
graph @main(%ids: i32[T], %table: weight bf16[300, 64]) {
  %part = slice(%table) {axis=0, start=150*K, stop=150*K+150} : bf16[150, 64]
  %x = take_part(%part, %ids) {start=150*K} : bf16[T, 64]
  %s = all_reduce(%x) {ranks=2} : bf16[T, 64]
  return %s
}
"""


def test_nodes_of_a_rank_are_measured_without_the_others(tmp_path: Path) -> None:
    registry, target, tuned = load(), native(), tuning.Tuned("")
    m = parse(SHARDED, OPS)
    (work,) = tuning.tuning_work(m, registry, target, tuned, every=True)
    assert work.node.op.name == "take_part"
    assert tuned.skipped == ["all_reduce: it needs all ranks, and a single process measures"]
    timer = Timer(target, registry, tmp_path / "cache", jobs=1, context=64, page=16)
    found = [Trial(work.node, work.graph, work.env, o.kernel, o.schedule) for o in work.candidates]
    assert all(us > 0 for us in timer.microseconds(found, m.symbols))


@pytest.mark.drawn(seconds=14)
def test_a_model_is_tuned_within_its_limit(tmp_path: Path) -> None:
    """Every node of a small model, by the command line; an artifact of it, stopped at once."""
    save_model(LISTED[0], tmp_path / "model")
    out, output = tmp_path / "t.jsonl", StringIO()
    sizes = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    common = ["--target", "cpu:native", "--cache", str(tmp_path / "cache"), *sizes, "--context", "32"]
    assert main(["tune", str(tmp_path / "model"), "-o", str(out), "--all", "--json", *common], output) == 0
    chosen = json.loads(output.getvalue())
    assert {c["kernel"] for c in chosen} >= {"cpu/linear", "cpu/attention", "cpu/rows"}
    assert all(c["us"] > 0 for c in chosen) and len(chosen) == len(out.read_text().splitlines())
    output = StringIO()
    assert main(["tune", "--show", str(out)], output) == 0 and "paged_attention" in output.getvalue()

    options = Options(cache=tmp_path / "cache", reuse=False, max_num_seqs=2, max_model_len=64, weights="none")
    compile_model(tmp_path / "model", tmp_path / "model.llmc", options)
    settings = tuning.Settings(limit=0, every=True, cache=tmp_path / "cache")
    stopped = tuning.tune(tmp_path / "model.llmc", tmp_path / "none.jsonl", settings)
    assert stopped.measured == 0 and stopped.unreached > 0 and "not reached" in stopped.text()
    with pytest.raises(Diagnostic, match="was compiled for"):
        tuning.tune(tmp_path / "model.llmc", out, tuning.Settings(target="cuda:sm_90"))
    with pytest.raises(Diagnostic, match="no kernel 'cpu/row'"):
        tuning.tune(tmp_path / "model.llmc", out, tuning.Settings(kernels=("cpu/row",)))
    with pytest.raises(Diagnostic, match=r"no node .* by triton/gemm_tma on cpu:"):
        tuning.tune(tmp_path / "model.llmc", out, tuning.Settings(kernels=("triton/gemm_tma",)))
    with pytest.raises(Diagnostic, match=r"E433.*single candidate on cpu:native.*\n.*--all"):
        tuning.tune(tmp_path / "model.llmc", tmp_path / "none.jsonl", replace(settings, every=False))
    assert Tuning.load(out).records


def test_arguments_that_a_kernel_may_join_share_memory() -> None:
    x, y, z = (
        Buffer(name, kind, "f32", (expr.of(8),), expr.of(32))
        for name, kind in (("x", "input"), ("y", "output"), ("z", "output"))
    )
    launches = tuple(Launch("ab" * 16, "k", args, ()) for args in ((0, 1), (0, 2)))
    program = Program("p", {}, {}, (x, y, z), launches, 0)
    apart, _ = _places(program, {})
    assert len(set(apart.values())) == 3
    joined, nbytes = _places(program, {}, [(0, 1)])
    assert joined["x"] == joined["y"] == joined["z"] and joined["x"] + 32 <= nbytes


def test_a_batch_with_a_way_that_fails_is_halved() -> None:
    """The others of its batch are still measured, and the reason is reported."""

    class Broken:
        def microseconds(self, found: list[Trial], symbols: object) -> list[float]:
            if any(c.schedule for c in found):
                raise Diagnostic("E502", "it does not compile", "none")
            return [1.0] * len(found)

    m = parse(TEXT, OPS)
    tuned = tuning.Tuned("")
    (work,) = tuning.tuning_work(m, load(), native(), tuned)
    good, bad = (Trial(work.node, work.graph, work.env, work.candidates[0].kernel, s) for s in ({}, {"broken": 1}))
    assert tuning.times_of(Broken(), [good, good, bad, good], m, tuned) == [1.0, 1.0, None, 1.0]  # type: ignore[arg-type]
    assert len(tuned.failed) == 1 and "does not compile" in tuned.failed[0]

    class Away:
        def microseconds(self, found: list[Trial], symbols: object) -> list[float]:
            raise Diagnostic("E115", "no driver", "none")

    with pytest.raises(Diagnostic, match="E115"):  # of the machine: no kernel would fare better
        tuning.times_of(Away(), [good, good], m, tuned)  # type: ignore[arg-type]


def test_a_missing_device_is_reported_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even the model is opened: the folder that is named does not exist."""
    code = main(["tune", str(tmp_path / "nowhere"), "-o", str(tmp_path / "t.jsonl"), "--target", "hip:gfx942"])
    output = capsys.readouterr().err
    assert code == 3 and "E115" in output and "ROCm" in output and "nowhere" not in output
