"""Start-up: process start to the first token, on real files that the compiler wrote from a random checkpoint."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.rows import Row, engine_row
from bench.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]


def start_row(artifact: Path, shape: Shape, rounds: int = 3) -> Row:
    """Return the median seconds from process start to the first token, with the weights in the page cache."""
    warmed = warm(artifact)
    once(artifact)
    starts = [once(artifact) for _ in range(rounds)]
    seconds = [s for s, _ in starts]
    middle = starts[seconds.index(statistics.median_low(seconds))]
    extra = {"all_s": seconds, "parts_s": middle[1], "weights_bytes": warmed}
    return engine_row("start", shape.name, "page cache", "s", statistics.median(seconds), None, **extra)


def warm(artifact: Path) -> int:
    """Read every file once; return the bytes of the weights."""
    total = 0
    for path in sorted(artifact.rglob("*")):
        if path.is_file():
            with path.open("rb") as f:
                while block := f.read(64 << 20):
                    total += len(block) if path.suffix == ".safetensors" else 0
    return total


def once(artifact: Path) -> tuple[float, dict[str, Any]]:
    """Return the seconds to the first token, and their parts as the process reports them."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"}
    command = [sys.executable, "-m", "bench.gpu.first", str(artifact)]
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - begin
    errors = process.stderr.read()
    assert process.wait() == 0 and line, f"{command} failed: {errors[-800:]}"
    return seconds, dict(json.loads(line)["seconds"])
