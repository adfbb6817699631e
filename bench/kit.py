"""Shared parts of the benches: the machine's ceilings, contenders as processes, memory of a process tree, tables.

Every figure is taken between figures of its peers and its limit (B A A B), and medians are compared.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from llmc.codegen.backends.cpp.cpp_kernel import inline_headers
from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.kernel import Source
from llmc.targets import cpu_targets

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD = ROOT / "build" / "bench"
THREADS = len(os.sched_getaffinity(0))
LLAMACPP = BUILD / "llamacpp" / "bin" / "python"


class Ceilings:
    """This machine's read bandwidth (bytes/s, 256 MiB on all threads) and bf16 multiply-add rate (flop/s) right now."""

    def __init__(self) -> None:
        target = cpu_targets.native()
        unit = Source("ceilings", "cpp", inline_headers((HERE / "ceilings.cpp").read_text()))
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "ceilings.so"
            toolchain = CppToolchain.find(target)
            path.write_bytes(toolchain.compile([(unit, "")], Path(scratch))[toolchain.key(unit)].binary)
            self.lib = ctypes.CDLL(str(path))
        self.lib.bench_read.restype = self.lib.bench_peak_bf16.restype = ctypes.c_double
        self.memory = np.ones(256 << 20, np.uint8)

    def bandwidth(self, times: int = 1) -> float:
        """Measure the read bandwidth of `times` consecutive sweeps: one shows the peak, many the sustained rate."""
        at, size = ctypes.c_void_p(self.memory.ctypes.data), ctypes.c_int64(self.memory.nbytes)
        return times / sum(1 / float(self.lib.bench_read(at, size, THREADS)) for _ in range(times))

    def flops(self) -> float:
        return float(self.lib.bench_peak_bf16(THREADS))


class Contender:
    """A process that generates on request (bench/contender.py); idle while others run."""

    def __init__(self, kind: str, model: Path, python: Path | str = sys.executable, core: int | None = None) -> None:
        self.kind = kind
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}", "TOKENIZERS_PARALLELISM": "false"}
        command = [str(python), "-m", "bench.contender", kind, str(model), *([] if core is None else [str(core)])]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        hello = self._answer()
        self.version, self.load_seconds = str(hello["version"]), float(hello["seconds"])
        self.warm_seconds = 0.0

    def generate(self, prompt: Sequence[int], new: int) -> tuple[list[int], float]:
        """Generate `new` greedy tokens after the prompt; return them and the seconds."""
        assert self.process.stdin is not None
        print(json.dumps({"prompt": list(prompt), "new": new}), file=self.process.stdin, flush=True)
        answer = self._answer()
        tokens = [int(i) for i in answer["tokens"]]
        assert len(tokens) == new, f"{self.kind}: {len(tokens)} tokens of {new}"
        return tokens, float(answer["seconds"])

    def seconds(self, prompt: Sequence[int], new: int) -> float:
        return self.generate(prompt, new)[1]

    def warm(self, first: Callable[[], object]) -> None:
        """Warm up; the seconds go to `warm_seconds`."""
        begin = time.perf_counter()
        first()
        self.warm_seconds += time.perf_counter() - begin

    @property
    def readiness(self) -> str:
        return f"{self.load_seconds:.1f} + {self.warm_seconds:.1f}"

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.kind} ended: {self.log.read()[-800:]}")
        return dict(json.loads(line))


def interleave(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every measurement `rounds` times, alternating between forward and backward order (B A A B)."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for i in range(rounds):
        for name in list(measures) if i % 2 == 0 else list(measures)[::-1]:
            seconds[name].append(measures[name]())
    return seconds


median = statistics.median


def anonymous_bytes(process: psutil.Process) -> int:
    """Return the RssAnon of a process and its children: memory that no file backs."""
    total = 0
    for p in [process, *process.children(recursive=True)]:
        try:
            text = Path(f"/proc/{p.pid}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:"))
    return total


@dataclass
class Ran:
    """A finished command: wall seconds, user + system seconds, and the peak of its tree's anonymous memory in bytes."""

    seconds: float
    cpu_seconds: float
    peak: int
    output: str


def run(command: Sequence[str], env: dict[str, str] | None = None, sample: float = 0.05) -> Ran:
    """Run a command to its end in a fresh process, sampling memory. Raises RuntimeError if it fails."""
    peak = [0]
    ended = threading.Event()
    full = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"} | (env or {})
    before, begin = os.times(), time.perf_counter()
    process = psutil.Popen(
        list(command), cwd=ROOT, env=full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def watch() -> None:
        while not ended.wait(sample):
            try:
                peak[0] = max(peak[0], anonymous_bytes(process))
            except psutil.NoSuchProcess:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - begin
    ended.set()
    watcher.join()
    after = os.times()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {output[-800:]}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Ran(seconds, used, peak[0], output)


@dataclass
class Table:
    """A titled table; conftest prints all tables at the end of a session and stores them with the JSON."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(tuple(str(c) for c in cells))

    def text(self) -> str:
        """Return the table in Markdown."""
        rule = tuple("-" * 3 for _ in self.columns)
        lines = [f"| {' | '.join(r)} |" for r in (self.columns, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, *(f"\n{n}" for n in self.notes)])


TABLES: list[Table] = []


def table(title: str, *columns: str) -> Table:
    """Create a table of this session."""
    table = Table(title, columns)
    TABLES.append(table)
    return table


def machine() -> str:
    """Describe this machine, including its load, in one line."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((x.partition(":")[2].strip() for x in text.splitlines() if x.startswith("model name")), "")
    memory = psutil.virtual_memory().total / 2**30
    load = os.getloadavg()[0]
    return f"{THREADS} x {model or platform.machine()}, {memory:.0f} GiB, load {load:.1f}"


_measured = [0.0]


def clock() -> float:
    """The timer of benches whose seconds are measured in another process (see `record`)."""
    return _measured[0]


def record(benchmark: Any, seconds: Sequence[float], **extra: object) -> None:
    """Add seconds measured elsewhere to pytest-benchmark's statistics; the test is marked benchmark(timer=clock)."""
    values = iter(seconds)

    def advance() -> None:
        _measured[0] += next(values)

    benchmark.extra_info.update(extra)
    benchmark.pedantic(advance, rounds=len(seconds), iterations=1)
