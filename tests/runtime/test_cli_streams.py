"""llmc-run on standard streams that are closed, full, or of a narrow encoding."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmc_runtime.cli import run_command
from llmc_runtime.outputs import Piece

from tests.runtime.test_cli_run import ROOT


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("as_json", [False, True])
def test_any_text_reaches_an_output_of_any_encoding(
    toy: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, as_json: bool
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(
        "llmc_runtime.outputs.OutputAssembler.piece", lambda self: Piece("\u65e5\xe9", [1], None, "length")
    )
    args = [str(toy), "-p", "abc\xe9", "-n", "1", "-q"]
    assert run_command([*args, "--json"] if as_json else args) == 0
    shown = out.buffer.getvalue()  # type: ignore[attr-defined]
    if as_json:
        assert json.loads(shown.decode(encoding))["prompt"] == "abc\xe9"
    else:
        assert shown == "\u65e5\xe9\n".encode(encoding, "backslashreplace")


@pytest.mark.parametrize(
    ("redirect", "words"),
    [
        ("-p abc > /dev/full", "LLMC-E644: standard output cannot be written: No space left"),
        ("-p abc --json > /dev/full", "LLMC-E644: standard output cannot be written: No space left"),
        ("-p abc >&-", "LLMC-E643: standard output is closed"),
        ("<&-", "LLMC-E643: standard input is closed"),
    ],
)
def test_streams_that_are_full_or_closed(toy: Path, redirect: str, words: str) -> None:
    command = f"{sys.executable} -m llmc_runtime.cli {toy} -n 3 -q {redirect}"
    path = os.pathsep.join([str(ROOT / "runtime"), str(ROOT)])
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(words) and len(done.stderr.splitlines()) == 2


def test_messages_for_a_closed_standard_error_do_not_go_to_standard_output(toy: Path) -> None:
    command = f"{sys.executable} -m llmc_runtime.cli {toy} -n 2 -p abc"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT)])}
    output = [
        subprocess.run(
            ["bash", "-c", f"{command} --seed 1 -t 1 {end}"], env=env, capture_output=True, check=True
        ).stdout
        for end in ("2>/dev/null", "2>&-", "<&- 2>&-")
    ]
    assert output[0] == output[1] == output[2] and b"llmc:" not in output[0]
