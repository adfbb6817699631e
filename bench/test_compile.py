"""Time and memory of compiling. Every compile is a fresh process; each test states what its caches contain.

Memory is anonymous memory (RssAnon) of the whole process tree, sampled 20 times a second: mapped files do not count.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import shapes
from bench.kit import BUILD, Ran, clock, median, record, run, table

GIB = 1 << 30
ROUNDS = 3
LLMC = (sys.executable, "-m", "llmc.cli")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    path = BUILD / "scratch"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def compiled(model: Path, out: Path, cache: Path) -> tuple[Ran, dict[str, float]]:
    """Compile in a fresh process; return its time and memory, and the seconds of the stages."""
    ran = run([*LLMC, "compile", str(model), "-o", str(out), "--force", "--cache", str(cache)])
    stages = [line[1:].split("s]") for line in ran.output.splitlines() if line.startswith("[")]
    return ran, {rest.split(":")[0].strip(): float(seconds) for seconds, rest in stages}


def stage_text(stages: dict[str, float]) -> str:
    return ", ".join(f"{k} {v:.1f}" for k, v in stages.items())


@pytest.mark.benchmark(timer=clock, group="compile")
def test_trace_and_pipeline_of_an_8b(benchmark: Any) -> None:
    """Trace Llama-3.1-8B's configuration and run all passes without weights, including the start of the process."""
    model = shapes.folder(shapes.LLAMA31_8B, BUILD)
    ran = [run([sys.executable, "-m", "bench.stages", str(model)]) for _ in range(ROUNDS)]
    seconds = [r.seconds for r in ran]
    stages = json.loads(sorted(ran, key=lambda r: r.seconds)[ROUNDS // 2].output.splitlines()[-1])
    t = table("Trace and pipeline without weights, Llama-3.1-8B", "median s", "target s", "CPU s", "stages", "peak GiB")
    parts = stage_text({k: stages[k] for k in ("import", "trace", "passes")})
    used, peak = median([r.cpu_seconds for r in ran]), max(r.peak for r in ran)
    t.add(f"{median(seconds):.1f}", 30, f"{used:.1f}", f"{parts}; {stages['nodes']} nodes", f"{peak / GIB:.2f}")
    slow = sorted(((v, k[5:]) for k, v in stages.items() if k.startswith("pass ")), reverse=True)[:5]
    t.notes.append("slowest passes: " + ", ".join(f"{k} {v:.2f} s" for v, k in slow))
    record(benchmark, seconds, target_seconds=30, peak_bytes=peak, stages=stages)


@pytest.mark.benchmark(timer=clock, group="compile")
@pytest.mark.parametrize("cached", (False, True), ids=("from-nothing", "from-the-cache"))
def test_compile_half_a_billion(benchmark: Any, scratch: Path, cached: bool) -> None:
    """Compile Qwen2.5-0.5B's shape to an artifact, with an empty cache and with the cache of an equal artifact."""
    model, cache, out = shapes.checkpoint(shapes.QWEN25_05B, BUILD), scratch / "cache", scratch / "q.llmc"
    runs = []
    if cached:
        compiled(model, out, cache)
    for _ in range(ROUNDS):
        if not cached:
            shutil.rmtree(cache, ignore_errors=True)
        runs.append(compiled(model, out, cache))
        assert ("reuse" in runs[-1][1]) == cached, "the cache did not do what this bench is about"
    seconds = [r.seconds for r, _ in runs]
    case, target = ("an equal artifact in the cache", 5) if cached else ("nothing cached", 90)
    t = table(
        f"Compile {shapes.QWEN25_05B.name} bf16, {case}", "median s", "target s", "CPU s", "stages (last)", "peak GiB"
    )
    used, peak = median([r.cpu_seconds for r, _ in runs]), max(r.peak for r, _ in runs)
    t.add(f"{median(seconds):.1f}", target, f"{used:.1f}", stage_text(runs[-1][1]), f"{peak / GIB:.2f}")
    record(benchmark, seconds, target_seconds=target, peak_bytes=peak, stages=runs[-1][1])


@pytest.mark.benchmark(timer=clock, group="compile")
def test_memory_of_a_big_checkpoint(benchmark: Any, scratch: Path) -> None:
    """Peak anonymous memory of compiling a checkpoint several times as large as 2 GiB and its largest tensor."""
    shape = shapes.LLAMA31_8B
    if shutil.disk_usage(scratch).free < 5 * shape.parameters:
        pytest.skip(f"needs {5 * shape.parameters / GIB:.0f} GiB of disk for a while")
    model = shapes.checkpoint(shape, scratch)
    ran, stages = compiled(model, scratch / "big.llmc", scratch / "cache-big")
    limit = 2 * GIB + shape.largest
    t = table(
        f"Memory of compiling {shape.name} ({2 * shape.parameters / GIB:.2f} GiB of bf16)",
        "peak GiB", "limit GiB (2 + largest tensor)", "checkpoint / limit", "s", "stages",
    )  # fmt: skip
    times = 2 * shape.parameters / limit
    t.add(f"{ran.peak / GIB:.2f}", f"{limit / GIB:.2f}", f"{times:.1f}", f"{ran.seconds:.1f}", stage_text(stages))
    record(benchmark, [ran.seconds], peak_bytes=ran.peak, limit_bytes=limit, stages=stages)
