"""Signals while a model is compiled on first use: the compiler and its child processes end, and no files remain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")

# It calls the command with a compiler that writes half an artifact as ours does, starts a process, and hangs.
PROGRAM = """
import sys
from llmc_runtime import cli, compile_cache
model, root, stubborn = sys.argv[1:4]
compiler = '''
import os, pathlib, signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
out = pathlib.Path(sys.argv[1])
half = out.parent / f".{out.name}.tmp-{os.getpid()}-c0ffee"
half.mkdir()
(half / "weights").write_text("half")
out.mkdir()
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), other.pid, file=sys.stderr, flush=True)
time.sleep(600)
'''
compile_cache._STOP_SECONDS = 0.3
compile_cache.require_compiler = lambda *why: None
compile_cache.compile_command = lambda source, output, options, root: ["-c", compiler, str(output), stubborn]
if sys.argv[4] == "serve":
    sys.exit(cli.main_serve([model, "--port", "0", "--cache", root]))
sys.exit(cli.run_command([model, "--prompt", "x", "--cache", root]))
"""


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and waits for its parent to look does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("number", "stubborn", "command", "code"),
    [
        (signal.SIGTERM, "no", "serve", 143),
        (signal.SIGINT, "stubborn", "serve", 130),
        (signal.SIGTERM, "no", "run", 143),
    ],
)
def test_nothing_is_left_of_a_compile_that_a_signal_ends(
    number: signal.Signals, stubborn: str, command: str, code: int, tmp_path: Path
) -> None:
    model, root = tmp_path / "a [model]", tmp_path / "root"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    words = [sys.executable, "-c", PROGRAM, str(model), str(root), stubborn, command]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    pids: list[int] = []
    for line in process.stderr:
        if line.startswith("pids"):
            pids = [int(word) for word in line.split()[1:]]
            break
    assert len(pids) == 2 and all(map(alive, pids))
    assert len([path for path in (root / "artifacts").iterdir() if path.is_dir()]) == 2
    process.send_signal(number)
    log = process.stderr.read()
    assert process.wait(30) == code, log
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(alive, pids))
    assert [path.suffix for path in (root / "artifacts").iterdir()] == [".lock"]
    assert "Traceback" not in log
    assert log.endswith("llmc-serve: interrupted\n") == (number == signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so_and_another_raises_once(number: signal.Signals) -> None:
    from llmc_runtime.signals import unwinding

    before = signal.signal(number, signal.SIG_IGN)
    try:
        with unwinding():
            os.kill(os.getpid(), number)  # as under nohup
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(SystemExit) as ended, unwinding():
            try:
                os.kill(os.getpid(), number)
                time.sleep(5)
            finally:
                os.kill(os.getpid(), number)  # while things are given back
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
