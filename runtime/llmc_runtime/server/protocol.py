"""HTTP/1.1 connections: uvicorn's protocol with limits on their number and on times, and with errors as JSON.

The head of a request must arrive in time, and a client that stops reading its response is disconnected. Limits on
bodies apply where the body is read (see guard); uvicorn closes idle connections.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http.body_turns import BodyTurns
from llmc_runtime.server.http.errors import ApiError, unavailable
from llmc_runtime.server.http.fair_selector import FairSelector
from llmc_runtime.server.http.head_turns import HeadTurns
from llmc_runtime.server.http.light_connections import LightConnections
from llmc_runtime.server.http.lingering_close import Lingering, Room
from llmc_runtime.server.http.listen import ServerLoop
from llmc_runtime.server.load_shedding import Answer, Shed

MOST_HEAD = 64 << 10  # bytes; longer heads are rejected
MOST = 4096  # default maximum number of connections
_READ = 16 << 10  # bytes read at a time from a body of known length
_READ_PARSED = 2 << 10  # the same for heads and chunked bodies: chunks of one byte take 3 ms to parse
_WORDS: Mapping[int, str] = MappingProxyType(
    {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}
)
_MOST_LINES = 256  # of a head; longer heads are rejected before they are parsed
_OWN, _LEAST_OWN = 128, 40  # descriptors reserved for the server itself and for open files, and their minimum
_POLITE = 64  # connections over the limit that receive an error response; further ones are closed at once


@dataclass
class Bound:
    """The limit on connections and their current number.

    `refused` is called for each connection over the limit. The first `polite` of these receive an error response.
    """

    most: int = MOST
    refused: Callable[[], None] = lambda: None
    open: int = 0
    polite: int = _POLITE
    lingering: Room = field(default_factory=Room)
    turns: BodyTurns = field(default_factory=BodyTurns)
    heads: HeadTurns = field(default_factory=HeadTurns)


def descriptors(wanted: int | None) -> int:
    """Return the maximum number of connections: `wanted`, or MOST and at most what the system allows.

    The process's soft limit of file descriptors is raised if necessary. Raises LlmcError E667 if `wanted` connections
    need more descriptors than the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = (wanted or MOST) + _POLITE + _OWN
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < need and wanted is not None:
            cause = f"{wanted} connections need {need} file descriptors, the limit is {hard}"
            raise LlmcError("E667", cause, f"--max-connections {allowed(hard)[0]}, or a higher ulimit -n")
        return min(wanted or MOST, allowed(soft)[0])
    return wanted or MOST


def allowed(soft: int) -> tuple[int, int]:
    """Split `soft` descriptors into connections to serve and connections over the limit to answer with an error.

    If there are few descriptors, half of them are reserved for the server, and a quarter of the rest is for errors.
    """
    room = soft - min(_OWN, max(_LEAST_OWN, soft // 2))
    polite = min(_POLITE, max(1, room // 4))
    return max(1, room - polite), polite


def bound_of(most: int, refused: Callable[[], None]) -> Bound:
    """Return a limit of `most` connections, with as many error responses as the process's descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Bound(most, refused, polite=_POLITE if soft == resource.RLIM_INFINITY else allowed(soft)[1])


def wire(bound: Bound, shed: Shed | None = None) -> type[Wire]:
    """Return a protocol class whose connections share `bound`. `shed` refuses requests under overload."""
    return type("BoundWire", (Wire,), {"bound": bound, "shed": shed})


def light_connections(protocol: type[Wire], state: ServerState, keep_alive: float) -> LightConnections:
    """Return the light connections of a server whose others are instances of `protocol` and share `state`."""
    bound, shed = protocol.bound, protocol.shed
    assert shed is not None

    def refusal(head: bytes) -> Answer | None:
        answer = shed.answer(head, state.default_headers)
        state.total_requests += answer is not None
        return answer

    def opened(change: int) -> None:
        bound.open += change

    return LightConnections(
        active=lambda: shed.active and bound.open < bound.most,
        refusal=refusal,
        opened=opened,
        late=_late(protocol.head_seconds),
        head_seconds=protocol.head_seconds,
        keep_alive=keep_alive,
    )


class Wire(H11Protocol):
    """One connection."""

    bound = Bound()
    shed: Shed | None = None
    head_seconds = 15.0
    write_seconds = 30.0  # a client must read some of its response within this time
    _timer: asyncio.TimerHandle | None = None  # runs while a head is arriving
    _stalled: asyncio.TimerHandle | None = None  # runs while the client reads nothing
    _fair: FairSelector | None = None  # set if the loop limits the connections served per iteration
    _fd = -1
    _extra = False  # whether the connection is over the limit
    _skip = 0  # bytes of a refused body still to be discarded
    _lines = 0  # lines of the arriving head so far

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inner, self.app = self.app, self._run

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["http_version"] == "1.1":
            scope["llmc.part"] = self._part
        await self._inner(scope, receive, send)

    async def _part(self, body: bytes) -> None:
        """Send a nonempty part of a started chunked response, bypassing the layers of ASGI, as streams consist of
        many.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection and start the timer for the first head."""
        self._end = Lingering(transport, self._unread, self.bound.lingering)
        super().connection_made(self._end)  # type: ignore[arg-type]
        self._inner_transport: Any = transport
        transport.max_size = _READ_PARSED  # type: ignore[attr-defined]  # of asyncio's socket transports
        _limit_unsent(transport, self.write_seconds)
        if isinstance(self.loop, ServerLoop):
            self._fair, self._fd = self.loop.fair, transport.get_extra_info("socket").fileno()
            self._fair.add_client(self._fd)
        self.bound.open += 1
        over = self.bound.open - self.bound.most
        if over > 0:
            self._extra = True
            self.bound.refused()
            if over > self.bound.polite:
                transport.abort()
                return
        self._timer = self.loop.call_later(self.head_seconds, self._late)

    def data_received(self, data: bytes) -> None:
        """Handle a part of a head or of a body."""
        if self._end.lingers:
            self.bound.turns.leave(self)
            return
        if self._extra:  # answered once it has sent something, as the client might miss the response otherwise
            self._refuse(503, unavailable("the server has too many connections", "too_many_connections"))
            self.transport.close()
            return
        if self._skip or (self.shed is not None and self.shed.active and self._between):
            data = self._shed(data)
            if not data:
                return
        if self._between:
            self.bound.heads.begin(self, data)
        else:
            self.parse(data)

    def parse(self, data: bytes) -> None:
        """Parse part of a head or of a body."""
        if self.transport.is_closing():
            return
        if self._timer is None and self._idle:
            self._timer = self.loop.call_later(self.head_seconds, self._late)
        if self._idle and self._too_many_lines(data):
            cause = f"the head of the request has more than {_MOST_LINES} lines"
            self._refuse(431, ApiError(cause, code="headers_too_large"))
            self.transport.close()
            return
        super().data_received(data)
        if not self._idle:
            self._lines = 0
            self._cancel()
        known = not self._idle and any(name == b"content-length" for name, _ in self.headers)
        self._inner_transport.max_size = _READ if known else _READ_PARSED
        bulk = self.conn.their_state is h11.SEND_BODY
        if self._fair is not None:
            self._fair.set_bulk(self._fd, bulk)
        if bulk and not self._end.lingers:
            self.bound.turns.read(self, len(data))
        else:
            self.bound.turns.leave(self)

    def pause_head(self) -> None:
        """Stop reading; see HeadTurns."""
        self._inner_transport.pause_reading()

    def resume_head(self) -> None:
        """Continue reading; see HeadTurns."""
        if not self.flow.read_paused:
            self._inner_transport.resume_reading()

    def pause_body(self) -> None:
        """Stop reading; see BodyTurns."""
        self._inner_transport.pause_reading()

    def resume_body(self) -> None:
        """Continue reading; see BodyTurns."""
        if not self.flow.read_paused:
            self._inner_transport.resume_reading()

    def _too_many_lines(self, data: bytes) -> bool:
        """Count the lines of the arriving head and return whether they are too many."""
        end = data.find(b"\r\n\r\n")
        self._lines += data.count(b"\n") if end < 0 else data.count(b"\n", 0, end)
        return self._lines > _MOST_LINES

    def _shed(self, data: bytes) -> bytes:
        """Refuse requests at the start of `data` that can be refused from their heads alone.

        Called between two requests. Returns the rest of the data, for the parser.
        """
        assert self.shed is not None
        while data and not self.transport.is_closing():  # clients that do not read responses are left to the parser
            if self._skip:
                skipped = min(self._skip, len(data))
                self._skip, data = self._skip - skipped, data[skipped:]
                if not self._skip:
                    self._await_next()
                continue
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or self.flow.write_paused:
                return data
            answer = self.shed.answer(data[:end], self.server_state.default_headers)
            if answer is None:
                return data
            self._cancel()
            self.server_state.total_requests += 1
            self._skip, data = answer.length, data[end:]
            if self._skip <= len(data):
                self._skip, data = 0, data[self._skip :]
            self.transport.write(answer.data)
            if answer.closes:
                self.transport.close()
            else:
                self._await_next()
        return b""

    def _await_next(self) -> None:
        """Close the connection unless a refused body, or the next request, arrives in time."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    @property
    def _between(self) -> bool:
        """Whether the connection is between two requests, with nothing of the next one received."""
        states = self.conn.states
        return states[h11.CLIENT] is states[h11.SERVER] is h11.IDLE and not self.conn.trailing_data[0] and self._idle

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that belongs to the connection."""
        self.bound.open -= 1
        if self._fair is not None:
            self._fair.remove_client(self._fd)
        self.bound.turns.leave(self)
        self.bound.heads.leave(self)
        self._end.end()
        self._cancel()
        self._flows()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start to watch the client, as the write buffer is full."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop watching the client."""
        self._flows()
        super().resume_writing()

    def _watch(self, unsent: int) -> None:
        self._stalled = self.loop.call_later(self.write_seconds, self._look, unsent)

    def _look(self, before: int) -> None:
        """Disconnect the client if it has not read anything since the last check, which aborts its request."""
        unsent = self.transport.get_write_buffer_size()
        if unsent < before:
            self._watch(unsent)
        else:
            self.transport.abort()

    def _flows(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        """Reject input that is not HTTP. A response in progress is cut off."""
        if self._idle:
            self._refuse(400, ApiError("this is no request in HTTP/1.1, or its head is too long", code="invalid_http"))
        self.transport.close()

    def _unread(self) -> bool:
        """Return whether the client may still be sending data that will not be read."""
        return self._extra or self._skip > 0 or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _late(self) -> None:
        self._timer = None
        if self._idle and not self.transport.is_closing():
            self.transport.write(_late(self.head_seconds))
            self.transport.close()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, error: ApiError) -> None:
        self.transport.write(_refusal(status, error))


def _refusal(status: int, error: ApiError) -> bytes:
    """Return the response to a request that never reached the application."""
    body = msgspec.json.encode(error.body())
    head = f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _late(seconds: float) -> bytes:
    return _refusal(408, ApiError(f"the head of the request did not come within {seconds:g} s", code="timeout"))


def _limit_unsent(transport: asyncio.Transport, seconds: float) -> None:
    """Have the kernel drop a connection whose peer does not acknowledge data, even after it was closed here."""
    given = transport.get_extra_info("socket")
    if given is not None and given.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        given.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
