"""Light connections answer probes at any time, and close with a refusal if clients do not use them again."""

from __future__ import annotations

import asyncio
import socket

import pytest

pytest.importorskip("uvicorn")
from llmc_runtime.server.http.fair_selector import FairSelector
from llmc_runtime.server.http.light_requests import LightConnection, LightState

from tests.runtime.test_light_connections import PROBED, REFUSED, Server, read, run, serving


def test_probes_are_answered_first_and_need_no_ordinary_connection() -> None:
    async def main() -> None:
        async with serving() as state:
            assert isinstance(fair := asyncio.get_running_loop().fair, FairSelector)
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            for _ in range(2):
                writer.write(b"probe\r\n\r\n")
                assert await read(reader, len(PROBED)) == PROBED and state.open == 1
                await asyncio.sleep(0)
                assert list(fair._watched.values()) == [fair._probes] and not fair.batches.active()
            writer.write(b"no\r\n\r\n")
            assert await read(reader, len(REFUSED)) == REFUSED
            await asyncio.sleep(0)
            assert list(fair._watched.values()) == [fair._clients], "it is a client like others again"
            writer.write(b"probe\r\n\r\nyes\r\n\r\n")
            assert await read(reader, len(PROBED) + 9) == PROBED + b"[yes\r\n\r\n]" and state.open == 0
            writer.close()

    run(main)


def test_a_probe_is_answered_while_nothing_is_refused() -> None:
    state = Server(busy=False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = LightConnection(ours, lambda data, passed: None, ours.close, 0.0)
        theirs.send(b"probe\r\n\r\n")
        assert state.serve(one) == (LightState.LIGHT, PROBED) and one.probing
        theirs.send(b"probe close\r\n\r\n")
        assert state.serve(one) == (LightState.CLOSED, PROBED)


def test_refusals_close_new_connections_while_clients_do_not_use_them_again() -> None:
    state = Server()

    def asked(again: bytes) -> tuple[LightState, bytes]:
        ours, theirs = socket.socketpair()
        with ours:
            one = LightConnection(ours, lambda data, passed: None, ours.close, 0.0)
            with theirs:
                theirs.send(b"no +4\r\n\r\nbody")
                first = state.serve(one)
                theirs.send(again)
            if first[0] is LightState.LIGHT:
                state.serve(one)
        return first

    opened, closed = (LightState.LIGHT, REFUSED), (LightState.CLOSED, REFUSED)
    assert asked(b"") == asked(b"no\r\n\r\n") == opened
    found = [asked(b"") for _ in range(100)]
    assert found[:20] == [opened] * 20 and set(found[-32:]) == {opened, closed}
    assert found[-32:].count(opened) == 2, "some stay open, so that clients that return are noticed"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = LightConnection(ours, lambda data, passed: None, ours.close, 0.0)
        for data in (b"no +4\r\n\r\n", b"bodyno\r\n\r\n"):
            theirs.send(data)
            assert state.serve(one) == opened, "its body was on its way"
    found = [asked(b"no\r\n\r\n") for _ in range(200)]
    assert found[-32:] == [opened] * 32


def test_a_refusal_that_closes_reaches_the_client_whole() -> None:
    async def main() -> None:
        async with serving() as state:
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            writer.write(b"no close +3\r\n\r\nabc")
            assert await asyncio.wait_for(reader.read(), 10) == REFUSED
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            writer.write(b"no close +9\r\n\r\nabc")  # its body is still to come: closing would reset the connection
            assert await read(reader, 20) == b"[no close +9\r\n\r\nabc]"
            writer.close()

    run(main)
