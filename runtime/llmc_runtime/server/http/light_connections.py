"""Light connections: sockets without transport and protocol, on which requests are refused cheaply under overload.

asyncio's transport and protocol and the HTTP parser cost several times as much as a refusal. While the server refuses
requests (see load_shedding), a new connection is therefore kept as a plain socket. The head of its next request is read
with MSG_PEEK, which leaves the data in the kernel's buffer. A refused request is answered and consumed. A request that
may be served converts the connection to an ordinary one, whose parser then reads the same data. If the first request
has arrived when the connection is accepted, and its refusal closes the connection, the event loop never watches it.
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

_PEEK = 16 << 10  # maximum bytes of a head; a longer one is left to the parser
_PEEK_FLAGS = socket.MSG_PEEK | socket.MSG_DONTWAIT
_MAX_READS = 4  # requests, or parts of refused bodies, handled per event, so that pipelining clients alternate
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
    """The state of a light connection.

    `sock` may be in blocking mode. `promote(passed)` converts it to an ordinary connection; `passed` says that load
    shedding has checked the head of the next request, which may be served. `skip` bytes of a refused body are still to
    arrive. The connection is closed at `deadline` (loop time).
    """

    sock: socket.socket
    promote: Callable[[bool], object]
    deadline: float
    skip: int = 0
    taken: int = 0  # bytes that the last refusal took from the socket
    passed: bool = False  # the argument of `promote`
    used: bool = False  # whether a request was refused
    fd: int = -1  # set while the event loop watches it; asyncio gets the number, because it formats file objects


class _State(enum.Enum):
    """What happens to a light connection after its data was handled: it stays, is promoted, or is closed."""

    LIGHT = enum.auto()
    ORDINARY = enum.auto()
    CLOSED = enum.auto()


class LightConnections:
    """The light connections of one server.

    `capacity` returns how many connections may become light now; 0 if no request would be refused. `refusal` takes a
    head and returns the response, or None if the request may be served. `timeout_response` is sent to a client that
    sends no request within `head_seconds`; after a response, the next request must begin within `keep_alive` seconds.
    `on_change` is called with +1 and -1 as light connections are opened and closed.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        refusal: Callable[[bytes], Refusal | None],
        on_change: Callable[[int], None],
        timeout_response: bytes,
        head_seconds: float,
        keep_alive: float,
    ) -> None:
        self._capacity, self._refusal, self._on_change = capacity, refusal, on_change
        self._timeout_response = timeout_response
        self._head_seconds, self._keep_alive = head_seconds, keep_alive
        self._all: set[_Light] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    def accept(self, listener: socket.socket, promote: Promote, count: int) -> bool:
        """Accept up to `count` connections that wait at `listener`, within the capacity.

        `promote` takes a socket, the address of its peer, and `passed` (see _Light). Returns False if asyncio has to
        accept further connections.
        """
        loop, accepted = asyncio.get_running_loop(), min(count, self._capacity())
        for _ in range(accepted):
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
        return accepted == count

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
        self._on_change(1)
        if isinstance(fair := getattr(loop, "fair", None), FairSelector):
            fair.add_client(light.fd)
            if not light.used:
                fair.batches.expect()
        loop.add_reader(light.fd, self._readable, loop, light)
        if self._sweeping is None:
            self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep, loop)

    def _release(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        self._all.discard(light)
        self._on_change(-1)
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
            for _ in range(_MAX_READS):
                data = light.sock.recv(_PEEK, _PEEK_FLAGS)
                if light.skip and data:
                    light.skip -= len(light.sock.recv(min(light.skip, len(data))))
                elif (state := self._refuse(loop, light, data)) is not _State.LIGHT:
                    return state
                elif not light.skip and len(data) == light.taken:
                    break  # most clients wait for the response, so there is nothing to read; if there is, epoll says so
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return _State.CLOSED
        return _State.LIGHT

    def _refuse(self, loop: asyncio.AbstractEventLoop, light: _Light, data: bytes) -> _State:
        """Answer the request at the start of `data` if it is refused. Return ORDINARY if it is left to the parser."""
        end = data.find(b"\r\n\r\n") + 4
        refusal = self._refusal(data[:end]) if end >= 4 else None
        if not data:
            return _State.CLOSED
        light.passed = refusal is None and end >= 4
        if refusal is None or (refusal.closes and refusal.length > len(data) - end):
            return _State.ORDINARY
        light.taken = len(light.sock.recv(min(len(data), end + refusal.length)))
        if not _sent(light.sock, refusal.data) or refusal.closes:
            return _State.CLOSED
        light.skip = end + refusal.length - light.taken
        light.used, light.deadline = True, loop.time() + self._keep_alive
        return _State.LIGHT

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections whose next request did not arrive in time."""
        now = loop.time()
        for light in [light for light in self._all if light.deadline <= now]:
            if not light.used:
                _sent(light.sock, self._timeout_response)
            self._release(loop, light)
            light.sock.close()
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep, loop) if self._all else None


def _sent(sock: socket.socket, data: bytes) -> bool:
    """Send without blocking. Returns False if the client does not take it."""
    try:
        return sock.send(data, socket.MSG_DONTWAIT) == len(data)
    except OSError:
        return False
