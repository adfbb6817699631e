"""Sends responses: JSON, server-sent events, errors. Handles clients that disconnect."""

from __future__ import annotations

import asyncio
import functools
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmc_runtime.server.http.errors import ApiError, body_of, internal
from llmc_runtime.server.http.lazy_json import PAUSE_BYTES, Encoding, is_lazy

T = TypeVar("T")
log = logging.getLogger("llmc.serve")
DONE = b"data: [DONE]\n\n"
_MAX_UNCHUNKED = 256 << 10  # bytes up to which a response is sent at once
_SLICE = 64 << 10  # bytes
CLIENT_CLOSED_REQUEST = 499  # status in the log; never sent, as the client has disconnected

Handler = Callable[[Any, Request], Awaitable[Response]]
Write = Callable[[bytes], Awaitable[None]]


class ClientDisconnected(Exception):
    """The client disconnected before its response ended."""


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def as_error(error: ApiError, path: str) -> Response:
    """Return the response for an error of a request to this path. A 500, which a retry would meet again, carries the
    header x-should-retry: false.
    """
    headers = dict(error.headers)
    if error.status == 500:
        headers["x-should-retry"] = "false"
    return as_json(body_of(error, path), error.status, headers)


def event(value: Any) -> bytes:
    """Encode a value as a server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Encode an object as a server-sent event with the name in its field `type`."""
    return b"event: " + value["type"].encode() + b"\n" + event(value)


def _event_prefix(value: dict[str, Any]) -> bytes:
    """Return what precedes the data of an event; an object with a field `type` is a named event."""
    return b"event: %b\ndata: " % value["type"].encode() if "type" in value else b"data: "


async def as_answer(
    value: Any, encoding: Encoding, on_disconnect: Callable[[], None], on_sent: Callable[[], None] = lambda: None
) -> Response:
    """Return a JSON response.

    Up to _MAX_UNCHUNKED bytes are sent with a length, larger responses in chunks as they are encoded. `on_disconnect`
    is called if the client disconnects meanwhile, and `on_sent` once the response is no longer needed.
    """
    parts, first = encoding.parts(value), bytearray()
    async for part in parts:
        first += part
        if len(first) > _MAX_UNCHUNKED:
            return JsonStream(_with_first(bytes(first), parts), on_disconnect, on_sent)
    on_sent()
    return Response(bytes(first), media_type="application/json")


async def _with_first(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


class Stream(Response):
    """A response of unknown length, sent as fast as the client reads it. Subclasses implement `_write`.

    `on_disconnect` is called if the client disconnects, and `on_sent` when the response is over.
    """

    def __init__(
        self, on_disconnect: Callable[[], None], on_sent: Callable[[], None], headers: Mapping[str, str] | None = None
    ):
        super().__init__(None, headers=headers)
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._on_disconnect, self._on_sent = on_disconnect, on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await while_connected(receive, _in_own_task(self._send(send, scope.get("llmc.part"))))
        except ClientDisconnected:
            self._on_disconnect()
        finally:
            self._on_sent()

    async def _send(self, send: Send, write: Write | None) -> None:
        """Send all parts but the last with `write`, which bypasses ASGI; None: with `send`."""

        async def through_asgi(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = await self._write(write or through_asgi)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, write: Write) -> bytes:
        """Write the nonempty parts of the body, and return the last part."""
        raise NotImplementedError


class JsonStream(Stream):
    """A JSON document that is encoded while it is sent."""

    media_type = "application/json"

    def __init__(
        self, parts: AsyncIterator[bytes], on_disconnect: Callable[[], None], on_sent: Callable[[], None]
    ) -> None:
        super().__init__(on_disconnect, on_sent)
        self._parts = parts

    async def _write(self, write: Write) -> bytes:
        async with aclosing(self._parts) as parts:  # type: ignore[type-var]
            async for part in parts:
                await write(part)
        return b""


class JsonSlices(Response):
    """A complete JSON document in parts, sent slice by slice so that the event loop can serve others in between.

    The list of parts is emptied as they are sent. `on_sent` is called when the response is over.
    """

    media_type = "application/json"

    def __init__(self, parts: list[bytes] | list[bytearray], on_sent: Callable[[], None] = lambda: None) -> None:
        super().__init__(b"")
        self._parts, self._on_sent = parts, on_sent
        self.headers["content-length"] = str(sum(map(len, parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            waiting = bytearray()
            self._parts.reverse()
            while self._parts:
                data = memoryview(self._parts.pop())
                for begin in range(0, len(data), _SLICE):
                    waiting += data[begin : begin + _SLICE]
                    if len(waiting) >= _SLICE:
                        await send({"type": "http.response.body", "body": bytes(waiting), "more_body": True})
                        await asyncio.sleep(0)
                        waiting.clear()
            await send({"type": "http.response.body", "body": bytes(waiting), "more_body": False})
        finally:
            self._on_sent()


class LastEvents(bytes):
    """The last events of a stream, which are sent together with its end."""


class PlainEvents:
    """Encodes events of a stream that differ only in an index and a text; everything else is encoded once.

    `example` is such a chunk. Its only choice has the index 0 and contains an empty string under `key`.
    """

    def __init__(self, example: dict[str, Any], key: str) -> None:
        before, index, rest = event(example).partition(b'"index":0')
        between, name, after = rest.partition(f'"{key}":""'.encode())
        assert index and name
        self._before, self._between, self._after = before + b'"index":', between + name[:-2], after

    def event(self, index: int, text: str) -> bytes:
        """Return the event with this index and text."""
        return b"%b%d%b%b%b" % (self._before, index, self._between, msgspec.json.encode(text), self._after)


class Events(Stream):
    """A stream of server-sent events, ended by `end`. Chunks are JSON values or encoded events.

    `on_error` returns the end of the stream after an error. `on_disconnect` and `on_sent` are as in Stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Any],
        encoding: Encoding,
        on_disconnect: Callable[[], None],
        on_sent: Callable[[], None] = lambda: None,
        end: bytes = DONE,
        on_error: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    ) -> None:
        super().__init__(on_disconnect, on_sent, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._chunks, self._encoding, self._end, self._on_error = chunks, encoding, end, on_error

    async def _write(self, write: Write) -> bytes:
        last_events, unpaused = b"", 0  # unpaused: bytes written since other tasks could run
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    if isinstance(chunk, LastEvents):
                        last_events = chunk
                    elif isinstance(chunk, bytes):
                        await write(chunk)
                    elif is_lazy(chunk):
                        async for part in self._encoding.parts(chunk, _event_prefix(chunk), b"\n\n"):
                            await write(part)
                            unpaused += len(part)
                    else:
                        encoded = event(chunk)
                        await write(encoded)
                        unpaused += len(encoded)
                    if unpaused > PAUSE_BYTES:  # taking chunks need not wait, and would block the loop
                        await self._encoding.pause()
                        unpaused = 0
                return last_events + self._end
            except Exception as e:
                return last_events + self._error_event(e)

    def _error_event(self, error: Exception) -> bytes:
        """Log an exception that ends the stream, and return the stream's end."""
        if not isinstance(error, ApiError):
            log.error("a stream failed%s", code_location(error))
            return self._on_error(internal())
        if error.status >= 500:
            log.warning("a stream ended: %s%s", error.message, code_location(error.__cause__))
        return self._on_error(error)


def catch_errors(handler: Handler) -> Handler:
    """Wrap a route's handler, a method of an object with `serving`, so that its exceptions become error responses.

    For unexpected exceptions the code location is logged, and the client gets a generic error.
    """

    @functools.wraps(handler)
    async def safe(self: Any, request: Request) -> Response:
        try:
            return await handler(self, request)
        except ApiError as e:
            record_error(request.scope, e)
            if e.status >= 500 and e.reason is None:  # refusals appear in the request's own line
                log.warning("%s %s: %s%s", request.scope["llmc.id"], e.status, e.message, code_location(e.__cause__))
            return as_error(e, request.scope["path"])
        except (ClientDisconnected, ClientDisconnect):
            self.serving.metrics.count_disconnect()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as e:
            log.error("%s failed%s", request.scope["llmc.id"], code_location(e))
            return as_error(internal(), request.scope["path"])

    return safe


def record_error(scope: Scope, error: ApiError) -> None:
    """Add the error to the request's log line."""
    record = scope.get("llmc.record")
    if record is not None:
        record.fail(error.code, error.reason)


def code_location(error: BaseException | None) -> str:
    """Return where an exception occurred, for the log: types and lines, but no messages, which may quote requests."""
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return f": {type(error).__name__} at " + " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[::-1]
    )


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, `work` is cancelled and ClientDisconnected raised.

    A disconnect after the end of `work` is ignored: the caller has to receive the result, which it may have to close.
    """
    task, watcher = asyncio.current_task(), asyncio.ensure_future(_disconnected(receive))
    assert task is not None
    disconnected = ended = False

    def cancel(_: Any) -> None:
        nonlocal disconnected
        if not ended:  # a callback that is already scheduled cannot be removed
            disconnected = True
            task.cancel()

    watcher.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if disconnected and not task.uncancel():
            raise ClientDisconnected from None
        raise
    finally:
        ended = True
        watcher.remove_done_callback(cancel)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def _in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which runs in a task of its own: each token of a stream wakes its task, which then
    passes the frames of the stream, and not those of the application around it. Cancelling cancels the task."""
    return await asyncio.create_task(work)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
