"""Answers the requests of a light connection that are refused, or are health probes. No call on a socket blocks.

Load shedding makes the refusals and the answers from the heads of requests (`Refuse` and `Probe`).
"""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_READ = 2 << 10  # bytes read at a time, and the maximum of a head; a longer one is left to the parser
_MAX_READS = 16  # per turn of a connection, so that connections alternate
_MAX_REQUESTS = 4  # maximum requests per read; an ordinary connection handles the rest of a pipeline
_READ_BODY = 14 << 10  # bytes of a body read together with its head: it has to arrive before a connection is closed
_LAST_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_MORE", 0)
_AVERAGED = 16  # connections over which the estimate averages; one of them is left open
_MIN_RETURNING = 0.25  # part of the connections


class Answer(NamedTuple):
    """A complete response, the length of the request's body in bytes, whether the connection is closed, and whether the
    request is a health probe."""

    data: bytes
    length: int
    closes: bool
    is_probe: bool = False


class Refuse(Protocol):
    """Refuses the requests of one turn, in which nothing is admitted and nothing ends."""

    def __call__(self, head: bytes, last: bool, /) -> Answer | None:
        """Return the refusal of a request, whose connection is to be closed if it is the `last`; None if the request
        may be served."""

    def repeated(self, data: bytes, /) -> bytes | None:
        """Return the response to `data` if that is one whole request, refused like an earlier one of the turn, whose
        connection stays open; None for anything else. This takes a fraction of the time of a call."""


Probe = Callable[[bytes], Answer | None]


class ReturningClients:
    """Estimates which part of the new connections sends another request after their first one was refused.

    If few do, most are closed with the first refusal: the server sends the end of the connection with the
    response, and does not wait for the client's.
    """

    def __init__(self) -> None:
        self._part, self._count = 1.0, 0

    def saw(self, returned: bool) -> None:
        """Record whether a connection sent another request after its first one was refused, or was closed."""
        self._part += (returned - self._part) / _AVERAGED

    def next_closes(self) -> bool:
        """Return whether the next new connection is closed with its first refusal; some stay open, to be recorded."""
        self._count += 1
        return self._part < _MIN_RETURNING and self._count % _AVERAGED > 0


def accept_waiting(listener: socket.socket, count: int) -> tuple[list[tuple[socket.socket, object]], bool]:
    """Return up to `count` waiting connections with their addresses, and whether accepting failed."""
    accepted: list[tuple[socket.socket, object]] = []
    family, kind = int(listener.family), int(listener.type)
    try:
        while len(accepted) < count:  # the method `accept` looks up enumerations, which takes as long as accepting
            fd, address = listener._accept()  # type: ignore[attr-defined]
            accepted.append((socket.socket(family, kind, listener.proto, fd), address))
    except (BlockingIOError, InterruptedError, ConnectionAbortedError):
        pass
    except OSError:  # asyncio's method reports it, and tries again later
        return accepted, True
    return accepted, False


def receive_now(sock: socket.socket, size: int) -> bytes:
    """Return up to `size` bytes of a body that have arrived, at most _READ_BODY. Errors are left to the next read."""
    try:
        return sock.recv(min(size, _READ_BODY), socket.MSG_DONTWAIT)
    except OSError:
        return b""


def send_now(sock: socket.socket, data: bytes, last: bool = False) -> bool:
    """Send without blocking. Returns False if the client does not take it.

    The `last` data leaves together with the end of the connection, when the socket is closed.
    """
    try:
        return sock.send(data, _LAST_FLAGS if last else socket.MSG_DONTWAIT) == len(data)
    except OSError:
        return False


@dataclass(eq=False, slots=True)
class LightConnection:
    """The state of a light or lent connection.

    `sock` may be in blocking mode. `promote(data, passed)` makes it an ordinary connection (again), which begins with
    `data`; `passed`: load shedding has checked the head of the next request, which may be served. `close` ends
    the connection, at `deadline` (loop time) or earlier. `skip` bytes of a refused body are still to arrive.
    """

    sock: socket.socket
    promote: Callable[[bytes, bool], object]
    close: Callable[[], object]
    deadline: float
    lent: bool = False
    used: bool = False  # whether a request was refused, or a probe answered
    fresh: bool = True  # whether nothing was sent after the first refusal so far
    probing: bool = False  # whether the latest request was a health probe
    first: bool = False  # whether the selector serves it first for that
    skip: int = 0
    data: bytes = b""  # the arguments of `promote`
    passed: bool = False


class LightState(enum.Enum):
    """The state of a light connection after its data was handled: it stays, is promoted, or is closed."""

    LIGHT = enum.auto()
    ORDINARY = enum.auto()
    CLOSED = enum.auto()


def refuse_repeated(light: LightConnection, refuse: Refuse | None, deadline: float) -> bytes | None:
    """Return the refusal of a request on a kept connection that is like others of the turn; most are under overload.
    For anything else, leave what was read to `answer_waiting`, and return None."""
    if refuse is None or light.fresh or light.probing or light.skip or light.data:
        return None
    try:
        data = light.sock.recv(_READ, socket.MSG_DONTWAIT)
    except OSError:
        return None
    response = refuse.repeated(data)
    if response is None:
        light.data = data
        return None
    light.deadline = deadline
    return response


def answer_waiting(
    light: LightConnection, refuse: Refuse | None, probe: Probe, deadline: float, returning: ReturningClients
) -> tuple[LightState, bytes]:
    """Take the requests that are refused, and probes, up to the first that must be served. Return the responses.

    `deadline` is that of the next request.
    """
    responses = b""
    try:
        for _ in range(_MAX_READS):
            data, light.data = light.data, b""
            data = data or light.sock.recv(_READ, socket.MSG_DONTWAIT)
            if light.used and light.fresh:
                light.fresh = False
                returning.saw(bool(data))
            if not data:
                return LightState.CLOSED, responses
            state, response = _answer_from(light, data, refuse, probe, deadline, returning)
            responses += response
            if state is not LightState.LIGHT:
                return state, responses
            if len(data) < _READ:
                break  # most clients wait for the response, so there is nothing to read; if there is, epoll reports it
    except (BlockingIOError, InterruptedError):
        pass
    except OSError:
        return LightState.CLOSED, b""
    return LightState.LIGHT, responses


def _answer_from(
    light: LightConnection,
    data: bytes,
    refuse: Refuse | None,
    probe: Probe,
    deadline: float,
    returning: ReturningClients,
) -> tuple[LightState, bytes]:
    """Take the refused requests and the probes at the start of `data`. Return the responses.

    `light.data` is set to what remains.
    """
    responses, num_requests = b"", 0
    while data:
        if light.skip:
            skipped = min(light.skip, len(data))
            light.skip -= skipped
            data = data[skipped:]
            continue
        end = data.find(b"\r\n\r\n") + 4  # end of the head; below 4 if the head is incomplete
        answer = None
        checked = False  # whether `refuse` has looked at the request
        if end >= 4 and num_requests < _MAX_REQUESTS:
            answer = probe(data[:end])
            checked = refuse is not None
            if answer is None and refuse is not None:
                is_whole = end < len(data) < _READ  # whether the body seems complete
                answer = refuse(data[:end], is_whole and light.fresh and not light.used and returning.next_closes())
        if answer is None:
            light.data, light.passed = data, checked
            return LightState.ORDINARY, responses
        missing = end + answer.length - len(data)  # bytes of the body that have not arrived
        if missing > 0:
            data += receive_now(light.sock, missing)
        if answer.closes and answer.length > len(data) - end:
            light.data, light.passed = data, False
            return LightState.ORDINARY, responses
        responses += answer.data
        if answer.closes:
            return LightState.CLOSED, responses
        light.used, light.probing, light.deadline = True, answer.is_probe, deadline
        if missing == 0:  # most clients wait for the response
            return LightState.LIGHT, responses
        light.skip = answer.length
        data = data[end:]
        num_requests += 1
    return LightState.LIGHT, responses
