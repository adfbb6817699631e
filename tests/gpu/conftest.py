"""What the GPU tests need to be collected anywhere: the marker `gpu`, a skip with its reason, one card a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu.launcher import Card

from bench.gpu.card import why_no_gpu

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exact-buffers", action="store_true", help="one allocation a buffer, for compute-sanitizer")
    parser.addoption("--sample", type=int, default=1, metavar="N", help="run every Nth kernel case alone")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU and its driver")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [i for i in items if HERE in i.path.parents and i.get_closest_marker("gpu")]
    why = why_no_gpu() if marked else None
    for item in marked:
        if why:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))


@pytest.fixture(scope="session")
def card(request: Any) -> Iterator[Card]:
    yield Card(exact=request.config.getoption("--exact-buffers", default=False))
