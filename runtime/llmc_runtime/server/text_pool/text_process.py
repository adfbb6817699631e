"""The server's handle for one text process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import BinaryIO

from llmc_runtime.python_command import LinkedProcess, module_command
from llmc_runtime.server.http.errors import ApiError, unavailable
from llmc_runtime.server.text_pool import text_messages as m

_REAP_SECONDS = 0.005  # seconds between checks for the end of a process
_BUFFER_BYTES = 1 << 20  # size of the socket's buffers in bytes
# Bytes sent at a time: while the process reads, one call of the system sends as much as it is given.
_SENT_BYTES = 256 << 10
_END_SECONDS = 10.0  # timeout from the end of the link to the end of the process, for a busy machine


class Ended(Exception):
    """The process ended, or was killed, during a job."""


class TextProcess(LinkedProcess):
    """A text process for the TextProcessConfig in the file `spec`. Raises OSError if it cannot be created."""

    def __init__(self, spec: BinaryIO) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            for end in (self._link, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            descriptors = [theirs.fileno(), spec.fileno()]
            command = module_command("llmc_runtime.server.text_pool.text_worker", m.NICE)
            super().__init__(self._link, [*command, *map(str, descriptors)], descriptors)
        self._link.setblocking(False)

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process can take a job."""
        return self.close.alive and self.process.poll() is None

    async def end(self) -> None:
        """Kill the process without blocking the event loop: releasing much memory takes a while."""
        if self.close.alive:
            with contextlib.suppress(OSError):
                self.process.kill()
            while self.process.poll() is None:
                await asyncio.sleep(_REAP_SECONDS)
            self.close()

    async def send(self, kind: bytes, payload: bytes | bytearray = b"") -> None:
        """Send a frame. Raises Ended."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._link, m.HEAD.pack(kind, len(payload)))
            for begin in range(0, len(payload), _SENT_BYTES):
                await loop.sock_sendall(self._link, memoryview(payload)[begin : begin + _SENT_BYTES])
                await asyncio.sleep(0)
        except OSError:
            raise Ended from None

    async def receive(self) -> tuple[bytes, bytearray]:
        """Receive a frame, and return its kind and payload. Raises Ended."""
        kind, size = m.HEAD.unpack(await self._exactly(m.HEAD.size))
        return kind, await self._exactly(size)

    async def receive_parts(self) -> tuple[bytes, list[bytearray]]:
        """Receive a frame whose payload may be large, in parts: to free 50 MB at once takes the event loop 9 ms."""
        kind, size = m.HEAD.unpack(await self._exactly(m.HEAD.size))
        return kind, [await self._exactly(min(_BUFFER_BYTES, size - begin)) for begin in range(0, size, _BUFFER_BYTES)]

    async def _exactly(self, size: int) -> bytearray:
        loop, data = asyncio.get_running_loop(), bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = await loop.sock_recv_into(self._link, rest[:_BUFFER_BYTES])
            except OSError:
                count = 0
            if not count:
                raise Ended
            rest = rest[count:]
        return data

    async def is_ready(self) -> bool:
        """Whether the idle process replies. `alive` is still true shortly after a process was killed."""
        try:
            await self.send(m.READY)
            return (await self.receive())[0] == m.READY
        except Ended:
            return False

    async def end_error(self) -> ApiError:
        """Return the error for the client of the job during which the process ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):  # the link closes before the process has ended
                while self.process.poll() is None:
                    await asyncio.sleep(_REAP_SECONDS)
        code = self.process.poll()
        if code == -signal.SIGPROF:
            return _too_costly(f"{m.CPU_SECONDS:g} s of CPU time")
        if code in (m.OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
            return _too_costly(f"{m.MEMORY_BYTES >> 20} MiB of memory")
        return unavailable("the process that read the request has ended")


def _too_costly(limit: str) -> ApiError:
    cause = f"reading the request takes more than {limit}; send less in one request"
    return ApiError(cause, code="body_too_complex")
