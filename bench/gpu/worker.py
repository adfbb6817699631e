"""Run one model's suites in a separate process, so that a CUDA error does not end other suites; see __main__."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from bench.gpu import engine
from bench.gpu.floors import H200, Roof
from bench.gpu.kernels import Load, kernel_rows
from bench.gpu.make import artifact, packed
from bench.gpu.plan import MODELS, Plan, parser, plan_of
from bench.gpu.rows import Row, Rows
from bench.gpu.start import start_row
from bench.shapes import Shape


def rows_of(plan: Plan, shape: Shape, part: str, roof: Roof) -> Iterator[Row]:
    """Yield the rows of one part of a model: engine, host, kernels, mixed or start."""
    if part == "engine":
        session = engine.Session(artifact(plan, shape), shape, roof, sequences=plan.sequences)
        print(f"  opened in {session.open_seconds:.1f} s: {'; '.join(session.log_lines)}", flush=True)
        try:
            yield from engine.measure(session, plan)
        finally:
            session.close()
    elif part == "host":
        session = engine.Session(artifact(plan, shape), shape, roof, plan.out / f"trace-{shape.name}.json")
        try:
            yield from map(session.host, engine.TRACED)
        finally:
            session.close()
    elif part == "kernels":
        for batch in plan.kernel_batches:
            load = Load(batch, temperature=plan.temperature)
            yield from kernel_rows(artifact(plan, shape), shape, load, roof)
    elif part == "mixed":
        yield from kernel_rows(artifact(plan, shape), shape, plan.mixed, roof)
    else:
        yield start_row(packed(plan, shape), shape)


def main(argv: list[str]) -> None:
    """Run the command: WHAT MODEL ROOF, followed by the options of the run."""
    part, model, roof, *rest = argv
    plan = plan_of(parser().parse_args(rest))
    rows = Rows(plan.out)
    for row in rows_of(plan, MODELS[model], part, roof_of(json.loads(roof))):
        rows.add(row)


def roof_of(ceilings: dict[str, Any]) -> Roof:
    """Return the measured ceilings, or the known ones of an H200 if those are larger and the card is one."""
    if not ceilings:
        return H200
    measured = Roof(float(ceilings["read"]), float(ceilings["product"]))
    if "H200" not in str(ceilings.get("device", "")):
        return measured
    return Roof(max(measured.read, H200.read), max(measured.product, H200.product))


if __name__ == "__main__":
    main(sys.argv[1:])
