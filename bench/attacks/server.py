"""`llmc-serve` on an artifact as a process: starting, observing its memory and CPU time, ending."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.attacks.figures import memory_window

ROOT = Path(__file__).resolve().parents[2]
SERVE = ("-c", "from llmc_runtime.cli import main_serve; raise SystemExit(main_serve())")
KEYS = {"attacker": "attacker-key-of-the-bench", "neighbour": "neighbour-key-of-the-bench"}
KEYS_NAME, ADMIN_NAME = "LLMC_ATTACK_KEYS", "LLMC_ATTACK_ADMIN"
ADMIN_KEY = "admin-key-of-the-bench"
SAMPLE = 0.2  # seconds
FRONT, ENGINE = "front", "engine"


def python_path() -> str:
    """Return the module search path of children: this checkout first, then the present one."""
    before = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT), str(ROOT / "runtime"), *([before] if before else [])])


class Server:
    """A ready server with two API keys. Raises SystemExit with the last log lines if it does not start."""

    def __init__(self, artifact: Path | str, log: Path, options: Sequence[str] = (), seconds: float = 120.0,
                 program: Sequence[str] = SERVE) -> None:  # fmt: skip
        self.log = log
        command = [sys.executable, *program, str(artifact), "--port", "0", *options]
        command += ["--api-key-env", KEYS_NAME, "--admin-key-env", ADMIN_NAME]
        keys = {KEYS_NAME: ",".join(KEYS.values()), ADMIN_NAME: ADMIN_KEY}
        env = {**os.environ, "PYTHONPATH": python_path(), **keys}
        with log.open("w") as err:
            self.process = subprocess.Popen(command, stderr=err, stdout=err, env=env)
        began = time.monotonic()
        while not (address := re.search(r" at http://([\d.]+):(\d+)", log.read_text(errors="replace"))):
            if self.process.poll() is not None or time.monotonic() - began > seconds:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)
        self.host, self.port = address[1], int(address[2])
        self.began = self.family()

    def family(self) -> dict[int, tuple[float, str]]:
        """Return, by process id, its start time and role: front end, engine, or the module of a helper."""
        family: dict[int, tuple[float, str]] = {}
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self.process.pid)
            family[top.pid] = (top.create_time(), FRONT)
            for child in top.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    family[child.pid] = (child.create_time(), _role(child, top.pid))
        return family

    @property
    def engine(self) -> int | None:
        """The engine's process id, or None."""
        return next((pid for pid, (_, role) in self.family().items() if role == ENGINE), None)

    def cpu_waits(self) -> dict[str, float]:
        """Return `cpu_wait` of the main threads of the front end and of the engine."""
        return {role: cpu_wait(f"{pid}/task/{pid}") for pid, (_, role) in self.began.items() if role in (FRONT, ENGINE)}

    def changes(self) -> str:
        """Describe what became of the initial processes, except helpers."""
        now = self.family()
        changes = []
        for role in (FRONT, ENGINE):
            before = {(pid, began) for pid, (began, which) in self.began.items() if which == role}
            after = {(pid, began) for pid, (began, which) in now.items() if which == role}
            if before != after:
                changes.append(f"{role} {'replaced' if after else 'ended'}")
        if (code := self.process.poll()) is not None:
            changes.append(f"exit code {code}")
        return ", ".join(changes) or "same"

    def end(self) -> int:
        """End the server and its children; return its exit code."""
        children = self.family()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        for pid, (began, _) in children.items():
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).create_time() == began:
                    psutil.Process(pid).kill()
        return code


def cpu_wait(task: str = "thread-self") -> float:
    """Return the seconds for which a thread was ready and had no CPU; 0 if the kernel does not count them, or if it has
    ended. `task` is its folder below /proc.
    """
    try:
        return int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _role(process: psutil.Process, top: int) -> str:
    """Return the role by the module in the command line; children of the engine are helpers."""
    text = " ".join(process.cmdline())
    if "engine.engine_process" in text or "fake_engine" in text:
        return ENGINE if process.ppid() == top else "helper"
    named = re.search(r"llmc_runtime\.([\w.]+)", text)
    return named[1] if named else "helper"


def _memory(process: psutil.Process) -> int:
    """Return the resident bytes that are the process's own: neither of files nor shared.

    They are counters of the kernel. Adding up the pages instead (`memory_full_info`) locks the memory map of the
    process for up to 30 ms, and a process that needs memory meanwhile waits: its streams would show that.
    """
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


class Sampler:
    """Resident bytes and processor seconds of a server by role, taken five times a second in a thread.

    Finding the processes takes milliseconds of processor time, so the thread runs in the idle class (SCHED_IDLE).
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._cpu: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
        while not self._over.is_set():
            self.take()
            self._over.wait(SAMPLE)

    def take(self) -> dict[str, int]:
        """Take a sample."""
        sizes: Counter[str] = Counter()
        for pid, (_, role) in self.server.family().items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                sizes[role] += _memory(process)
                times = process.cpu_times()
                self._cpu[pid] = (role, times.user + times.system)
        self.samples.append((time.monotonic(), dict(sizes)))
        return dict(sizes)

    def cpu(self) -> Counter[str]:
        """Return CPU seconds so far, including those of processes that ended."""
        seconds_by_role: Counter[str] = Counter()
        for role, seconds in list(self._cpu.values()):
            seconds_by_role[role] += seconds  # type: ignore[assignment]
        return seconds_by_role

    def window(self, begin: float, end: float) -> dict[str, list[int]]:
        """Return the memory [before, peak, after] in MiB by role."""
        return memory_window(list(self.samples), begin, end)

    def stop(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join(5)


def last_log_lines(server: Server, count: int = 5) -> list[str]:
    """Return the last lines of the log except those of requests."""
    lines: list[Any] = server.log.read_text(errors="replace").splitlines()
    return [line for line in lines if "llmc.request" not in line][-count:]
