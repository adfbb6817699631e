"""`llmc bench start`: the time from process start to the first token, by stage, in a fresh process each time."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmc_runtime.bench import engine_arguments
from llmc_runtime.bench.table import Line
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.python_command import module_command

STAGES = ("interpreter", "modules", "opening", "first token")
LINES = (
    *(Line(f"{stage}, s", stage, ".3f") for stage in STAGES), Line("start to first token, s (median)", "median", ".3f"),
    Line("fastest, s", "min", ".3f"), Line("slowest, s", "max", ".3f"), Line("first process, s", "first", ".3f"),
)  # fmt: skip


def run(args: argparse.Namespace, err: IO[str]) -> dict[str, Any]:
    """Run the measurement and return the report.

    The first run, for which the page cache may be cold, is reported separately. Raises LlmcError E670, E672, and the
    errors of opening a model.
    """
    from llmc_runtime.api.llm import resolve

    engine_arguments.counts(args, "num_iters", "input_len")
    engine = engine_arguments.options(args, err)
    say, cache = engine.pop("say"), engine.pop("cache_dir")
    model = resolve(args.model, {"target": args.target or "cpu:native", "dtype": "auto"}, cache, say)
    llm_args = {**engine, "model": str(Path(model).resolve()), "input_len": args.input_len}
    say(f"starting {args.num_iters + 1} processes, one after another, with {model}")
    runs = []
    for number in range(args.num_iters + 1):
        runs.append(once(llm_args))
        if not args.disable_tqdm:
            run_name = "first run" if not number else f"{number} of {args.num_iters}"
            print(f"llmc: {run_name}: {runs[-1]['seconds']:.3f} s", file=err, flush=True)
    first, *measured = runs
    totals = [run["seconds"] for run in measured]

    def median(stage: str) -> float:
        return float(np.median([run[stage] for run in measured]))

    return {
        **{stage: median(stage) for stage in STAGES},
        "median": median("seconds"), "min": min(totals), "max": max(totals), "first": first["seconds"], "all": runs,
    }  # fmt: skip


def once(llm_args: dict[str, Any]) -> dict[str, float]:
    """Return the "seconds" from starting a process to its first token, and those of each stage.

    Raises LlmcError E672 if the process exits before.
    """
    command = module_command("llmc_runtime.bench.cold_start_child")
    start = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(llm_args) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        process.communicate()
    result = json.loads(line or "{}")
    if "error" in result:
        code, cause, remedy = result["error"]
        raise LlmcError(code, cause, remedy)
    if "seconds" not in result:
        raise LlmcError("E672", f"the process ended with code {process.returncode}", "see its messages on stderr")
    stages: dict[str, float] = result["seconds"]
    return {"seconds": seconds, "interpreter": seconds - sum(stages.values()), **stages}


def arguments(add: Any) -> None:
    """Declare the options: the number of runs, and the prompt."""
    add("--num-iters", type=int, default=5, metavar="N", help="number of measured processes, after a warm-up (5)")
    add("--input-len", type=int, default=32, metavar="N", help="length of the prompt in tokens (32)")
    add("--disable-tqdm", action="store_true", help="print no progress")
