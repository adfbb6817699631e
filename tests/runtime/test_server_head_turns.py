"""Heads that arrive together are parsed in several turns of the event loop; probes and other work come between."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Any

import pytest
from llmc_runtime.server.http import read_turns
from llmc_runtime.server.http.read_turns import (
    HEAD_SECONDS,
    HELD_ITERATIONS,
    ITERATION_SECONDS,
    MAX_HEADS,
    MAX_PROBES,
    MIN_HEADS,
    HeadTurns,
)


class Clock:
    """Takes the place of the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(read_turns, "time", found := Clock())
    Connection.clock = found
    return found


class Connection:
    """Takes a while to parse; `log` is shared by all connections of a test."""

    clock = Clock()

    def __init__(self, name: str, log: list[str], seconds: float = HEAD_SECONDS) -> None:
        self.name, self.log, self.seconds, self.paused = name, log, seconds, 0
        self.data = b""

    def parse(self, data: bytes) -> None:
        self.data = data
        self.log.append(self.name)
        self.clock.now += self.seconds

    def pause_reading(self) -> None:
        self.paused += 1

    def resume_reading(self) -> None:
        self.paused -= 1


HEAD = b"POST /v1/completions HTTP/1.1\r\n"
PROBE = b"GET /health HTTP/1.1\r\n\r\n"


def received(client: socket.socket, count: int) -> bytes:
    """Return responses whose bodies are JSON objects."""
    got = b""
    while got.count(b"HTTP/1.1 ") < count or not got.endswith(b"}"):
        part = client.recv(1 << 16)
        assert part, got
        got += part
    return got


def turns_of(log: list[str], laps: list[list[str]]) -> None:
    """Move what has been parsed in this iteration of the event loop to `laps`."""
    laps.append(log[:])
    log.clear()


def test_one_turn_parses_for_a_limited_time() -> None:
    async def run() -> list[str]:
        log: list[str] = []
        turns, many = HeadTurns(), [Connection(str(i), log) for i in range(4)]
        for one in many:
            turns.begin(one, HEAD)
        assert log == ["0"] and [one.paused for one in many] == [0, 1, 1, 1]
        for i in range(4):
            await asyncio.sleep(0)
            log.append(f"turn {i}")
        assert not any(one.paused for one in many)
        return log

    assert asyncio.run(run()) == ["0", "1", "turn 0", "2", "turn 1", "3", "turn 2", "turn 3"]


def test_short_heads_share_a_turn() -> None:
    async def run() -> list[str]:
        log: list[str] = []
        turns, first = HeadTurns(), Connection("first", log)
        for one in (first, *(Connection(str(i), log, 0.0) for i in range(MAX_HEADS))):
            turns.begin(one, HEAD)
        await asyncio.sleep(0)
        return log

    assert asyncio.run(run()) == ["first", "0", "1", "2", "3"]


def test_one_turn_looks_for_refused_keys_for_a_limited_time(clock: Clock) -> None:
    """Requests of a thousand keys may wait."""
    looks: list[str] = []

    def blocked(lane: str) -> bool:
        clock.now += HEAD_SECONDS / 4
        looks.append(lane)
        return False

    async def run() -> int:
        turns = HeadTurns()
        turns.lane_of, turns.sheds, turns.blocked = bytes.decode, lambda data: True, blocked
        for number in range(100):
            turns.begin(Connection("", []), str(number).encode())
        await asyncio.sleep(0)
        return len(looks)

    assert asyncio.run(run()) == 4


def test_probes_do_not_wait_and_closed_connections_are_forgotten() -> None:
    async def run() -> list[str]:
        log: list[str] = []
        turns, gone = HeadTurns(), Connection("gone", log)
        for one in (Connection("first", log), gone, Connection("last", log)):
            turns.begin(one, HEAD)
        turns.leave(gone)
        turns.begin(Connection("probe", log), b"GET /health HTTP/1.1\r\n\r\n")
        for _ in range(3):
            await asyncio.sleep(0)
        return log

    assert asyncio.run(run()) == ["first", "probe", "last"]


def test_pieces_that_come_while_a_connection_waits_are_kept_in_order() -> None:
    async def run() -> bytes:
        log: list[str] = []
        turns, one = HeadTurns(), Connection("one", log)
        turns.begin(Connection("first", log), HEAD)
        turns.begin(one, HEAD)
        turns.begin(one, b"Host: a\r\n\r\n")
        await asyncio.sleep(0)
        assert one.paused == 0
        return one.data

    assert asyncio.run(run()) == HEAD + b"Host: a\r\n\r\n"


def test_few_heads_are_parsed_per_iteration_and_fewer_while_iterations_are_long(clock: Clock) -> None:
    async def run() -> list[int]:
        log: list[str] = []
        laps: list[list[str]] = []
        turns = HeadTurns()
        for number in range(100):
            turns.begin(Connection(str(number), log, 0.0), HEAD)
        turns_of(log, laps)
        for took in (2 * ITERATION_SECONDS,) * 4 + (ITERATION_SECONDS / 2,) * 8:
            clock.now += took
            await asyncio.sleep(0)
            turns_of(log, laps)
        assert [name for lap in laps for name in lap] == [str(number) for number in range(sum(map(len, laps)))]
        return [len(lap) for lap in laps]

    found = asyncio.run(run())
    assert found[:5] == [MAX_HEADS, MAX_HEADS // 2, MIN_HEADS, MIN_HEADS, MIN_HEADS]
    assert found[5:] == [min(MAX_HEADS, MIN_HEADS + 1 + i) for i in range(8)]


def test_a_key_with_many_heads_delays_its_own() -> None:
    """Lanes take turns, whatever their lengths; without a valid key there is one lane."""

    async def run() -> list[str]:
        log: list[str] = []
        turns = HeadTurns()
        turns.lane_of = lambda head: head.partition(b"key=")[2].decode()
        turns.begin(Connection("first", log), HEAD)  # takes all of the time of this iteration
        for number in range(50):
            turns.begin(Connection(f"a{number}", log, 0.0), b"POST key=a")
        for number in range(2):
            turns.begin(Connection(f"b{number}", log, 0.0), b"POST key=b")
        turns.begin(Connection("c", log, 0.0), b"POST key=c")
        await asyncio.sleep(0)
        return log[:]

    assert asyncio.run(run()) == ["first", "a0", "b0", "c", "a1"]


def test_probes_come_first_and_have_a_limit_of_their_own() -> None:
    async def run() -> list[list[str]]:
        log: list[str] = []
        laps: list[list[str]] = []
        turns = HeadTurns()
        for _ in range(20):
            turns.begin(Connection("head", log, 0.0), HEAD)
        for number in range(MAX_PROBES + 2):
            turns.begin(Connection(f"probe {number}", log, 0.0), PROBE)
        turns_of(log, laps)
        await asyncio.sleep(0)
        turns_of(log, laps)
        return laps

    first, second = asyncio.run(run())
    assert first == ["head"] * MAX_HEADS + [f"probe {i}" for i in range(MAX_PROBES)]
    assert second == [f"probe {MAX_PROBES}", f"probe {MAX_PROBES + 1}"] + ["head"] * MAX_HEADS


def test_while_connections_wait_to_be_accepted_one_head_is_parsed_in_some_iterations() -> None:
    async def run() -> list[int]:
        log: list[str] = []
        laps: list[list[str]] = []
        turns = HeadTurns()
        for number in range(50):
            turns.begin(Connection(str(number), log, 0.0), HEAD)
        turns_of(log, laps)
        for held_back in (*(True,) * (2 * HELD_ITERATIONS), False, False, True):
            if held_back:
                turns.hold_back()
            await asyncio.sleep(0)
            turns_of(log, laps)
        return [len(lap) for lap in laps]

    held = [1] + [0] * (HELD_ITERATIONS - 1)
    assert asyncio.run(run()) == [MAX_HEADS, *held, *held, 1, 2, 1]


def test_probes_are_not_held_back() -> None:
    async def run() -> list[list[str]]:
        log: list[str] = []
        laps: list[list[str]] = []
        turns = HeadTurns()
        for number in range(20):
            turns.begin(Connection(str(number), log, 0.0), HEAD)
        for number in range(HELD_ITERATIONS):
            turns_of(log, laps)
            turns.hold_back()
            await asyncio.sleep(0)
            turns.begin(Connection(f"probe {number}", log), PROBE)
        turns_of(log, laps)
        return laps[1:]

    laps = asyncio.run(run())
    assert [lap[-1] for lap in laps] == [f"probe {number}" for number in range(HELD_ITERATIONS)]
    assert sum(map(len, laps)) == HELD_ITERATIONS + 1


def test_unfinished_heads_of_probes_wait_like_others() -> None:
    """So that thousands of them do not delay probes."""

    async def run() -> list[str]:
        log: list[str] = []
        turns = HeadTurns()
        turns.begin(Connection("first", log), HEAD)
        for number in range(9):
            turns.begin(Connection(f"half {number}", log, 0.0), PROBE[:-2])
        turns.begin(Connection("probe", log, 0.0), PROBE)
        return log[:]

    assert asyncio.run(run()) == ["first", "probe"]


def test_the_longest_lane_is_known_and_a_head_that_was_received_before_is_classified() -> None:
    async def run() -> None:
        log: list[str] = []
        turns = HeadTurns()
        turns.lane_of = lambda head: head.decode()
        assert list(turns.latest_of_longest()) == []
        turns.begin(Connection("first", log), HEAD)
        ones = [Connection(str(i), log, 0.0) for i in range(5)]
        for one, lane in zip(ones, (b"a", b"b", b"a", b"a", b"b"), strict=True):
            turns.begin(one, b"", lane)
        assert list(turns.latest_of_longest()) == [ones[3], ones[2], ones[0]]
        assert all(turns.waits(one) for one in ones)
        turns.leave(ones[2])
        assert not turns.waits(ones[2])
        probe = Connection("probe", log, 0.0)
        turns.begin(probe, b"", PROBE)
        assert log == ["first", "probe"] and probe.data == b""

    asyncio.run(run())


def test_a_request_that_waits_for_its_turn_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first of a connection, after the time for a head, nor the next, after the time between requests."""
    pytest.importorskip("uvicorn")
    from tests.runtime.served import Quick, served

    held, may_begin = [False], HeadTurns._may_begin
    monkeypatch.setattr(HeadTurns, "_may_begin", lambda *args: not held[0] and may_begin(*args))
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for own_loop in (False, True):
        with (
            served(own_loop=own_loop, keep_alive=1) as server,
            socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as client,
        ):
            for seconds in (Quick.head_seconds, 1):
                held[0] = True
                client.sendall(request)
                time.sleep(seconds + 0.3)
                held[0] = False
                got = received(client, 1)
                assert got.startswith(b"HTTP/1.1 200"), got


def test_the_lane_of_a_head_is_that_of_its_valid_key() -> None:
    pytest.importorskip("starlette")
    from llmc_runtime.server.http.auth import Guard, Keys, Limits, key_id

    async def app(*_: Any) -> None:
        raise AssertionError

    guard = Guard(app, Keys(("one", "two")), Limits(), None)
    line = b"POST /v1/completions HTTP/1.1\r\n"
    lanes = {
        line + b"Host: a\r\nAuthorization: Bearer one\r\n\r\n": key_id("one"),
        line + b"authorization:\tbearer  two \r\nHost: a\r\n\r\n": key_id("two"),
        line + b"X-API-Key: two\r\n\r\n": key_id("two"),
        line + b"Authorization: Bearer one\r\nAuthorization: Bearer two\r\n\r\n": key_id("one"),  # as for requests
        line + b"X-Api-Key: two\r\nAuthorization: Bearer three\r\n\r\n": "",
        line + b"Authorization: Bearer one": key_id("one"),  # cut off
        line + b"Authorization: Basic one\r\n\r\n": "",
        line + b"\r\n\r\nAuthorization: Bearer one\r\n": "",  # of the body
        line + b"X-Authorization: Bearer one\r\n\r\n": "",
        b"": "",
    }
    assert {head: guard.lane_of(head) for head in lanes} == lanes
    assert {Guard(app, Keys(()), Limits(), None).lane_of(head) for head in lanes} == {""}


def test_each_request_of_a_pipeline_takes_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the parser has received with the first one begin one by one, and are answered in order."""
    pytest.importorskip("uvicorn")
    from tests.runtime.served import served

    heads: list[bytes] = []
    begin = HeadTurns.begin

    def noted(turns: HeadTurns, connection: Any, data: bytes, head: bytes | None = None) -> None:
        heads.append(data if head is None else head)
        begin(turns, connection, data, head)

    monkeypatch.setattr(HeadTurns, "begin", noted)
    names = [f"request-{number}" for number in range(12)]
    sent = "".join(f"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\n\r\n" for name in names)
    for own_loop in (False, True):
        with served(own_loop=own_loop) as server:
            heads.clear()
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as client:
                client.sendall(sent.encode())
                got = received(client, len(names))
            assert re.findall(rb"x-request-id: (\S+)", got) == [name.encode() for name in names]
            firsts = [head.count(b"GET ") for head in heads]
            assert firsts == list(range(len(names), 0, -1)), "each finds itself and those after it"
