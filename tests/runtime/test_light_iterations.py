"""Light connections are accepted, read and ended in a limited time of each iteration of the event loop."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

pytest.importorskip("uvicorn")
from llmc_runtime.server.http import light_connections

from tests.runtime.test_light_connections import LATE, REFUSED, run, serving


def test_accepting_and_reading_take_limited_time_per_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds that half of the time is over, so that one step fits into an iteration; three if
    connections were left waiting to be accepted.
    """

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += light_connections._TURN_SECONDS / 2
            return self.now

    async def main() -> None:
        async with serving() as state:
            clients = [socket.create_connection(("127.0.0.1", state.port), timeout=10) for _ in range(60)]
            opened = []
            while state.open < 60:
                opened.append(state.open)
                await asyncio.sleep(0)
            steps = [b - a for a, b in itertools.pairwise([*opened, state.open]) if b > a]
            assert steps[0] == light_connections._STEP and max(steps) == 3 * light_connections._STEP, steps
            for client in clients:
                client.sendall(b"no\r\n\r\n")
            done = [0]
            while done[-1] < 60:
                await asyncio.sleep(0)
                done.append(len(state.refused))
            steps = [b - a for a, b in itertools.pairwise(done)]
            assert max(steps) == light_connections._STEP, steps
            for client in clients:
                assert await asyncio.to_thread(client.recv, 100) == REFUSED
                client.close()

    monkeypatch.setattr(light_connections, "_STEP", 8)
    monkeypatch.setattr(light_connections, "time", Clock())
    run(main)


def test_late_connections_end_a_few_per_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of clients that send nothing are late at the same time."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += light_connections._TURN_SECONDS / 3
            return self.now

    async def main() -> None:
        async with serving(head_seconds=0.3) as state:
            clients = [socket.create_connection(("127.0.0.1", state.port), timeout=10) for _ in range(20)]
            while state.opened < 20:
                await asyncio.sleep(0)
            found = [state.open]
            while found[-1]:
                await asyncio.sleep(0)
                found.append(state.open)
            assert max(before - after for before, after in itertools.pairwise(found)) <= 3, found
            for client in clients:
                assert await asyncio.to_thread(client.makefile("rb").read) == LATE
                client.close()

    monkeypatch.setattr(light_connections, "time", Clock())
    run(main)
