"""Requests that wait for their turn count as open requests of their key, and are refused while they wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.http import read_turns
from llmc_runtime.server.http.auth import Guard, key_id
from llmc_runtime.server.http.read_turns import MAX_CHECKED, HeadTurns

from tests.runtime.served import served, until
from tests.runtime.test_light_connections import REFUSED, begun, run, serving
from tests.runtime.test_server_shed import BODY, KEYS, PATH, Link, head, own_loop


class Waiting:
    """A connection that waits; `log` gets what becomes of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.paused = name, log, False

    def parse(self, data: bytes) -> None:
        self.log.append(f"{self.name} parsed")

    def refuse(self, data: bytes) -> None:
        assert not self.paused
        self.log.append(f"{self.name} refused")

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Stopped(HeadTurns):
    """No head has its turn."""

    def _may_begin(self, probe: bool) -> bool:
        return False


def turns(blocked: set[str], refused: list[str]) -> HeadTurns:
    """Turns in which the first letter of a head is its lane, and "post" in it means that it can be refused."""
    found = Stopped()
    found.lane_of, found.sheds = lambda data: data[:1].decode(), lambda data: b"post" in data
    found.blocked, found.refused = blocked.__contains__, refused.append
    return found


def test_waiting_requests_are_counted_by_lane_and_refused_once_it_is_blocked() -> None:
    async def main() -> None:
        log: list[str] = []
        blocked, refused = set[str](), list[str]()
        found = turns(blocked, refused)
        for name in ("a post", "a get", "b post", "a post 2"):
            found.begin(Waiting(name, log), name.encode())
        gone = Waiting("gone", log)
        found.begin(gone, b"b post")
        assert found.waiting == {"a": 2, "b": 2}
        found.leave(gone)
        await asyncio.sleep(0)
        assert found.waiting == {"a": 2, "b": 1} and not log
        blocked.add("a")
        await asyncio.sleep(0)
        assert log == ["a post refused", "a post 2 refused"] and refused == ["a", "a"] and found.waiting == {"b": 1}
        blocked.add("b")
        await asyncio.sleep(0)
        assert log[2:] == ["b post refused"] and not found.waiting

    asyncio.run(main())


def test_waiting_requests_are_refused_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of a lane per iteration, and none once the time of the iteration is over."""

    class Clock:
        now, step = 0.0, 0.0

        def monotonic(self) -> float:
            self.now += self.step
            return self.now

    async def main() -> None:
        log: list[str] = []
        found = turns({"a"}, [])
        for number in range(2 * MAX_CHECKED + 5):
            found.begin(Waiting(str(number), log), b"a post")
        seen = []
        while found.waiting:
            before = len(log)
            await asyncio.sleep(0)
            seen.append(len(log) - before)
        assert seen == [MAX_CHECKED, MAX_CHECKED, 5] and log == [f"{i} refused" for i in range(len(log))]
        clock.step = read_turns.HEAD_SECONDS / 3
        for number in range(9):
            found.begin(Waiting(str(number), log), b"a post")
        await asyncio.sleep(0)
        assert 0 < len(log) - sum(seen) < 4

    clock = Clock()
    monkeypatch.setattr(read_turns, "time", clock)
    asyncio.run(main())


def test_a_light_connection_is_refused_while_it_waits_and_stays_light() -> None:
    async def main() -> None:
        async with serving() as state:
            refusal, state.turns.held = state.refusal, True
            state.refusal = lambda head, last: None  # type: ignore[method-assign]
            state.turns.sheds = lambda data: b"no" in data
            clients = begun(state, [b"a no", b"b", b"c no close"])
            while sum(state.turns.waiting.values()) < 2 or state.open < 3:
                await asyncio.sleep(0.001)
            state.refusal, state.turns.blocked = refusal, lambda lane: True  # type: ignore[method-assign]
            for client in (clients[0], clients[2]):
                assert await asyncio.to_thread(client.recv, 100) == REFUSED
            assert await asyncio.to_thread(clients[2].recv, 100) == b"" and state.open == 2
            clients[0].sendall(b"again no\r\n\r\n")
            assert await asyncio.to_thread(clients[0].recv, 100) == REFUSED
            state.turns.held = False
            assert await asyncio.to_thread(clients[1].recv, 100) == b"[b\r\n\r\n]"
            for client in clients:
                client.close()
            while state.open:
                await asyncio.sleep(0.001)

    run(main)


@own_loop
def test_a_burst_is_refused_before_its_heads_are_parsed(own_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting heads count as queued. Keys have shares of their own; a refused key's waiting requests are refused."""
    held, parsed = [True], Counter[str]()
    may_begin, call = HeadTurns._may_begin, Guard.__call__

    async def seen(self: Guard, scope: Any, receive: Any, send: Any) -> None:
        parsed[scope["path"]] += 1
        await call(self, scope, receive, send)

    monkeypatch.setattr(HeadTurns, "_may_begin", lambda *args: not held[0] and may_begin(*args))
    monkeypatch.setattr(Guard, "__call__", seen)
    with (
        served(pace=0.01, sequences=20, per_key=6, keys=KEYS, own_loop=own_loop) as server,
        contextlib.ExitStack() as stack,
    ):

        def connect() -> Link:
            link = Link(server)
            stack.callback(link.close)
            return link

        def waiting(key: str) -> int:
            return server.shed.waiting[key_id(key)]

        first = []
        for number in range(6):
            first.append(link := connect())  # a head has to arrive within half a second
            link.send(head(len(BODY)), BODY)
            until(lambda number=number: waiting(KEYS[0]) == number + 1)  # type: ignore[misc]
        late = connect()
        late.send(head(len(BODY)), BODY)
        assert late.answer()[0] == 429, "the key's requests that wait are open requests"
        other = connect()
        other.send(head(len(BODY), key=KEYS[1]), BODY)
        until(lambda: waiting(KEYS[1]) == 1)
        models = connect()
        models.send(head(None, line="GET /v1/models HTTP/1.1"))
        server.serving.admission.per_key = 0
        for link in (*first, other):
            status, headers, _ = link.answer()
            assert status == 429 and int(headers["retry-after"]) >= 1
        assert not parsed and not server.shed.waiting
        server.serving.admission.per_key, held[0] = 6, False
        assert models.answer()[0] == 200
        first[0].send(head(len(BODY)), BODY)
        assert first[0].answer()[0] == 200, "the connection serves on"
        assert parsed == {"/v1/models": 1, PATH: 1}
