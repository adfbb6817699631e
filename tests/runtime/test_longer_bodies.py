"""Longer bodies: one is parsed in an iteration of the event loop, and its request is made in another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.endpoint import _SHORT_BYTES, Endpoint
from llmc_runtime.server.fair_slots import FairSlots
from llmc_runtime.server.http.auth import Limits
from llmc_runtime.server.http.body_budget import Body, BodyBudget

from tests.runtime.test_server_head_turns import turns_of


def test_longer_bodies_are_parsed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one is parsed per iteration, and a key with many bodies does not delay another key's."""
    log: list[str] = []

    async def run() -> list[list[str]]:
        serving: Any = type("Serving", (), {"parsing": FairSlots(1, OSError)})()
        budget = BodyBudget(OSError)
        endpoint, laps = Endpoint(serving, Limits()), list[list[str]]()

        def parse(key: str, size: int) -> asyncio.Task[Any]:
            body = Body(budget, key)
            body.take(b" " * size)
            return asyncio.create_task(endpoint._in_turn(body, object, key, lambda fields: False))  # type: ignore[type-var]

        tasks = [parse("a", _SHORT_BYTES + 1) for _ in range(5)] + [
            parse("b", _SHORT_BYTES + 1),
            parse("c", _SHORT_BYTES),
        ]
        cancelled = parse("a", _SHORT_BYTES + 1)
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns_of(log, laps)
            cancelled.cancel()
        assert cancelled.cancelled() and not budget._bodies and not serving.parsing.waiting
        return [lap for lap in laps if lap]

    def small(self: Endpoint, body: Body, kind: Any, offload: Any) -> None:
        log.append(body.key)
        body.drop()

    monkeypatch.setattr(Endpoint, "_small", small)
    assert asyncio.run(run()) == [["a", "c"], ["a"], ["b"], ["a"], ["a"], ["a"]]


@pytest.mark.parametrize(("more", "expected"), [(0, [["parse", "make"]]), (1, [["parse"], ["make"]])])
def test_a_request_is_made_of_a_longer_body_in_another_iteration(
    more: int, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take milliseconds for a body with hundreds of messages."""
    log: list[str] = []

    async def run() -> list[list[str]]:
        serving: Any = type("Serving", (), {"parsing": FairSlots(1, OSError)})()
        endpoint, laps = Endpoint(serving, Limits()), list[list[str]]()
        body = Body(BodyBudget(OSError), "a")
        body.take(b" " * (_SHORT_BYTES + more))

        async def handle() -> None:
            assert await endpoint._in_turn(body, object, "a", lambda fields: False)  # type: ignore[type-var]
            log.append("make")

        task = asyncio.create_task(handle())
        while not task.done():
            await asyncio.sleep(0)
            turns_of(log, laps)
        return [lap for lap in laps if lap]

    monkeypatch.setattr(Endpoint, "_small", lambda *args: log.append("parse") or object())  # type: ignore[func-returns-value]
    assert asyncio.run(run()) == expected
