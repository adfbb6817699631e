"""What a compile tells while it runs: on a terminal one line that is rewritten, elsewhere one line a stage."""

from __future__ import annotations

import io
import json
import re

import pytest
from report.conftest import Made

from llmc import console as consoles
from llmc.cli import main
from llmc.console import Console, Quiet


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """The lines that remain after every erasure."""
        return [line.split("\r\x1b[K")[-1] for line in self.getvalue().split("\n")]


def test_a_terminal_keeps_one_line_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: now[0])
    out = Terminal()
    console = Console(out)
    console.begin("trace", "tiny")
    assert out.screen == ["  trace ... tiny"]
    console.note("note: float16")
    console.stage("trace", "done", 1.5)
    for i in range(5):
        console.part("weights", i * 100_000_000, 800_000_000, "B")
        assert f"{i}00 MB of 800 MB" in out.screen[-1] or i == 0
        now[0] += 1.0
    assert out.screen[-1] == "  weights: 400 MB of 800 MB, 4 s left"
    console.part("weights", 500_000_000, 800_000_000, "B")
    now[0] += 0.1
    console.part("weights", 501_000_000, 800_000_000, "B")  # too soon after the last
    assert "500 MB" in out.screen[-1]
    console.stage("weights", "800 MB", 8.0)
    assert out.screen == ["note: float16", "[   1.5 s] trace: done", "[   8.0 s] weights: 800 MB", ""]


def test_elsewhere_there_is_a_line_a_stage_and_no_control_character() -> None:
    out = io.StringIO()
    console = Console(out)
    console.begin("kernels")
    console.part("kernels", 1, 2)
    console.stage("kernels", "2 binaries", 0.5)
    assert out.getvalue() == "[   0.5 s] kernels: 2 binaries\n"
    quiet = Quiet(out)
    quiet.begin("x")
    quiet.stage("x", "y", 1.0)
    assert out.getvalue().count("\n") == 1


def test_the_summary_names_every_stage_and_the_next_command(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    other = made.artifact.with_name("again.llmc")
    args = ["compile", str(made.model), "-o", str(other), "--cache", str(made.cache), "--max-num-seqs", "4"]
    assert main([*args, "--no-reuse"]) == 0
    lines = capsys.readouterr().err.splitlines()
    stages = [m[1] for line in lines if (m := re.match(r"\[ *[\d.]+ s\] (\w+): ", line))]
    assert stages == ["trace", "passes", "kernels", "weights"]
    assert all(f"{s} " in next(line for line in lines if line.startswith(f"{other} in ")) for s in stages)
    assert f"  look inside: llmc inspect {other}; llmc report {other}" in lines
    assert lines[-1] == f"next: llmc-run {other} --prompt 'Hello'"
    assert main([*args, "--json", "--force"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["next"] == lines[-1] and set(output["seconds"]) == {"reuse"}
