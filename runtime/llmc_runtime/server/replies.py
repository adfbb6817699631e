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
from llmc_runtime.server.lazy import PAUSE_BYTES, Encoding, is_lazy

T = TypeVar("T")
log = logging.getLogger("llmc.serve")
DONE = b"data: [DONE]\n\n"
_WHOLE = 256 << 10  # bytes of an answer that is sent at once


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


async def as_answer(
    value: Any, encoding: Encoding, gone: Callable[[], None], sent: Callable[[], None] = lambda: None
) -> Response:
    """A JSON answer. Up to _WHOLE bytes are sent with their length, more in chunks as they are made; `gone`
    is called where the client goes away meanwhile, `sent` when the answer is not needed any more."""
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
    """A JSON answer of unknown length, sent as the client takes it."""

    media_type = "application/json"

    def __init__(self, parts: AsyncIterator[bytes], gone: Callable[[], None], sent: Callable[[], None]) -> None:
        super().__init__(None)
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._parts, self._gone, self._sent = parts, gone, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
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
    """The last events of a stream: they leave together with its end."""


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
    event. `gone` is called where the client went away, `sent` when the stream is over."""

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
        """Send all of it."""
        try:
            await while_connected(receive, self._send(send, scope.get("llmc.part")))
        except Gone:
            self._gone()
        finally:
            self._sent()

    async def _send(self, send: Send, part: Callable[[bytes], Awaitable[None]] | None) -> None:
        """`part` sends a part of the body, the last one excepted; None: `send` does."""

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
                        if unpaused > PAUSE_BYTES:  # a burst of them would hold the loop: taking one need not wait
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
    """What failed where, for the log: kinds and lines of code, none of the words, which may be a request's."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return f": {type(error).__name__} at " + " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1])


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and Gone raised, when the client goes away."""
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
