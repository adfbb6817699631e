"""Progress of a compile: one line that is rewritten on a terminal, else one line per stage."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest
from report.conftest import Made

from llmc import console as consoles
from llmc.cli import main
from llmc.console import Console, Quiet, Summary, next_command
from llmc.extension import load
from llmc.options import Options


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
        console.part("weights", i * 100 << 20, 800 << 20, "B")
        assert f"{i}00.0 MiB of 800.0 MiB" in out.screen[-1] or i == 0
        now[0] += 1.0
    assert out.screen[-1] == "  weights: 400.0 MiB of 800.0 MiB, 4 s left"
    console.part("weights", 500 << 20, 800 << 20, "B")
    now[0] += 0.1
    console.part("weights", 501 << 20, 800 << 20, "B")  # too soon after the last
    assert "500.0 MiB" in out.screen[-1]
    console.stage("weights", "800 MiB", 8.0)
    assert out.screen == ["note: float16", "[   1.5 s] trace: done", "[   8.0 s] weights: 800 MiB", ""]


def test_elsewhere_a_stage_has_two_lines_and_no_control_character(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(out)
    now = [100.0]
    monkeypatch.setattr(consoles.time, "monotonic", lambda: now[0])
    console.begin("kernels")
    assert out.getvalue() == "  kernels ...\n"
    console.part("kernels", 1, 2)
    now[0] += consoles.SILENT_SECONDS
    console.part("kernels", 2, 3)  # nothing was printed for that long
    console.part("kernels", 3, 4)
    console.stage("kernels", "2 binaries", 0.5)
    lines = ["  kernels ...", "  kernels: 2 of 3, 10 s left", "[   0.5 s] kernels: 2 binaries", ""]
    assert out.getvalue().split("\n") == lines
    quiet = Quiet(out)
    quiet.begin("x")
    quiet.stage("x", "y", 1.0)
    assert out.getvalue().split("\n") == lines


def test_an_unfinished_line_is_erased_on_terminals_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        Console(out).begin("trace", "tiny")
        consoles.erase_line(out)
    assert terminal.screen == [""] and pipe.getvalue() == "  trace ... tiny\n"


def test_the_summary_names_every_stage_and_the_next_command(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    other = made.artifact.with_name("again.llmc")
    args = ["compile", str(made.model), "-o", str(other), "--cache", str(made.cache), "--max-num-seqs", "4"]
    assert main([*args, "--no-reuse"]) == 0
    lines = capsys.readouterr().err.splitlines()
    stages = [m[1] for line in lines if (m := re.match(r"\[ *[\d.]+ s\] (\w+): ", line))]
    assert stages == ["trace", "passes", "kernels", "weights"]
    assert all(f"{s} " in next(line for line in lines if line.startswith(f"{other} in ")) for s in stages)
    assert f"  look inside: llmc inspect {other}; llmc report {other}" in lines
    assert lines[-1].startswith("next: python -c ") and f"LLM('{other}')" in lines[-1]  # the model has no tokenizer
    assert main([*args, "--json", "--force"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["next"] == lines[-1] and set(output["seconds"]) == {"reuse"}


@pytest.mark.parametrize("name", ["m.llmc", "my model.llmc", "it's $HOME.llmc"])
def test_suggested_commands_quote_paths(name: str, tmp_path: Path) -> None:
    """A shell splits them into the same words, whatever characters a path has."""
    model, out, target = tmp_path / name, Path(name), load().target("cpu:portable")

    def words(options: Options) -> list[str]:
        return shlex.split(next_command(model, out, options, target).removeprefix("next: "))

    assert words(Options(weights="none")) == ["llmc", "pack", name, str(model)]
    assert words(Options(drafts_for=Path(name)))[:4] == ["llmc-run", name, "--draft-model", name]
    assert words(Options())[2] == f"from llmc_runtime import LLM; print(LLM({name!r}).generate([[1, 2, 3]]))"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    assert words(Options()) == ["llmc-run", name, "--prompt", "Hello"]
    look = next(line for line in Summary(name).text().splitlines() if "look inside" in line)
    assert shlex.split(look)[2:] == ["llmc", "inspect", *shlex.split(shlex.quote(name) + ";"), "llmc", "report", name]
