"""How responses are sent: JSON, server-sent events, and the handling of disconnected clients."""

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

from llmc_runtime.server.http.errors import ApiError, internal
from llmc_runtime.server.http.lazy_json import PAUSE_BYTES, Encoding, is_lazy

T = TypeVar("T")
log = logging.getLogger("llmc.serve")
DONE = b"data: [DONE]\n\n"
_WHOLE = 256 << 10  # bytes up to which a response is sent at once


class Gone(Exception):
    """The client disconnected before its response ended."""


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def as_error(error: ApiError) -> Response:
    """Return the response for an error. A 500, which a retry would meet again, carries the header x-should-retry:
    false.
    """
    headers = dict(error.headers)
    if error.status == 500:
        headers["x-should-retry"] = "false"
    return as_json(error.body(), error.status, headers)


def event(value: Any) -> bytes:
    """Encode a value as a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def as_answer(
    value: Any, encoding: Encoding, gone: Callable[[], None], sent: Callable[[], None] = lambda: None
) -> Response:
    """Return a JSON response.

    Up to _WHOLE bytes are sent with a length, larger responses in chunks as they are encoded. `gone` is called if the
    client disconnects meanwhile, and `sent` once the response is no longer needed.
    """
    parts, first = encoding.parts(value), bytearray()
    async for part in parts:
        first += part
        if len(first) > _WHOLE:
            return InParts(_again(bytes(first), parts), gone, sent)
    sent()
    return Response(bytes(first), media_type="application/json")


async def _again(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


class InParts(Response):
    """A JSON response of unknown length, sent as fast as the client reads it."""

    media_type = "application/json"

    def __init__(self, parts: AsyncIterator[bytes], gone: Callable[[], None], sent: Callable[[], None]) -> None:
        super().__init__(None)
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._parts, self._gone, self._sent = parts, gone, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await while_connected(receive, self._send(send))
        except Gone:
            self._gone()
        finally:
            self._sent()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:  # type: ignore[type-var]
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Final(bytes):
    """The last events of a stream, which are sent together with its end."""


class Plain:
    """Encodes events of a stream that differ only in an index and a text; everything else is encoded once.

    `told` is an example of such a chunk. Its only choice has the index 0 and contains an empty string under `key`.
    """

    def __init__(self, told: dict[str, Any], key: str) -> None:
        before, index, rest = event(told).partition(b'"index":0')
        between, name, after = rest.partition(f'"{key}":""'.encode())
        assert index and name
        self._before, self._between, self._after = before + b'"index":', between + name[:-2], after

    def event(self, index: int, text: str) -> bytes:
        """Return the event with this index and text."""
        return b"%b%d%b%b%b" % (self._before, index, self._between, msgspec.json.encode(text), self._after)


class Events(Response):
    """A stream of server-sent events, ended by [DONE]. Chunks are JSON values or encoded events.

    An error during the stream becomes its last event. `gone` is called if the client disconnects, and `sent` when the
    stream is over.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Any],
        encoding: Encoding,
        gone: Callable[[], None],
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._chunks, self._encoding, self._gone, self._sent = chunks, encoding, gone, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await while_connected(receive, self._send(send, scope.get("llmc.part")))
        except Gone:
            self._gone()
        finally:
            self._sent()

    async def _send(self, send: Send, part: Callable[[bytes], Awaitable[None]] | None) -> None:
        """Send the stream's parts with `part`, except the last one; None: with `send`."""

        async def sent(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        part, tail, unpaused = part or sent, b"", 0
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    if isinstance(chunk, Final):
                        tail = chunk
                    elif isinstance(chunk, bytes):
                        await part(chunk)
                    elif is_lazy(chunk):
                        async for some in self._encoding.parts(chunk, b"data: ", b"\n\n"):
                            await part(some)
                    else:
                        await part(made := event(chunk))
                        unpaused += len(made)
                        if unpaused > PAUSE_BYTES:  # taking chunks need not wait, and would block the loop
                            await self._encoding.pause()
                            unpaused = 0
                last = DONE
            except ApiError as e:
                if e.status >= 500:
                    log.warning("a stream ended: %s%s", e.message, place(e.__cause__))
                last = event(e.body())
            except Exception as e:
                log.error("a stream failed%s", place(e))
                last = event(internal().body())
        await send({"type": "http.response.body", "body": tail + last, "more_body": False})


def place(error: BaseException | None) -> str:
    """Return where an exception occurred, for the log: types and lines of code, but no messages, which may quote a
    request.
    """
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return f": {type(error).__name__} at " + " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1])


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, `work` is cancelled and Gone is raised."""
    task, gone, left = asyncio.current_task(), asyncio.ensure_future(_disconnected(receive)), False
    assert task is not None

    def leave(_: Any) -> None:
        nonlocal left
        left = True
        task.cancel()

    gone.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise Gone from None
        raise
    finally:
        gone.remove_done_callback(leave)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
