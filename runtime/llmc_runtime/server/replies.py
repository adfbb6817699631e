"""How answers leave: JSON, events of a stream, and what happens when the client goes away; it knows no endpoint."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmc_runtime.server.errors import ApiError, internal

T = TypeVar("T")
log = logging.getLogger("llmc.serve")
DONE = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client went away before its answer ended."""


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def as_error(error: ApiError) -> Response:
    """An error's answer. A 5xx that another try would meet again says so."""
    headers = dict(error.headers)
    if error.status == 500:
        headers["x-should-retry"] = "false"
    return as_json(error.body(), error.status, headers)


def event(value: Any) -> bytes:
    """JSON as a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class Plain:
    """Events of a stream that differ in an index and a text alone: what is around those is encoded once.

    `told` is such a chunk, whose only choice has the index 0 and somewhere in it the text "" after the key `key`.
    """

    def __init__(self, told: dict[str, Any], key: str) -> None:
        before, index, rest = event(told).partition(b'"index":0')
        between, name, after = rest.partition(f'"{key}":""'.encode())
        assert index and name
        self._before, self._between, self._after = before + b'"index":', between + name[:-2], after

    def event(self, index: int, text: str) -> bytes:
        """The event of this index and text."""
        return b"%b%d%b%b%b" % (self._before, index, self._between, msgspec.json.encode(text), self._after)


class Events(Response):
    """Chunks, JSON or events that are ready, as server-sent events, then [DONE]; an error on the way becomes the last
    event. `gone` is told where the client went away."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[Any], gone: Callable[[], None]) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._chunks, self._gone = chunks, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await while_connected(receive, self._send(send, scope.get("llmc.part")))
        except Gone:
            self._gone()

    async def _send(self, send: Send, part: Callable[[bytes], Awaitable[None]] | None) -> None:
        """`part` sends a part of the body, the last one excepted; None: `send` does."""

        async def sent(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        part = part or sent
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    await part(chunk if isinstance(chunk, bytes) else event(chunk))
                last = DONE
            except ApiError as e:
                if e.status >= 500:
                    log.warning("a stream ended: %s%s", e.message, place(e.__cause__))
                last = event(e.body())
            except Exception as e:
                log.error("a stream failed%s", place(e))
                last = event(internal().body())
        await send({"type": "http.response.body", "body": last, "more_body": False})


def place(error: BaseException | None) -> str:
    """What failed where, for the log: kinds and lines of code, none of the words, which may be a request's."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return f": {type(error).__name__} at " + " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1])


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and Gone raised, when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
