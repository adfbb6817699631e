"""A minimal HTTP/1.1 client for load generation: one request at a time per connection, with streamed responses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any

_MAX_HEAD = 64 << 10


class WireError(Exception):
    """The server's response is not HTTP, or the connection was closed."""


class Reply:
    """An incremental parser of a response. `complete` is set at its end."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = self.reusable = False
        self._rest = b""
        self._chunked = self._crlf = self._trailer = False
        self._remaining: int | None = None  # remaining bytes of the body or chunk; None: until the connection is closed

    def feed(self, data: bytes) -> bytes:
        """Parse received data and return the part of the body in it. Raises WireError if it is not HTTP."""
        if not self.status:
            data = self._head(self._rest + data)
            if not self.status:
                return b""
        if self._chunked:
            return self._chunks(self._rest + data if self._rest else data)
        if self._remaining is None:
            return data
        part = data[: self._remaining]
        self._remaining -= len(part)
        self.complete = self._remaining == 0
        return part

    def _head(self, data: bytes) -> bytes:
        """Parse the head and return the data after it; b"" while the head is incomplete."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD:
                raise WireError("the response's head is too long")
            self._rest = data
            return b""
        self._rest = b""
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if not parts[0].startswith("HTTP/1.") or len(parts) < 2 or not parts[1].isdecimal():
            raise WireError(f"the response starts with {first!r:.60}")
        if parts[1].startswith("1"):
            return self._head(data[end + 4 :])
        self.status = int(parts[1])
        self._frame({name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)})
        return data[end + 4 :]

    def _frame(self, headers: Mapping[str, str]) -> None:
        """Determine how the body ends: by chunks, by a length or, with neither, with the connection."""
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length", "")
        if self._chunked:
            self._remaining = 0  # bytes left in the current chunk
        else:
            self._remaining = int(length) if length.isdecimal() else None
        ends_by_itself = self._chunked or self._remaining is not None
        self.reusable = ends_by_itself and headers.get("connection", "").lower() != "close"
        self.complete = not self._chunked and self._remaining == 0

    def _chunks(self, data: bytes) -> bytes:
        """Return the body's bytes in `data`, which may begin and end anywhere in a chunk; an incomplete rest is kept.

        Raises WireError for a malformed length of a chunk.
        """
        parts, at = [], 0
        while not self.complete:
            if self._remaining:
                part = data[at : at + self._remaining]
                parts.append(part)
                at += len(part)
                self._remaining -= len(part)
                if self._remaining:
                    break
                self._crlf = True
            if self._crlf:
                if len(data) - at < 2:
                    break
                at, self._crlf = at + 2, False
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            line, at = data[at:end], end + 2
            if self._trailer:
                self.complete = not line
                continue
            try:
                self._remaining = int(line.partition(b";")[0], 16)
            except ValueError:
                raise WireError(f"a chunk starts with {line!r:.60}") from None
            self._trailer = self._remaining == 0
        self._rest = data[at:]
        return b"".join(parts)


class Connection(asyncio.Protocol):
    """A connection to the server that carries one request at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.used = False  # whether it has carried a request before
        self.closed = False
        self._reply: Reply | None = None
        self._on_data: Callable[[Reply, bytes], None] = _ignore
        self._done: asyncio.Future[Reply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse a part of the response."""
        reply, done = self._reply, self._done
        if reply is None or done is None:
            self.transport.abort()
            return
        try:
            body = reply.feed(data)
            if body:
                self._on_data(reply, body)
        except Exception as e:
            self._finish(e)
            self.transport.abort()
            return
        if reply.complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response, which is an error unless it was delimited by the end of the connection."""
        self.closed = True
        reply = self._reply
        if reply is not None:
            complete = reply.status and reply._remaining is None and exc is None
            reason = f": {exc}" if exc else ""
            self._finish(None if complete else WireError(f"the connection was closed{reason}"))

    def send(self, request: bytes, on_data: Callable[[Reply, bytes], None]) -> asyncio.Future[Reply]:
        """Send a request. `on_data` is called with each part of the body; the future completes at its end."""
        self._reply, self._on_data = Reply(), on_data
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def _finish(self, error: Exception | None) -> None:
        reply, done = self._reply, self._done
        self._reply, self._done, self._on_data, self.used = None, None, _ignore, True
        if reply is None or done is None or done.done():
            return
        if error is None:
            done.set_result(reply)
        else:
            done.set_exception(error)


class Pool:
    """A pool of connections to one server."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._idle: list[Connection] = []

    async def acquire(self, fresh: bool = False) -> Connection:
        """Return an idle or new connection. Raises OSError if the server cannot be reached."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def release(self, connection: Connection, reply: Reply) -> None:
        """Return a connection to the pool, or close it if it cannot be reused."""
        if reply.reusable and not connection.closed:
            self._idle.append(connection)
        else:
            connection.transport.abort()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()


def _ignore(reply: Reply, body: bytes) -> None:
    return
