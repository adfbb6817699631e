"""Compare the times of a model compiled with --deterministic and of the ordinary one: decode at several batch sizes,
prompts, and many requests at once.

    python -m bench.gpu.deterministic [--model NAME] [--suites A,B] [--artifacts DIR] [--compile-only]      on a GPU

Weights are random and filled in by the runtime. Both artifacts are compiled first if they are missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import shapes
from bench.gpu.engine import OFFLINE, Session
from bench.gpu.floors import H200
from bench.gpu.make import SEED, with_weights
from bench.gpu.plan import MODELS, Plan, parser, plan_of
from bench.gpu.rows import Row
from bench.shapes import Shape

SUITES = ("decode", "prefill", "offline")
BATCHES, PROMPT = (1, 8, 32, 256), 2048
LONG = ((1, 2048), (1, 8192), (8, 2048))  # rows, tokens before them


def artifact(plan: Plan, shape: Shape, deterministic: bool) -> Path:
    """Return the artifact, compiling it if it is missing."""
    path = plan.artifacts / f"{shape.name}{'-deterministic' if deterministic else ''}.llmc"
    if not (path / "manifest.json").is_file():
        model = shapes.folder(shape, plan.artifacts)
        with_weights(plan, model, path, f"random:{SEED}", shape, deterministic=deterministic)
    return path


def measure(path: Path, shape: Shape, suites: Sequence[str], requests: int) -> list[Row]:
    """Return the milliseconds of decode steps, after short prompts and after long ones, and of prompts, and the output
    tokens per second of `requests` requests.
    """
    session, rows = Session(path, shape, H200), []
    try:
        if "decode" in suites:
            rows += [session.decode(b, 5 if b <= 32 else 3) for b in BATCHES]
            rows += [session.decode(b, 3, length) for b, length in LONG]
        if "prefill" in suites:
            rows += [session.prefill(PROMPT), session.prefill(4 * PROMPT)]
        if "offline" in suites:
            rows.append(session.offline(requests, *OFFLINE[1:]))
        return rows
    finally:
        session.close()


def ratio(ordinary: Row, deterministic: Row) -> float:
    """Return how much longer the deterministic artifact takes."""
    quotient = deterministic.measured / ordinary.measured
    return 1 / quotient if ordinary.unit.endswith("/s") else quotient


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODELS), metavar="NAME", help="(llama-3.1-8b)")
    ap.add_argument("--suites", default=",".join(SUITES), metavar="A,B", help=f"suites: {', '.join(SUITES)}")
    ap.add_argument("--requests", type=int, default=OFFLINE[0], metavar="N", help="of the offline suite (512)")
    ap.add_argument("--artifacts", type=Path, default=Path("build/bench/gpu/artifacts"), metavar="DIR",
                    help="folder of the two artifacts, and of compiled kernels")  # fmt: skip
    ap.add_argument("--compile-only", action="store_true", help="only compile the artifacts; needs no GPU")
    args = ap.parse_args()
    plan = replace(plan_of(parser().parse_args([])), artifacts=args.artifacts)
    shape = MODELS[args.model]
    paths = [artifact(plan, shape, deterministic) for deterministic in (False, True)]
    if args.compile_only:
        return
    ordinary, fixed = (measure(p, shape, args.suites.split(","), args.requests) for p in paths)
    print(f"{shape.name:>34}      ordinary  deterministic  time")
    for a, b in zip(ordinary, fixed, strict=True):
        case = f"{a.suite} {a.case}, {a.unit}"
        print(f"{case:>34}  {a.measured:12.3f}  {b.measured:13.3f}  {ratio(a, b):5.3f}", flush=True)


if __name__ == "__main__":
    main()
