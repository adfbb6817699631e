"""Compare two checkouts of this repository in alternating runs on one GPU.

    python -m bench.gpu.compare OLD_CHECKOUT --artifacts DIR --old-artifacts DIR --out DIR [--rounds N] [--limit S]

Each round runs the parts of every model in both checkouts, in the order old, new and then new, old. Each run is a
separate process with the compiler and runtime of its checkout; the artifacts were compiled beforehand by each checkout
(`python -m bench.gpu --compile-only`). Both checkouts should be in one file system. DIR gets the rows of every run and
compare.md: medians and their ratio.

The part "first" measures process start to the first token with random weights. Bytecode is written, as an installed
package has it, and the first start of each checkout and model is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.gpu.plan import DEFAULT_MODELS
from bench.gpu.rows import Row, read

ROOT = Path(__file__).resolve().parents[2]
Key = tuple[str, str, str, str]  # suite, model, case, unit


@dataclass(frozen=True)
class Side:
    """One of the two checkouts and the artifacts that it compiled."""

    name: str
    checkout: Path
    artifacts: Path

    def run(self, part: str, model: str, out: Path, options: list[str], seconds: float) -> list[Row]:
        """Measure a part of a model (engine, first, start) and return its rows; a failed run returns what it wrote."""
        if part == "first":
            return self.first(model, seconds)
        command = [sys.executable, "-m", "bench.gpu.worker", part, model, "{}"]
        command += ["--artifacts", str(self.artifacts), "--out", str(out), *options]
        try:
            done = subprocess.run(command, cwd=self.checkout, env=self.environment(), timeout=seconds, check=False)
            if done.returncode:
                print(f"FAILED: {part} of {model} in the {self.name} checkout: exit {done.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"FAILED: {part} of {model} in the {self.name} checkout: out of time", flush=True)
        return read(out / "rows.jsonl")

    def first(self, model: str, seconds: float) -> list[Row]:
        """Return the seconds from process start to the first token as a row, or none if the process fails."""
        command = [sys.executable, "-m", "bench.gpu.first", str(self.artifacts / f"{model}.llmc")]
        begin = time.perf_counter()
        with subprocess.Popen(command, cwd=self.checkout, env=self.environment(), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            elapsed = time.perf_counter() - begin
            process.communicate(timeout=seconds)
        if not line:
            print(f"FAILED: first of {model} in the {self.name} checkout: exit {process.returncode}", flush=True)
            return []
        return [Row("first", model, "start to first token", "s", elapsed, extra=json.loads(line)["seconds"])]

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that imports this checkout, and writes bytecode."""
        site = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p and not Path(p).is_relative_to(ROOT)]
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return kept | {"PYTHONPATH": ":".join([str(self.checkout), str(self.checkout / "runtime"), *site])}


def runs(
    sides: tuple[Side, Side], parts: list[str], models: list[str], rounds: int
) -> Iterator[tuple[int, Side, str, str]]:
    """Yield (round, side, part, model) so that each side is first in every other round."""
    for number in range(rounds):
        for part in parts:
            for model in models:
                for side in sides[:: 1 if number % 2 == 0 else -1]:
                    yield number, side, part, model


def table(samples: dict[str, dict[Key, list[float]]]) -> str:
    """Return Markdown: the medians of both sides and new / old, as times or as rates."""
    lines = [
        "| suite | model | case | unit | old | new | new / old | runs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key in sorted(samples["old"].keys() & samples["new"].keys()):
        old, new = (statistics.median(samples[s][key]) for s in ("old", "new"))
        count = f"{len(samples['old'][key])} + {len(samples['new'][key])}"
        lines.append(f"| {' | '.join(key)} | {old:.4g} | {new:.4g} | {new / old:.3f} | {count} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    ap = argparse.ArgumentParser(prog="python -m bench.gpu.compare", description="Compare two checkouts on this GPU.")
    ap.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    ap.add_argument("--artifacts", type=Path, required=True, metavar="DIR", help="NAME.llmc compiled by this checkout")
    ap.add_argument(
        "--old-artifacts", type=Path, required=True, metavar="DIR", help="NAME.llmc compiled by OLD_CHECKOUT"
    )
    ap.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the rows of every run and compare.md"
    )
    ap.add_argument("--models", default=DEFAULT_MODELS, metavar="A,B")
    ap.add_argument("--parts", default="engine", metavar="A,B", help="engine (decode, prefill, offline), first, start")
    ap.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each checkout (3)")
    ap.add_argument("--limit", type=float, default=570, metavar="SECONDS", help="seconds of the whole comparison (570)")
    a, options = ap.parse_known_args()
    sides = (Side("old", a.old.resolve(), a.old_artifacts.resolve()), Side("new", ROOT, a.artifacts.resolve()))
    a.out.mkdir(parents=True, exist_ok=True)
    begin, samples = time.monotonic(), {s.name: defaultdict(list) for s in sides}
    if "first" in a.parts.split(","):
        for side, model in product(sides, a.models.split(",")):
            side.first(model, a.limit)
    for number, side, part, model in runs(sides, a.parts.split(","), a.models.split(","), a.rounds):
        remaining = a.limit - (time.monotonic() - begin)
        print(f"[{time.monotonic() - begin:6.1f} s] round {number}, {side.name}: {part} of {model}", flush=True)
        if remaining < 20:
            print("FAILED: out of time; the table holds fewer rounds", flush=True)
            break
        out = a.out.resolve() / f"{number}-{side.name}-{part}-{model}"
        for row in side.run(part, model, out, options, remaining):
            samples[side.name][row.suite, row.model, row.case, row.unit].append(row.measured)
        (a.out / "compare.md").write_text(table(samples))
    print((a.out / "compare.md").read_text(), flush=True)


if __name__ == "__main__":
    main()
