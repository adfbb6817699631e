"""Options of the attacks: `--attacks full` for their full strength, `--attack-seed N` to repeat a run; the fuzzer's
`--fuzz-seconds S` and `--fuzz-only WORKER.NUMBER,...`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("starlette")
from draw import left_out

from tests.attacks.target import TOOLS, Target, target

KEYS, ADMIN = ("first-secret-key", "second-secret-key"), "admin-secret-key"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attacks", choices=("sample", "full"), default="sample")
    parser.addoption("--attack-seed", type=int, default=None)
    corners = "share of the attacks of rows 13 and 14 of bench.attacks that full strength includes"
    parser.addoption("--corner-share", type=float, default=1.0, metavar="X", help=corners)
    parser.addoption("--fuzz-seconds", type=float, default=None, help="how long the fuzzer sends requests")
    parser.addoption("--fuzz-only", default=None, metavar="W.N,...", help="send these requests of its workers alone")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make attacks` runs every attack; other runs draw a quarter of them, each with a sample of its requests."""
    item.add_marker("drawn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip a random part of the corner cases; --corner-share sets its size."""
    corners = [item.nodeid for item in items if item.nodeid.partition("[")[0].endswith("::test_24_corners")]
    out = left_out(corners, option(config, "--corner-share", 1.0))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def option(config: pytest.Config, name: str, other: Any) -> Any:
    value = config.getoption(name, None)  # unknown where this folder was not named on the command line
    return other if value is None else value


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether the attacks come at full strength."""
    return bool(option(pytestconfig, "--attacks", "sample") == "full")


@pytest.fixture
def full_only(full: bool) -> None:
    """For what takes too long in a sample."""
    if not full:
        pytest.skip("at full strength alone: make attacks")


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Of the whole run."""
    return int(option(pytestconfig, "--attack-seed", int.from_bytes(os.urandom(4), "big")))


@pytest.fixture
def draw(seed: int, request: pytest.FixtureRequest) -> Random:
    """Random numbers of one test; a failure shows the seed."""
    print(f"--attack-seed {seed}")
    return Random(f"{seed} {request.node.name}")


@pytest.fixture
def times(full: bool) -> Callable[[int, int], int]:
    """times(sample, full): how often."""
    return lambda some, all: all if full else some


@pytest.fixture(scope="session")
def server() -> Iterator[Target]:
    """One server for all attacks of a process, with keys; at the end it is as it was."""
    options = "--max-num-seqs", "8", "--max-num-queued-reqs", "64", "--response-store-bytes", "1MiB", *TOOLS
    with target(*options, keys=KEYS, admin=[ADMIN]) as one:
        one.steady("its start")
        yield one
        one.steady("everything")
        one.at_rest()


@pytest.fixture
def steady(server: Target, request: pytest.FixtureRequest) -> Iterator[Target]:
    """The server; after the test, its state is checked (`Target.steady`), and all connections are closed."""
    server.steady(f"before {request.node.name}")
    yield server
    server.steady(request.node.name)
    server.at_rest(fresh=False)
