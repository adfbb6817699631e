"""Run all GPU benches: progress lines, rows saved as they are measured, and tables at the end.

    python -m bench.gpu --out DIR [--artifacts DIR] [--models A,B] [--suites A,B] [--limit SECONDS] ...

DIR gets rows.jsonl (while it runs), results.json, tables.md and log.txt. Each model's part runs in a separate process:
a failure is reported and the others continue.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu.card import state, why_no_gpu
from bench.gpu.make import artifacts
from bench.gpu.plan import Plan, parser, plan_of
from bench.gpu.rows import Row, Rows, read, tables
from bench.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
LEAST = 20.0  # seconds that must remain to start another part


class Run:
    """One run: its time limit, its log, and the options that it shares with its workers."""

    def __init__(self, plan: Plan, argv: list[str]) -> None:
        self.plan, self.argv = plan, argv
        self.begin = time.monotonic()
        self.rows = Rows(plan.out)
        self.failed: list[str] = []

    @property
    def remaining(self) -> float:
        return self.plan.limit - (time.monotonic() - self.begin)

    def log_line(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

    def child(self, name: str, command: list[str]) -> str:
        """Run a module of this repository within the remaining time; print and return its output."""
        self.log_line(f"{name} ({state()})")
        paths = [str(ROOT), str(ROOT / "runtime"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = []
        try:
            for text in _lines(process, self.remaining):
                lines.append(text)
                print(text, end="", flush=True)
            code = process.wait(30)
        except TimeoutError:
            process.kill()
            process.wait()
            code = -1
        output = "".join(lines)
        with (self.plan.out / "log.txt").open("a") as log:
            log.write(f"== {name}: {code}\n{output}{state()}\n")
        if code:
            self.failed.append(f"{name}: {'out of time' if code == -1 else _reason(output)}")
            self.log_line(f"failed: {self.failed[-1]}")
        return output

    def ceilings(self) -> dict[str, Any]:
        """Measure the card's ceilings, as rows too; None without torch (the known ones are used then)."""
        output = self.child("ceilings", ["bench.gpu.ceilings"])
        ceilings = next((json.loads(x) for x in output.splitlines() if x.startswith("{")), {})
        if ceilings:
            name = ceilings["device"]
            for case, unit in (("read", "TB/s"), ("copy", "TB/s"), ("product", "TFLOP/s")):
                self.rows.add(Row("ceilings", name, case, unit, ceilings[case] / 1e12))
            self.rows.add(Row("ceilings", name, "graph node", "us", ceilings["node_us"]))
        return ceilings

    def parts(self) -> Iterator[tuple[str, Shape]]:
        """Yield (part, model): the part `engine` of all models, then host, kernels, mixed and start."""
        suites = set(self.plan.suites)
        engine = ("engine", suites & {"decode", "contexts", "prefill", "offline"})
        for part, some in [engine, *((s, suites & {s}) for s in ("host", "kernels", "mixed", "start"))]:
            yield from ((part, shape) for shape in self.plan.models if some)

    def all(self) -> None:
        roof = json.dumps(self.ceilings())
        if missing := [s.name for s in self.plan.models if not (self.plan.artifact(s) / "manifest.json").is_file()]:
            self.child(f"compiling {', '.join(missing)}", ["bench.gpu", *self.argv, "--compile-only"])
        for part, shape in self.parts():
            if self.remaining < LEAST:
                self.failed.append(f"{part} of {shape.name}: no time left")
                continue
            self.child(f"{part} of {shape.name}", ["bench.gpu.worker", part, shape.name, roof, *self.argv])
            self.write()

    def write(self) -> None:
        """Write results.json and tables.md from all rows in the folder."""
        rows = read(self.rows.path)
        text = tables(rows) + "".join(f"\nFailed: {x}\n" for x in self.failed)
        (self.plan.out / "tables.md").write_text(text)
        doc = {"rows": [r.json() for r in rows], "failed": self.failed}
        (self.plan.out / "results.json").write_text(json.dumps(doc, indent=1) + "\n")


def _lines(process: subprocess.Popen[str], seconds: float) -> Iterator[str]:
    """Yield the lines that a process prints; raises TimeoutError after the time limit."""
    lines: queue.Queue[str] = queue.Queue()
    stream = process.stdout
    assert stream is not None

    def pump() -> None:
        for text in stream:
            lines.put(text)
        lines.put("")

    threading.Thread(target=pump, daemon=True).start()
    end = time.monotonic() + seconds
    while True:
        try:
            text = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if not text:
            return
        yield text


def _reason(output: str) -> str:
    """Return the last line that is not empty."""
    return next((x.strip() for x in reversed(output.splitlines()) if x.strip()), "no output")


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    plan = plan_of(args)
    if args.compile_only:
        artifacts(plan)
        return 0
    if why := why_no_gpu():
        print(f"no GPU: {why}", file=sys.stderr)
        return 3
    run = Run(plan, argv)
    run.all()
    run.write()
    print((plan.out / "tables.md").read_text())
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
