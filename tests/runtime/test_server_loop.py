"""The server's event loop: what the engine's reader wakes runs between the other callbacks of a long iteration."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("uvicorn")
from llmc_runtime.server.http.event_loop import ServerLoop


def run(work: Callable[[], Awaitable[None]], factory: Callable[[], asyncio.AbstractEventLoop] = ServerLoop) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(work(), 30))


def order_of(factory: Callable[[], asyncio.AbstractEventLoop]) -> list[str]:
    """Return the order in which a token that arrives amid an iteration of 40 callbacks of 1 ms is forwarded."""
    order = list[str]()

    async def main() -> None:
        loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
        done, future = asyncio.Event(), loop.create_future()

        def readable() -> None:
            ours.recv(1)
            future.set_result(None)

        async def stream() -> None:
            await future
            order.append("token")

        def busy(number: int) -> None:
            if number == 10:
                theirs.send(b"x")
            time.sleep(0.001)
            order.append(str(number))
            if number == 39:
                loop.call_later(0.05, done.set)

        loop.add_reader(ours.fileno(), readable)
        task = asyncio.create_task(stream())
        await asyncio.sleep(0)
        for number in range(40):
            loop.call_soon(busy, number)
        await done.wait()
        await task
        assert loop.remove_reader(ours.fileno()) and not loop.remove_reader(ours.fileno())
        ours.close()
        theirs.close()

    run(main, factory)
    return order


def test_a_token_does_not_wait_for_the_end_of_an_iteration() -> None:
    order = order_of(ServerLoop)
    assert 11 <= order.index("token") <= 13 and len(order) == 41
    assert [name for name in order if name != "token"] == [str(number) for number in range(40)]
    assert order_of(asyncio.SelectorEventLoop).index("token") == 40


def test_tokens_come_before_the_clients_of_an_iteration() -> None:
    async def main() -> None:
        loop, order = asyncio.get_running_loop(), list[str]()
        pairs = [socket.socketpair() for _ in range(3)]
        for name, (ours, _) in zip(("client", "engine", "client"), pairs):
            ours.setblocking(False)
            if name == "engine":
                loop.add_reader(ours.fileno(), lambda ours=ours: order.append(f"engine {ours.recv(9).decode()}"))
        clients = [asyncio.create_task(loop.sock_recv(ours, 9)) for ours, _ in (pairs[0], pairs[2])]
        for client in clients:
            client.add_done_callback(lambda _: order.append("client"))
        await asyncio.sleep(0)
        for number, (_, theirs) in enumerate(pairs):
            theirs.send(str(number).encode())
        await asyncio.gather(*clients)
        await asyncio.sleep(0)
        assert order == ["engine 1", "client", "client"]
        for pair in pairs:
            for end in pair:
                loop.remove_reader(end.fileno())
                end.close()

    run(main)


def test_callbacks_of_other_threads_are_not_lost_and_errors_end_nothing() -> None:
    """Threads schedule callbacks while a reader fails in each iteration; some handles are cancelled."""

    async def main() -> None:
        loop, found = asyncio.get_running_loop(), list[int]()
        failures = list[str]()
        loop.set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
        readable = os.eventfd(1)  # always readable

        def fails() -> None:
            loop.call_soon(found.append, -1).cancel()
            raise ValueError("of the reader")

        loop.add_reader(readable, fails)

        def schedule(begin: int) -> None:
            for number in range(begin, begin + 2000):
                loop.call_soon_threadsafe(found.append, number)

        threads = [threading.Thread(target=schedule, args=[begin]) for begin in (0, 2000, 4000)]
        for thread in threads:
            thread.start()
        while len(found) < 6000:
            await asyncio.sleep(0)
        assert sorted(found) == list(range(6000)) and set(failures) == {"of the reader"}
        for begin in (0, 2000, 4000):
            own = [number for number in found if begin <= number < begin + 2000]
            assert own == sorted(own)
        loop.remove_reader(readable)
        os.close(readable)

    run(main)
