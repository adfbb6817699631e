"""Heads that arrive together are parsed in several turns of the event loop; probes and other work come between."""

from __future__ import annotations

import asyncio
import time

from llmc_runtime.server.http.head_turns import HEAD_SECONDS, HeadTurns


class Connection:
    """Takes a while to parse; `log` is shared by all connections of a test."""

    def __init__(self, name: str, log: list[str], seconds: float = HEAD_SECONDS) -> None:
        self.name, self.log, self.seconds, self.paused = name, log, seconds, 0
        self.data = b""

    def parse(self, data: bytes) -> None:
        self.data = data
        self.log.append(self.name)
        time.sleep(self.seconds)

    def pause_reading(self) -> None:
        self.paused += 1

    def resume_reading(self) -> None:
        self.paused -= 1


HEAD = b"POST /v1/completions HTTP/1.1\r\n"


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
        for one in (first, *(Connection(str(i), log, 0.0) for i in range(5))):
            turns.begin(one, HEAD)
        await asyncio.sleep(0)
        return log

    assert asyncio.run(run()) == ["first", "0", "1", "2", "3", "4"]


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
