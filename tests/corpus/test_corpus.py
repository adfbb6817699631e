"""A sample of the corpus (`make corpus` runs all): no requirement is violated, and the judge detects violations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpus.judge import Case, Outcome, run_all, wrong

RUN = Path(__file__).parent / "run.py"


@pytest.mark.drawn
@pytest.mark.parametrize("families", ["flips,manifest,truncations", "nonsense,folders,headers", "texts", "configs"])
def test_a_sample(families: str) -> None:
    names = {"texts": "indexes,tokenizers,templates,links"}.get(families, families)
    command = [sys.executable, str(RUN), "--jobs", "1", "--slack", "3", "--only", names]  # next to other tests
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "every promise was kept" in found.stdout


def _loud(folder: Path) -> int:
    print("LLMC-E103: x is damaged\n  Try: another")
    return 1


def _slow(folder: Path) -> int:
    end = time.process_time() + 2.2
    while time.process_time() < end:
        pass
    return _loud(folder)


def _large(folder: Path) -> int:
    return _loud(folder) if bytearray(b"x" * (120 << 20)) else 0


def _dead(folder: Path) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _mistaken(folder: Path) -> int:
    raise KeyError("x")


BAD = {
    "it took 2": _slow, "MiB; at most": _large, "ended by -11": _dead, "KeyError": _mistaken,
    "silence": lambda folder: 0, "no code": lambda folder: 1, "no remedy": lambda folder: print("LLMC-E103: x") or 1,
    "lines of": lambda folder: print("LLMC-E103: x\n  Try: y" + "\nz" * 9) or 1,
}  # fmt: skip


def test_the_judge_sees_what_is_wrong() -> None:
    """In a process of its own: forks of one with threads are no measure, and this one may have had some."""
    code = "from corpus.test_corpus import judged; judged()"
    path = os.pathsep.join([str(RUN.parents[1]), str(RUN.parents[2] / "runtime"), str(RUN.parents[2])])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)


def judged() -> None:
    cases = [Case("judge", word, act) for word, act in BAD.items()]
    cases += [Case("judge", "well", _loud, names="damaged"), Case("judge", "not named", _loud, names="nowhere")]
    found = run_all(cases, 1, lambda i, o: None, again=0)
    for i, case in enumerate(cases):
        why = wrong(case, found[i])
        assert (case.name in why) if case.name not in ("well",) else not why, (case.name, why)
    assert wrong(cases[0], Outcome(1, 0.1, 0, "LLMC-E103: x\n  Try: y")) == ""
