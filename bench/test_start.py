"""Time from process start to the first token of the demonstration artifact, and of `llmc --help`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.kit import BUILD, ROOT, Table, clock, interleave, median, record, run, table

MODEL = ROOT / "examples" / "demo-model"
ROUNDS = 10
ENV = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"}
PROGRAM = "import sys; from llmc_runtime.cli import main_run; sys.exit(main_run())"


def first_byte(command: list[str]) -> float:
    """Return the seconds from starting a command to the first byte on its stdout."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    byte = process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.stdout.read()
    assert process.wait() == 0 and byte, f"{command} printed nothing"
    return seconds


def python_alone() -> float:
    """Return the seconds of an interpreter that does nothing, the lower limit of a program in Python."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "print(1)"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


@pytest.mark.benchmark(timer=clock, group="start")
def test_first_token(benchmark: Any) -> None:
    """Run llmc-run ARTIFACT --prompt from process start to the first text, with every hash checked; then again with the
    artifact's files dropped from the page cache (the interpreter's and numpy's remain).
    """
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL.relative_to(ROOT)} is not there")
    out = BUILD / "demo.llmc"
    run([sys.executable, "-m", "llmc.cli", "compile", str(MODEL), "-o", str(out), "--force"])
    command = [sys.executable, "-c", PROGRAM, str(out), "--prompt", "The kernel", "--max-tokens", "8", "-t", "0"]
    measures = {
        "warm": lambda: first_byte(command),
        "cold": lambda: forget(out) or first_byte(command),
        "python": python_alone,
    }
    times = interleave(measures, ROUNDS)
    t = _report(benchmark, "Process start to the first token, demonstration model", times, "warm", 1.0)
    t.notes.append(f"artifact not in the page cache: median {median(times['cold']):.3f} s")


@pytest.mark.benchmark(timer=clock, group="start")
def test_help(benchmark: Any) -> None:
    """Run llmc --help, from process start to its end."""
    command = [sys.executable, "-m", "llmc.cli", "--help"]
    times = interleave({"llmc --help": lambda: run(command).seconds, "python": python_alone}, ROUNDS)
    _report(benchmark, "llmc --help", times, "llmc --help", 0.3)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _report(benchmark: Any, title: str, times: dict[str, list[float]], name: str, target: float) -> Table:
    t = table(title, "median s", "least s", "target s", "an interpreter alone s")
    s = times[name]
    t.add(f"{median(s):.3f}", f"{min(s):.3f}", target, f"{median(times['python']):.3f}")
    others = {f"{k}_median_seconds": median(v) for k, v in times.items() if k != name}
    record(benchmark, s, target_seconds=target, **others)
    return t
