"""The GPU benches as pytest-benchmark suites; `python -m bench.gpu` runs the same measurements within a time limit.

pytest bench/gpu --benchmark-only -m gpu [-k "decode and qwen3"]     the unit of the statistics is that of the row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.gpu.engine import BATCHES, OFFLINE, PROMPTS, TRACED, Session
from bench.gpu.floors import H200
from bench.gpu.kernels import Load, kernel_rows
from bench.gpu.make import artifact, packed
from bench.gpu.plan import DEFAULT_MODELS, MODELS, Plan
from bench.gpu.rows import Rows
from bench.gpu.start import start_row
from bench.kit import clock, record
from bench.shapes import Shape

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark(timer=clock)]
Open = Callable[[Shape], Session]
each_model = pytest.mark.parametrize("shape", [MODELS[n] for n in DEFAULT_MODELS.split(",")], ids=lambda s: s.name)


@each_model
@pytest.mark.parametrize("batch", BATCHES)
def test_decode(shape: Shape, batch: int, session: Open, keep: Any) -> None:
    keep(session(shape).decode(batch))


@each_model
@pytest.mark.parametrize("length", PROMPTS)
def test_prefill(shape: Shape, length: int, session: Open, keep: Any) -> None:
    keep(session(shape).prefill(length))


@each_model
def test_offline(shape: Shape, session: Open, keep: Any) -> None:
    keep(session(shape).offline(*OFFLINE))


@each_model
@pytest.mark.parametrize("batch", TRACED)
def test_host(shape: Shape, batch: int, plan: Plan, keep: Any) -> None:
    session = Session(artifact(plan, shape), shape, H200, plan.out / f"trace-{shape.name}.json")
    keep(session.host(batch))
    session.close()


@each_model
@pytest.mark.parametrize("batch", (1, 32))
def test_kernels(shape: Shape, batch: int, plan: Plan, rows: Rows, benchmark: Any) -> None:
    measured = list(kernel_rows(artifact(plan, shape), shape, Load(batch), H200))
    for row in measured:
        rows.add(row)
    record(benchmark, [measured[-1].measured], rows=[r.json() for r in measured])


@each_model
def test_mixed(shape: Shape, plan: Plan, rows: Rows, benchmark: Any) -> None:
    measured = list(kernel_rows(artifact(plan, shape), shape, plan.mixed, H200))
    for row in measured:
        rows.add(row)
    record(benchmark, [measured[-1].measured], rows=[r.json() for r in measured])


@each_model
def test_start(shape: Shape, plan: Plan, keep: Any) -> None:
    keep(start_row(packed(plan, shape), shape))
