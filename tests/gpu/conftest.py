"""Options and fixtures of the GPU tests; without a GPU they are collected and skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu.launcher import Card

from bench.gpu.card import skip_without_gpu

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exact-buffers", action="store_true", help="one allocation per buffer, for compute-sanitizer")
    parser.addoption("--sample", type=int, default=1, metavar="N", help="run only every Nth kernel case")
    parser.addoption(
        "--every-thread-arrives", action="store_true", help="set the constant of hopper.cuh, for racecheck"
    )
    parser.addoption("--all-trials", action="store_true", help="all models with forced kernels, not a sample of them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_gpu(items, HERE)


@pytest.fixture(scope="session")
def card(request: Any) -> Iterator[Card]:
    options = request.config.getoption
    yield Card(
        exact=options("--exact-buffers", default=False), sample=options("--sample", default=1),
        every_thread_arrives=options("--every-thread-arrives", default=False),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def current(request: pytest.FixtureRequest) -> None:
    """Tests that use the card find its context current, whatever ran before."""
    if "card" in request.fixturenames:
        request.getfixturevalue("card").enter()
