"""HTTP/1.1 on the wire: uvicorn's protocol with a limit on the time of a request's head, and errors as JSON; no routes.

Bodies have a limit of their own where they are read; a connection without a request is closed by uvicorn.
"""

from __future__ import annotations

import asyncio

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmc_runtime.server.errors import ApiError

MOST_HEAD = 64 << 10  # bytes; what is over is no request


class Wire(H11Protocol):
    """One connection."""

    head_seconds = 15.0
    _timer: asyncio.TimerHandle | None = None  # runs while a head is on its way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there, and should say something."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.head_seconds, self._late)

    def data_received(self, data: bytes) -> None:
        """Part of a head, or of a body."""
        if self._timer is None and self._idle:
            self._timer = self.loop.call_later(self.head_seconds, self._late)
        super().data_received(data)
        if not self._idle:
            self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP. An answer under way ends where it is."""
        if self._idle:
            self._refuse(400, ApiError("this is no request in HTTP/1.1, or its head is too long", code="invalid_http"))
        self.transport.close()

    @property
    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _late(self) -> None:
        self._timer = None
        if self._idle and not self.transport.is_closing():
            cause = f"the head of the request did not come within {self.head_seconds:g} s"
            self._refuse(408, ApiError(cause, code="timeout"))
            self.transport.close()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        words = {400: "Bad Request", 408: "Request Timeout"}[status]
        head = f"HTTP/1.1 {status} {words}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
