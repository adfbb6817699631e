"""Requests of `bench.attacks`, rows 11 to 14 and 16: each is answered or refused, and releases its resources."""

from __future__ import annotations

import time

import pytest

from bench.attacks import further
from bench.attacks.corner_rows import connections, grammars, sampling, stores, texts
from bench.attacks.further_rows import refused_work, valid_work
from bench.attacks.link import Door
from bench.attacks.reader_rows import readers
from tests.attacks.conftest import KEYS
from tests.attacks.target import Target

ANSWERED = {200, 400, 404, 413, 414, 429, 431, 503}
DROPPED = ("dropped", "slow readers")  # attacks that do not read the answers
LIMIT = 30.0  # seconds
GROWTH = 256 << 20  # bytes


@pytest.mark.parametrize("name", [*valid_work(), *refused_work()])
def test_24_repeated(steady: Target, name: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(further, "SECONDS", 4.0 if full else 0.5)
    before = steady.memory()
    door = Door(steady.host, steady.port, KEYS[1], time.monotonic() + LIMIT)
    statuses = {answer.status for answer in {**valid_work(), **refused_work()}[name](door)}
    if any(word in name for word in DROPPED):
        assert statuses == {0}
    else:
        assert statuses and statuses <= ANSWERED
        assert 200 in statuses or name in refused_work() or statuses <= {400, 429, 503}
    assert steady.memory() - before < GROWTH


CORNERS = {name: make for made in (grammars, texts, sampling, stores, connections) for name, make in made().items()}
UNANSWERED = ("nobody reads", "unread", "trickle", "reset", "half-closed")


@pytest.mark.parametrize("name", CORNERS)
def test_24_corners(steady: Target, name: str, full_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second each: none ends the server, has an unexpected status, or leaks memory."""
    monkeypatch.setattr(further, "SECONDS", 0.5)
    before = steady.memory()
    door = Door(steady.host, steady.port, KEYS[1], time.monotonic() + LIMIT)
    statuses = {answer.status for answer in CORNERS[name](door)}
    if any(word in name for word in UNANSWERED):
        assert statuses <= {0, 200, 400, 408, 429, 503}
    else:
        assert statuses and statuses <= ANSWERED | {100, 403, 408, 504}
    assert steady.memory() - before < GROWTH


@pytest.mark.parametrize("name", readers())
def test_24_slow_readers(steady: Target, name: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connections are open to the end, and hold neither memory nor places in the queue of others."""
    monkeypatch.setattr(further, "SECONDS", 4.0 if full else 0.5)
    before = steady.memory()
    readers()[name](Door(steady.host, steady.port, KEYS[1], time.monotonic() + LIMIT))
    assert steady.memory() - before < GROWTH
    reply = steady.ask("/v1/completions", {"prompt": "x", "n": 16, "max_tokens": 1})
    assert reply.status == 200, reply
