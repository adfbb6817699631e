"""Large responses, sent in parts so that the event loop can serve others in between."""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PART = 64 << 10  # bytes


class InParts(Response):
    """A complete body of type `media_type`, sent part by part as fast as the client reads it."""

    def __init__(self, data: bytes | bytearray, media_type: str) -> None:
        super().__init__(b"", media_type=media_type)
        self._data = memoryview(data)
        self.headers["content-length"] = str(len(data))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for begin in range(0, len(self._data), _PART):
            part = bytes(self._data[begin : begin + _PART])
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
