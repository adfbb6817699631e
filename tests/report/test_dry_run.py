"""`llmc compile --dry-run`: the plan equals the artifact of a real compile, and no files remain."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from report.conftest import Made

from llmc.artifact.cost_report import weight_bytes
from llmc.cli import main
from llmc.codegen.toolchain import Toolchain, Toolset
from llmc.diagnostics import Diagnostic
from llmc.dry_run import render
from llmc.report.open_artifact import open_artifact


def planned(made: Made, *args: str, code: int = 0) -> dict[str, Any]:
    out = io.StringIO()
    base = ["compile", str(made.model), "--dry-run", "--cache", str(made.cache), "--max-num-seqs", "4", "--json"]
    assert main([*base, *args], out) == code
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_the_plan_is_the_artifact(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned(made, "--no-cache")
    a = open_artifact(made.artifact)
    assert plan["programs"] == [
        {"name": p.name, "serves": {s: list(r) for s, r in p.serves.items()}, "launches": len(p.launches),
         "arena_bytes": p.arena_bytes}
        for p in a.programs
    ]  # fmt: skip
    assert plan["compile"]["kernels"] == len(a.manifest.kernels) and plan["compile"]["cached"] == 0
    assert plan["memory"]["weights"] == weight_bytes(a.programs)
    predicted = a.predictions()["programs"]
    assert {r["program"]: r["us"] for r in plan["time"]} == {n: p["us"] for n, p in predicted.items()}
    assert all(r["roofline_us"] < r["us"] for r in plan["time"])
    limits = a.manifest.limits
    assert plan["model"]["max_model_len"] == limits.max_model_len and plan["model"]["layers"] == 2
    assert plan["kv"]["bytes_per_token"] == a.manifest.kv.bytes_per_page // a.manifest.kv.page_size
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_is_reported_before_the_trace(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(self: Toolset, language: str) -> Toolchain:
        raise Diagnostic("E501", "not installed")

    monkeypatch.setattr(Toolset, "of", missing)
    monkeypatch.setattr("llmc.frontend.trace_model.trace", lambda *args: pytest.fail("the model was traced"))
    assert main(["compile", str(made.model), "--dry-run"], io.StringIO()) == 3
    assert "E501" in capsys.readouterr().err


def test_whether_it_fits_and_what_would(made: Made) -> None:
    """The model does not fit with a byte less than a sequence needs; it does with the limits that the remedy names."""
    plan = planned(made)
    assert plan["fits"] and not plan["memory"]["given"] and plan["kv"]["sequences"] == 4  # all rows: no more is used
    assert plan["compile"]["cached"] == plan["compile"]["kernels"]
    need = plan["memory"]["needed"]
    short = planned(made, "--memory", f"{need - 1}B", code=1)
    text = render(short, ["compile", "x"])
    assert short["fits"] is False and "NO: one sequence needs" in text and "next:" not in text
    (tokens,) = [w for line in text.splitlines() if "Try: --max-model-len" in line for w in line.split() if w.isdigit()]
    fitting = planned(made, "--memory", f"{need - 1}B", "--max-model-len", tokens)
    assert fitting["fits"] and fitting["kv"]["tokens"] >= int(tokens) == plan["model"]["max_model_len"] - 16
    hopeless = {**short, "memory": {**short["memory"], "left_for_kv": 0}}
    assert "use a device with more memory" in render(hopeless, [])
    assert "pass --memory" in render({**short, "fits": None}, [])


def test_a_plan_for_a_gpu_compiles_nothing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.codegen.backends.triton.triton_toolchain import TritonToolchain

    monkeypatch.setattr(TritonToolchain, "compile", lambda *a, **k: pytest.fail("it compiles"))
    plan = planned(made, "--target", "cuda:sm_90", "--memory", "24", "--cache", str(tmp_path))
    assert plan["memory"]["device"] == 24 << 30 and plan["fits"] and plan["compile"]["cached"] == 0
    assert plan["compile"]["kernels"] > 10 and len(plan["programs"]) >= 3


def test_the_next_command_is_the_one_planned(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["compile", str(made.model), "--max-num-seqs", "4", "--cache", str(made.cache)]
    assert main([*args, "--dry-run", "--memory=1"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"next: llmc {' '.join(args)} -o model.llmc"
    with pytest.raises(SystemExit) as e:
        main(args)
    assert e.value.code == 2 and "--dry-run" in capsys.readouterr().err
