"""HTTP/1.1 connections: uvicorn's protocol with limits on their number and on times, and with errors as JSON.

The head of a request must arrive in time, and a client that stops reading its response is disconnected. Limits on
bodies apply where the body is read (see auth.read_body); uvicorn closes idle connections.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmc_runtime.server.http.connection_limit import ConnectionLimit, limit_unsent
from llmc_runtime.server.http.errors import ApiError, closing_response, head_timeout, too_many_connections
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.http.fair_selector import FairSelector
from llmc_runtime.server.http.light_connections import LightConnections
from llmc_runtime.server.http.lingering_close import Lingering
from llmc_runtime.server.http.parser_limits import ArrivingHead, first_slice, invalid_head, use_linear_patterns
from llmc_runtime.server.http.probes import PROBES
from llmc_runtime.server.http.read_turns import is_probe
from llmc_runtime.server.load_shedding import LoadShedder

MAX_HEAD_BYTES = 64 << 10  # bytes; longer heads are rejected
_READ = 16 << 10  # bytes read at a time from a body of known length
_READ_PARSED = 2 << 10  # maximum bytes per read of heads and chunked bodies: chunks of one byte take 3 ms to parse
_MAX_ANSWERED = 8  # requests of a pipeline that are refused, or answered as probes, at a time
_MAX_UNPARSED = 2 << 10  # bytes of a chunked body that are not parsed yet: the line before a chunk, or trailers

use_linear_patterns()


class HttpConnection(H11Protocol):
    """One connection. Subclasses set `limit`, shared by all connections of a server, and `shed`."""

    limit = ConnectionLimit()
    shed: LoadShedder | None = None
    head_seconds = 15.0
    write_seconds = 30.0  # a client must read some of its response within this time
    _head_timer: asyncio.TimerHandle | None = None  # runs while a head is arriving
    _progress_timer: asyncio.TimerHandle | None = None  # runs while the client reads nothing
    _fair: FairSelector | None = None  # set if the loop limits the connections served per iteration
    _light: LightConnections | None = None  # takes the connection over, see `_lend`
    _fd = -1
    _over_limit = False  # whether there are more connections than the limit allows
    passed = False  # whether `shed` has seen the head of the next request, and passed it on
    granted = False  # whether the head of the next request has had its turn, see HeadTurns
    _completing = False  # whether the next request of a pipeline has to wait for its turn
    _discard = 0  # bytes of a refused body still to be discarded
    _unparsed = b""  # received data that is parsed in later slices

    @property
    def app(self) -> Any:
        """The application that uvicorn calls."""
        return self._run

    @app.setter
    def app(self, inner: Any) -> None:
        self._inner = inner

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        own: dict[str, Any] = {"llmc.hold": partial(self.limit.unsent.hold, self)}
        if scope["http_version"] == "1.1":
            own["llmc.part"] = self._send_part
        scope.update(own)
        try:
            await self._inner(scope, receive, send)
        finally:
            for name in own:
                scope.pop(name)  # a cycle of references, see Lingering.end

    async def _send_part(self, body: bytes) -> None:
        """Send a nonempty part of a started chunked response without the layers of ASGI: streams consist of many."""
        if self.flow.write_paused:
            await self.flow.drain()
        if not (self.cycle.disconnected or self.transport.is_closing()):  # asyncio logs a line for each such write
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection and start the timer for the first head."""
        self._lingering = Lingering(transport, self._unread, self.limit.lingering)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        self._inner_transport: Any = transport
        self._head = ArrivingHead(self.limit.heads)
        self._tls = transport.get_extra_info("sslcontext") is not None
        transport.max_size = _READ_PARSED  # type: ignore[attr-defined]  # an attribute of asyncio's socket transports
        limit_unsent(transport, self.write_seconds)
        if isinstance(self.loop, ServerLoop):
            self._fair, self._fd = self.loop.fair, transport.get_extra_info("socket").fileno()
            self._fair.add_client(self._fd)
            self._light = None if self._tls else self.loop.light
        excess = self.limit.enter(self)
        if excess > 0:
            self._over_limit = True
            self.limit.on_refused()
            if excess > self.limit.max_refused:
                transport.abort()
                return
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_timeout)

    def data_received(self, data: bytes) -> None:
        """Handle a part of a head or of a body."""
        if self._lingering.lingers:
            self.limit.body_turns.leave(self)
            return
        if self._over_limit:  # answered once it has sent something, as the client might miss the response otherwise
            self._refuse(too_many_connections())
            return
        if self._unparsed:
            self._unparsed += data
            self.pause_reading()
            return
        granted, self.granted = self.granted, False
        if self.passed:
            self.passed = False
        elif self._discard or (
            self.shed is not None and self._between_requests and (self.shed.active or is_probe(data))
        ):
            data = self._shed(data)
            if not data:
                return
        if not granted and (self._between_requests or self.limit.head_turns.waits(self)):
            self._unset_keepalive_if_required()
            self.limit.head_turns.begin(self, data)
        else:
            self.parse(data)

    def refuse(self, data: bytes) -> None:
        """Refuse the request that `data` begins with, which has waited for its turn."""
        if not self.transport.is_closing() and (rest := self._shed(data)):
            self.limit.head_turns.begin(self, rest)

    def parse(self, data: bytes) -> None:
        """Parse part of a head or of a body; b"": what the parser has received already."""
        if self.transport.is_closing():
            return
        if self._head_timer is None and self._idle:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_timeout)
        in_head = self._idle and self.conn.their_state is h11.IDLE  # not in a body that was answered before its end
        if in_head and (error := self._head.add(data or self.conn.trailing_data[0])) is not None:
            self._refuse(error)
            return
        if data:
            data = self._slice(data)
            super().data_received(data)
        else:
            super().handle_events()
        if not self._idle:
            self._head.clear()
            self._cancel_head_timer()
            self.limit.begin(self)
        known = self._known_length
        self._inner_transport.max_size = _READ if known else _READ_PARSED
        sending_body = self.conn.their_state is h11.SEND_BODY
        if sending_body and not known and len(self.conn.trailing_data[0]) > _MAX_UNPARSED:
            cause = f"the line before a chunk, or the trailers of the body, have more than {_MAX_UNPARSED} bytes"
            self._reject_body(ApiError(cause, status=431, code="headers_too_large"))
            return
        self._set_read_priority(sending_body, len(data))

    def _set_read_priority(self, sending_body: bool, size: int) -> None:
        """Tell the selector and the turns of bodies what the client is sending, after `size` bytes were parsed."""
        if self._fair is not None and not (sending_body or self._idle) and self.scope["path"] in PROBES:
            self._fair.set_probing(self._fd)
        elif self._fair is not None:
            self._fair.set_sending_body(self._fd, sending_body)
        if sending_body and not self._lingering.lingers:
            self.limit.body_turns.read(self, size)
        else:
            self.limit.body_turns.leave(self)

    def _slice(self, data: bytes) -> bytes:
        """Return the first slice of received data, and parse the others later, unless they are of a known length."""
        head = data[: data.find(b"\r\n\r\n") + 4] if self._idle else b""
        if not self._known_length and b"content-length" not in head.lower():
            data, self._unparsed = first_slice(data, len(head))
        if self._unparsed:
            self._defer(self._unparsed)
        return data

    def _defer(self, data: bytes) -> None:
        """Handle received data in a later iteration of the event loop."""
        self._unparsed = data
        self.pause_reading()
        self.limit.slice_turns.add(self._parse_rest)

    def _parse_rest(self) -> None:
        rest, self._unparsed = self._unparsed, b""
        if not self.transport.is_closing():
            self.resume_reading()
            self.data_received(rest)

    @property
    def _known_length(self) -> bool:
        """Whether a request is being answered whose head has the length of its body."""
        return not self._idle and any(name == b"content-length" for name, _ in self.headers)

    def pause_reading(self) -> None:
        """Stop reading; see read_turns."""
        self._inner_transport.pause_reading()

    def resume_reading(self) -> None:
        """Continue reading; see read_turns."""
        if not (self.flow.read_paused or self._unparsed):
            self._inner_transport.resume_reading()

    @property
    def key(self) -> str:
        """The API key of the latest request; "" for none."""
        return str((self.scope or {}).get("llmc.key", ""))

    def evict(self) -> None:
        """Close the connection at once, as there are too many. With TLS, abort it: closing waits for the client."""
        if self._inner_transport.get_write_buffer_size() or self._tls:
            self._inner_transport.abort()
        else:
            self._inner_transport.close()

    def _shed(self, data: bytes) -> bytes:
        """Refuse requests at the start of `data` that can be refused by their heads, and answer probes.

        Called between two requests. Returns the rest of the data, for the parser; b"" if it is handled later.
        """
        assert self.shed is not None
        common, answered = self.server_state.default_headers, 0
        while data and not self.transport.is_closing():  # clients that do not read responses are left to the parser
            if self._discard:
                discarded = min(self._discard, len(data))
                self._discard, data = self._discard - discarded, data[discarded:]
                if self._discard:
                    return b""
                continue
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or self.flow.write_paused:
                return data
            if answered == _MAX_ANSWERED:
                self._unset_keepalive_if_required()
                self._defer(data)
                return b""
            answer = self.shed.probe(data[:end], common)
            if answer is None and self.shed.active:
                answer = self.shed.answer(data[:end], common)
            if answer is None:
                return data
            answered += 1
            self._cancel_head_timer()
            if self._fair is not None:
                self._fair.set_probing(self._fd, answer.is_probe)
                if not answer.is_probe:
                    self._fair.batches.refused()
            self._discard, data = answer.length, data[end:]
            if self._discard <= len(data):
                data = data[self._discard :]
                self._discard = 0
            self.transport.write(answer.data)
            if answer.closes:
                self.transport.close()
        if not self.transport.is_closing():
            self._await_next()
        return b""

    def _await_next(self) -> None:
        """Close the connection unless a refused body, or the next request, arrives in time.

        Without a body to wait for, the connection is lent to the light ones.
        """
        self._unset_keepalive_if_required()
        if self._discard or not self._lend():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Wait for the next request. If it will probably be refused, the connection is lent to the light ones."""
        self._completing = True
        super().on_response_complete()
        self._completing = False
        if self._idle:
            self.limit.rest(self)
        closing = self.transport.is_closing()
        if self.shed is not None and self.shed.overloaded() and self._between_requests and not closing and self._lend():
            self._unset_keepalive_if_required()

    def handle_events(self) -> None:
        """Handle what the parser has received. The next request of a pipeline waits for its turn."""
        waiting = self.conn.trailing_data[0] if self._completing else b""
        if waiting:
            self._unset_keepalive_if_required()
            self.limit.head_turns.begin(self, b"", waiting)
        else:
            super().handle_events()

    def _lend(self) -> bool:
        """Lend the connection to the light ones, if there are any and the client has been sent everything."""
        transport = self._inner_transport
        if self._light is None or transport.get_write_buffer_size():
            return False
        self._light.lend(transport._sock, self._end_loan, transport.abort)
        return True

    def _end_loan(self, data: bytes, passed: bool) -> None:
        """Handle `data`, which light connections have read of the next request."""
        self.passed = passed
        self.data_received(data)

    @property
    def _between_requests(self) -> bool:
        """Whether the connection is between two requests, with nothing of the next one received."""
        states = self.conn.states
        unread = self.conn.trailing_data[0] or self._unparsed
        return states[h11.CLIENT] is states[h11.SERVER] is h11.IDLE and not unread and self._idle

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that belongs to the connection."""
        self.limit.leave(self)
        if self._light is not None:
            self._light.take_back(self._fd)
        if self._fair is not None:
            self._fair.remove_client(self._fd)
        self._lingering.end()
        self._head.clear()
        self._cancel_head_timer()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start to watch the client, as the write buffer is full."""
        super().pause_writing()
        unsent = self.transport.get_write_buffer_size()
        self._watch(unsent)
        self.limit.unsent.add(self, unsent)

    def resume_writing(self) -> None:
        """Stop watching the client."""
        self._stop_watching()
        self.limit.unsent.remove(self)
        super().resume_writing()

    def _watch(self, unsent: int) -> None:
        self._progress_timer = self.loop.call_later(self.write_seconds, self._check_progress, unsent)

    def _check_progress(self, before: int) -> None:
        """Disconnect the client if it has not read anything since the last check, which aborts its request."""
        unsent = self.transport.get_write_buffer_size()
        if unsent < before:
            self._watch(unsent)
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._progress_timer = None

    def send_400_response(self, msg: str) -> None:
        """Reject input that is not HTTP, while its exception is handled. A response in progress is cut off."""
        if self._idle:
            self._refuse(invalid_head(sys.exception()))
        else:
            self._reject_body(ApiError("the chunks of the body are malformed", code="invalid_http"))

    def _reject_body(self, error: ApiError) -> None:
        """Close the connection, which ends its request: its chunks are malformed, or a line is too long."""
        if not (self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(closing_response(error))
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.transport.close()

    def _unread(self) -> bool:
        """Return whether the client may still be sending data that will not be read."""
        return self._over_limit or self._discard > 0 or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _head_timeout(self) -> None:
        self._head_timer = None
        if self.limit.head_turns.waits(self):
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_timeout)
        elif self._idle and not self.transport.is_closing():
            self.transport.write(head_timeout(self.head_seconds))
            self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Send an error without the parser, and close the connection."""
        self.transport.write(closing_response(error))
        self.transport.close()
