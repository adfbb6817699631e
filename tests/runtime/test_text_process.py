"""Frames to a text process."""

from __future__ import annotations

import asyncio
import socket

import pytest
from llmc_runtime.server.text_pool import text_process
from llmc_runtime.server.text_pool.text_messages import HEAD, READY


@pytest.mark.parametrize("size", [0, 1, text_process._SENT_BYTES, 5 * text_process._SENT_BYTES + 3])
def test_a_large_frame_is_sent_in_parts(size: int) -> None:
    """While the process reads, the system takes as much as it is given in one call: 12 ms for 8 MB."""

    async def main() -> tuple[list[int], bytes]:
        ours, theirs = socket.socketpair()
        process = text_process.TextProcess.__new__(text_process.TextProcess)
        process._link, payload, calls = ours, bytes(range(256)) * (size // 256 + 1), list[int]()
        payload = payload[:size]
        loop = asyncio.get_running_loop()
        send = loop.sock_sendall

        async def counted(sock: socket.socket, data: bytes) -> None:
            calls.append(len(data))
            await send(sock, data)

        loop.sock_sendall = counted  # type: ignore[method-assign, assignment]
        with ours, theirs:
            ours.setblocking(False)
            received = asyncio.to_thread(theirs.recv, HEAD.size + size, socket.MSG_WAITALL)
            _, found = await asyncio.gather(process.send(READY, payload), received)
        assert found == HEAD.pack(READY, size) + payload
        return calls, found

    calls, _ = asyncio.run(main())
    assert max(calls) <= max(HEAD.size, text_process._SENT_BYTES) and sum(calls) == HEAD.size + size
