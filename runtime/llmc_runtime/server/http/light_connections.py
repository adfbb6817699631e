"""Connections that are refused without a transport and a protocol: the cheap path for new clients under overload.

A transport, a protocol and a parser cost several times as much as the refusal itself. While the server refuses requests
(see load_shedding), a new connection is therefore only a socket. Its requests are looked at in the kernel's buffer; a
refused one is answered and consumed, and the first that is not refused makes it an ordinary connection, which finds its
data untouched. If the first request has arrived when the connection is accepted, and its refusal closes the
connection, the event loop never learns of it.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from llmc_runtime.server.http.fair_selector import FairSelector

_PEEK = 16 << 10  # bytes looked at; a longer head is left to the parser
_LOOK = socket.MSG_PEEK | socket.MSG_DONTWAIT
_AT_ONCE = 4  # requests, or parts of refused bodies, handled per event, so that pipelining clients take turns
_SWEEP_SECONDS = 1.0  # between two checks of deadlines


Promote = Callable[[socket.socket, object, bool], object]


class Refusal(Protocol):
    """A complete response, the length of the request's body in bytes, and whether the connection is closed."""

    @property
    def data(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def closes(self) -> bool: ...


@dataclass(eq=False, slots=True)
class _Light:
    """A socket, which may be in blocking mode, and the function that makes it an ordinary connection; its argument is
    whether the head of the first request was looked at, and the request may be served.

    `skip` bytes of a refused body are still to arrive. The connection is closed at `deadline` (loop time).
    """

    sock: socket.socket
    promote: Callable[[bool], object]
    deadline: float
    skip: int = 0
    passed: bool = False  # the argument of `promote`
    used: bool = False  # whether a request was refused
    fd: int = -1  # while the event loop watches it; asyncio is given numbers, as it formats the objects it looks up


class _State(enum.Enum):
    """What became of a light connection: it stays one, becomes an ordinary one, or is closed."""

    LIGHT = enum.auto()
    ORDINARY = enum.auto()
    CLOSED = enum.auto()


class LightConnections:
    """The light connections of one server.

    `room` returns how many connections may become light now; 0 while no request would be refused. `refusal` takes a
    head and returns the response, or None if the request may be served. `late` is the response to a client that sends
    no request within `head_seconds`; after a response, the next request must begin within `keep_alive` seconds.
    `opened` is called with +1 and -1.
    """

    def __init__(
        self,
        room: Callable[[], int],
        refusal: Callable[[bytes], Refusal | None],
        opened: Callable[[int], None],
        late: bytes,
        head_seconds: float,
        keep_alive: float,
    ) -> None:
        self._room, self._refusal, self._opened, self._late = room, refusal, opened, late
        self._head_seconds, self._keep_alive = head_seconds, keep_alive
        self._all: set[_Light] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    def accept(self, listener: socket.socket, promote: Promote, count: int) -> bool:
        """Accept up to `count` connections that wait at `listener`, as far as there is room.

        `promote` takes a socket, the address of its peer, and the argument of _Light.promote. Returns False if others
        may wait that are for asyncio's method.
        """
        loop, room = asyncio.get_running_loop(), min(count, self._room())
        for _ in range(room):
            try:
                conn, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return True
            except OSError:  # asyncio's method reports it, and tries again later
                return False
            light = _Light(conn, partial(promote, conn, address), loop.time() + self._head_seconds)
            state = self._serve(loop, light)
            if state is _State.LIGHT:
                self._add(loop, light)
            elif state is _State.ORDINARY:
                light.promote(light.passed)
        return room == count

    def close(self) -> None:
        """Close all light connections."""
        loop = asyncio.get_running_loop()
        for light in list(self._all):
            self._release(loop, light)
            light.sock.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    def _add(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        """Watch a connection whose next request has not arrived yet."""
        light.fd = light.sock.fileno()
        self._all.add(light)
        self._opened(1)
        if isinstance(fair := getattr(loop, "fair", None), FairSelector):
            fair.add_client(light.fd)
            if not light.used:
                fair.expect()
        loop.add_reader(light.fd, self._readable, loop, light)
        if self._sweeping is None:
            self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep, loop)

    def _release(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        self._all.discard(light)
        self._opened(-1)
        loop.remove_reader(light.fd)
        if isinstance(fair := getattr(loop, "fair", None), FairSelector):
            fair.remove_client(light.fd)

    def _readable(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        """Handle what a watched connection has sent."""
        state = self._serve(loop, light)
        if state is not _State.LIGHT:
            self._release(loop, light)
        if state is _State.ORDINARY:
            light.promote(light.passed)
        elif state is _State.CLOSED:
            light.sock.close()

    def _serve(self, loop: asyncio.AbstractEventLoop, light: _Light) -> _State:
        """Refuse the requests that have arrived, up to the first that must be served."""
        try:
            for _ in range(_AT_ONCE):
                data = light.sock.recv(_PEEK, _LOOK)
                if light.skip and data:
                    light.skip -= len(light.sock.recv(min(light.skip, len(data))))
                elif (state := self._refuse(loop, light, data)) is not _State.LIGHT:
                    return state
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return _State.CLOSED
        return _State.LIGHT

    def _refuse(self, loop: asyncio.AbstractEventLoop, light: _Light, data: bytes) -> _State:
        """Answer the request at the start of `data` if it is refused. ORDINARY: it is for the parser."""
        end = data.find(b"\r\n\r\n") + 4
        refusal = self._refusal(data[:end]) if end >= 4 else None
        if not data:
            return _State.CLOSED
        light.passed = refusal is None and end >= 4
        if refusal is None or (refusal.closes and refusal.length > len(data) - end):
            return _State.ORDINARY
        light.sock.recv(end + refusal.length if refusal.closes else end)
        if not _sent(light.sock, refusal.data) or refusal.closes:
            return _State.CLOSED
        light.skip, light.used, light.deadline = refusal.length, True, loop.time() + self._keep_alive
        return _State.LIGHT

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections whose next request did not arrive in time."""
        now = loop.time()
        for light in [light for light in self._all if light.deadline <= now]:
            if not light.used:
                _sent(light.sock, self._late)
            self._release(loop, light)
            light.sock.close()
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep, loop) if self._all else None


def _sent(sock: socket.socket, data: bytes) -> bool:
    """Send without blocking. Returns False if the client does not take it."""
    try:
        return sock.send(data, socket.MSG_DONTWAIT) == len(data)
    except OSError:
        return False
