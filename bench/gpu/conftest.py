"""Fixtures of the suites: rows, and one open model at a time. Without a GPU, tests marked `gpu` are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import kit
from bench.gpu.card import skip_without_gpu
from bench.gpu.engine import Session
from bench.gpu.floors import H200
from bench.gpu.make import artifact
from bench.gpu.plan import Plan, parser, plan_of
from bench.gpu.rows import Rows
from bench.shapes import Shape

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_gpu(items, HERE)


@pytest.fixture(scope="session")
def plan() -> Plan:
    """Return the default options of `python -m bench.gpu`."""
    return plan_of(parser().parse_args([]))


@pytest.fixture(scope="session")
def rows(plan: Plan) -> Rows:
    rows_table = Rows(plan.out)
    kit.TABLES.append(rows_table)  # type: ignore[arg-type]
    return rows_table


@pytest.fixture(scope="session")
def session(plan: Plan) -> Iterator[Callable[[Shape], Session]]:
    """Open a shape's artifact, and close the previous one."""
    sessions: list[Session] = []

    def of(shape: Shape) -> Session:
        if not sessions or sessions[-1].shape is not shape:
            while sessions:
                sessions.pop().close()
            sessions.append(Session(artifact(plan, shape), shape, H200))
        return sessions[-1]

    yield of
    while sessions:
        sessions.pop().close()


@pytest.fixture
def keep(benchmark: Any, rows: Rows) -> Callable[[Any], None]:
    """Add a row to the tables and to pytest-benchmark's JSON."""

    def put(row: Any) -> None:
        rows.add(row)
        kit.record(benchmark, [row.measured], row=row.json())

    return put
