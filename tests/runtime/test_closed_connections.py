"""Closed connections release all of their resources."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.lingering_close import LingerCount, Lingering
from llmc_runtime.server.protocol import HttpConnection

from tests.runtime.served import Served, served, until
from tests.runtime.test_server_shed import BODY, Link, head, occupy, own_loop


@own_loop
def test_closed_connections_are_freed_without_the_garbage_collector(own_loop: bool) -> None:
    with served(own_loop=own_loop) as server:
        gc.collect()
        gc.disable()
        try:
            for more in ((), ("Connection: close",), ("Expect: nothing",)):
                link = Link(server)
                link.send(head(len(BODY), *more, key=""), BODY)
                link.answer()
                link.close()
            occupy(server).close()  # its answer is cut off
            gone = (HttpConnection, Lingering, asyncio.Transport)
            until(lambda: not any(issubclass(type(one), gone) for one in gc.get_objects()))
        finally:
            gc.enable()


CHAT = [{"role": "user", "content": "x"}]
IMPOSSIBLE = {"structured_outputs": {"regex": "(("}, "max_tokens": 2}
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "response": ("/v1/responses", {"input": "x", "max_output_tokens": 3}, 200),
    "streamed response": ("/v1/responses", {"input": "x", "max_output_tokens": 3, "stream": True}, 200),
    "response with log-probabilities": (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 3, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}, 200,
    ),
    "long response": ("/v1/responses", {"input": "x" * 5000}, 400),
    "long prompt of a large body": ("/v1/completions", {"prompt": "x" * 40_000}, 400),
    "large chat": ("/v1/chat/completions", {"messages": CHAT * 500, "user": "y" * 40_000}, 400),
    "impossible grammar": ("/v1/completions", {"prompt": "x", **IMPOSSIBLE}, 400),
    "impossible grammar, streamed": ("/v1/completions", {"prompt": "x", "stream": True, **IMPOSSIBLE}, 400),
    "impossible grammar of two prompts": ("/v1/completions", {"prompt": ["x", "y"], **IMPOSSIBLE}, 400),
}  # fmt: skip


@pytest.fixture(scope="module")
def storing() -> Iterator[Served]:
    with served(own_loop=True, store=1 << 20) as server:
        yield server


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_leave_nothing_to_the_garbage_collector(storing: Served, name: str) -> None:
    """A full collection is rare and long: what it has to free fills the memory, and delays the streams of others."""
    path, fields, status = REQUESTS[name]
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    host, port = storing.url.removeprefix("http://").split(":")
    for collect in (True, False):  # the first request starts what stays
        gc.collect()
        if not collect:
            gc.disable()
        try:
            with socket.create_connection((host, int(port)), timeout=60) as link:
                link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                received = b""
                while part := link.recv(1 << 16):
                    received += part
            assert received.startswith(b"HTTP/1.1 %d " % status), received
            if not collect:
                until(lambda: not any(issubclass(type(one), (HttpConnection, Call)) for one in gc.get_objects()))
        finally:
            gc.enable()


def test_a_connection_that_the_client_has_reset_does_not_linger() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, accepted)
        transport.pause_reading()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # with a reset
        await asyncio.to_thread(until, lambda: not _connected(accepted))
        count = LingerCount()
        lingering = Lingering(transport, lambda: True, count)
        lingering.close()
        assert transport.is_closing() and not lingering.lingers and count.used == 0
        listener.close()

    asyncio.run(main())


@pytest.mark.parametrize("gone", [False, True])
def test_nothing_is_written_to_a_connection_that_is_closing(gone: bool) -> None:
    """Asyncio logs a line for each part that is written after a reset, until it reports the end of the connection."""
    written = list[bytes]()
    connection = HttpConnection.__new__(HttpConnection)
    connection.flow, connection.cycle = SimpleNamespace(write_paused=False), SimpleNamespace(disconnected=False)
    connection.transport = SimpleNamespace(is_closing=lambda: gone, write=written.append)
    asyncio.run(connection._send_part(b"text"))
    assert written == ([] if gone else [b"4\r\ntext\r\n"])


def _connected(one: socket.socket) -> bool:
    try:
        one.getpeername()
    except OSError:
        return False
    return True
