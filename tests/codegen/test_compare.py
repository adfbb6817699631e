"""`llmc tune --compare`: named kernels compared with all others, and the launches that two artifacts do not share."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.cli import main
from llmc.codegen.select import Select
from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.ir.ops import OPS
from llmc.ir.text import parse, show
from llmc.measure import compare, tune
from llmc.passes.base import Ctx
from llmc.targets.cpu_targets import native

TEXT = """sym T in [1, 64]
graph @main(%x: f32[T, 300]) {
  %y = exp(%x) : f32[T, 300]
  %z = exp(%y) : f32[T, 300]
  return %z
}
"""


class FixedTimes:
    """A timer whose times depend on the kernel only: cpu/elements takes 2 us, all others 5 us."""

    def __init__(self, *args: Any, **more: Any) -> None:
        pass

    def check_device(self) -> None:
        pass

    def microseconds(self, candidates: Sequence[Any], symbols: Any) -> list[float]:
        return [2.0 if c.kernel.name == "cpu/elements" else 5.0 for c in candidates]


class Manifests:
    """Manifests of artifacts that are only folders with IR text; those named "gpu" are for a GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self) -> Any:
        name = "cuda:sm_90" if "gpu" in self.path.name else native().name
        return SimpleNamespace(target=SimpleNamespace(name=name), kv=SimpleNamespace(page_size=16))


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mine: exp by cpu/elements; other: by cpu/rows."""
    monkeypatch.setattr(tune, "Timer", FixedTimes)
    monkeypatch.setattr(compare, "Folder", Manifests)
    for name, kernel in (("mine", "cpu/elements"), ("other", "cpu/rows")):
        m = parse(TEXT, OPS)
        Select(prefer=(kernel,)).run(m, Ctx(OPS, native(), load().kernels))
        (tmp_path / name / "ir").mkdir(parents=True)
        (tmp_path / name / "ir" / "00-before.llir").write_text(TEXT)
        (tmp_path / name / "ir" / "01-select.llir").write_text(show(m))
        (tmp_path / name / "manifest.json").write_text("{}")
    return tmp_path


def test_the_launches_that_differ_are_summed(artifacts: Path) -> None:
    out = io.StringIO()
    words = ["tune", str(artifacts / "mine"), "--compare", str(artifacts / "other")]
    assert main([*words, "--json"], out) == 0
    (row,) = json.loads(out.getvalue())
    assert row["graph"] == "main" and row["sizes"]["T"] == 64
    assert [(x["count"], x["us"], x["kernel"]) for x in row["mine"]] == [(2, 2.0, "cpu/elements")]
    assert [(x["count"], x["us"], x["kernel"]) for x in row["other"]] == [(2, 5.0, "cpu/rows")]
    assert (row["mine_us"], row["other_us"], row["speedup"]) == (4.0, 10.0, 2.5)
    out = io.StringIO()
    assert main(words, out) == 0
    assert out.getvalue().startswith("@main T=64: mine 4 us, other 10 us: 2.50 times as fast\n")


def test_an_artifact_equals_itself(artifacts: Path) -> None:
    settings = tune.Settings(progress=lambda line: None)
    assert compare.compare_artifacts(artifacts / "mine", artifacts / "mine", settings) == []
    assert compare.render([]) == "no launch differs"


def test_a_kernel_beside_the_others(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "before_select", lambda *a: (parse(TEXT, OPS), native(), 16))
    settings = tune.Settings(progress=lambda line: None)
    (row,) = compare.compare_kernels(artifacts / "mine", ["cpu/elements"], settings)
    assert row["mine"][0]["kernel"] == "cpu/elements" and row["other"][0]["kernel"] == "cpu/rows"
    assert row["mine"][0]["count"] == 2 and row["speedup"] == 2.5
    (row,) = compare.compare_kernels(artifacts / "mine", ["cpu/rows"], settings)
    assert row["speedup"] == 0.4
    for kernel, reason in (("cpu/element", "no kernel 'cpu/element'"), ("cpu/linear", "no node can be run")):
        with pytest.raises(Diagnostic, match=reason):
            compare.compare_kernels(artifacts / "mine", [kernel], settings)


def test_graphs_that_cannot_be_compared_are_reported(artifacts: Path) -> None:
    settings = tune.Settings(progress=lambda line: None)
    with pytest.raises(Diagnostic, match=r"E433.*cuda:sm_90"):
        compare.compare_artifacts(artifacts / "mine", artifacts / "gpu", settings)
    (artifacts / "other" / "ir" / "01-select.llir").unlink()
    with pytest.raises(Diagnostic, match=r"E433.*no text of the pass `select`"):
        compare.compare_artifacts(artifacts / "mine", artifacts / "other", settings)
    with pytest.raises(SystemExit):
        main(["tune", "x", "--show", "y", "--compare", "z"])
    with pytest.raises(SystemExit):
        main(["tune", "--compare", "z"])


def test_a_launch_that_was_not_measured_gives_no_speedup() -> None:
    row = compare._comparison("g", {}, [{"count": 1, "us": None}], [{"count": 1, "us": 3.0}])
    assert row["mine_us"] is None and row["speedup"] is None
    assert compare._comparison("g", {}, [], [{"count": 2, "us": 3.0}])["other_us"] == 6.0
