"""Server processes, loads on them, and the CPU time of each process."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil
from llmc_runtime.bench.command import parser, run

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A running server: its port, and the CPU seconds of its processes so far."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port, self._process = port, psutil.Process(process.pid)

    def cpu(self) -> dict[str, float]:
        """CPU seconds of the front end, and of the engine if there is one."""
        processes = dict(zip(("front", "engine"), (self._process, *self._process.children())))
        return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


@contextmanager
def server(module: str, *arguments: object) -> Iterator[Server]:
    """Run `python -m module arguments`, which prints its address to standard error."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime")])
    with TemporaryFile("w+") as stderr_file:
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stderr=stderr_file) as process:
            try:
                while not (match := re.search(r"http://127\.0\.0\.1:(\d+)", _read(stderr_file))):
                    assert process.poll() is None, _read(stderr_file)
                    time.sleep(0.05)
                yield Server(process, int(match[1]))
            finally:
                process.terminate()


def _read(stderr_file: IO[str]) -> str:
    stderr_file.seek(0)
    return stderr_file.read()


def load(target: Server, *options: object) -> dict[str, Any]:
    """Return the report of `llmc bench serve`, with microseconds of CPU time per token of each process."""
    words = ["serve", "--port", str(target.port), "--json", "--disable-tqdm", "--ignore-eos", *map(str, options)]
    before, out = target.cpu(), io.StringIO()
    code = run(parser().parse_args(words), {}, out, sys.stderr)
    report: dict[str, Any] = json.loads(out.getvalue())
    assert code == 0, report["errors"]
    tokens = max(report["total_output_tokens"], 1)
    after = target.cpu()
    report["cpu_us_per_token"] = {name: 1e6 * (after[name] - before[name]) / tokens for name in before}
    busy = report["client"]["busiest_process"] * report["duration"]
    report["cpu_us_per_token"]["client"] = 1e6 * busy / tokens
    return report
