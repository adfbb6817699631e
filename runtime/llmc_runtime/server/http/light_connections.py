"""Connections that are refused without a transport and a protocol: the cheap path for new clients under overload.

A transport, a protocol and a parser cost several times as much as the refusal itself. While the server refuses requests
(see load_shedding), a new connection is therefore only a socket. Its requests are looked at in the kernel's buffer; a
refused one is answered and consumed, and the first that is not refused makes it an ordinary connection, which finds its
data untouched.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llmc_runtime.server.http.fair_selector import FairSelector

_PEEK = 16 << 10  # bytes looked at; a longer head is left to the parser
_AT_ONCE = 4  # requests, or parts of refused bodies, handled per event, so that pipelining clients take turns
_SWEEP_SECONDS = 1.0  # between two checks of deadlines


class Refusal(Protocol):
    """A complete response, the length of the request's body in bytes, and whether the connection is closed."""

    @property
    def data(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def closes(self) -> bool: ...


@dataclass(eq=False)
class _Light:
    """A socket, and the function that makes it an ordinary connection.

    `skip` bytes of a refused body are still to arrive. The connection is closed at `deadline` (loop time).
    """

    sock: socket.socket
    fd: int  # asyncio is given the number, as it formats the object that it looks up
    promote: Callable[[], object]
    deadline: float
    skip: int = 0
    used: bool = False  # whether a request was refused


class LightConnections:
    """The light connections of one server.

    `active` returns whether requests might be refused now. `refusal` takes a head and returns the response, or None if
    the request may be served. `late` is the response to a client that sends no request within `head_seconds`; after a
    response, the next request must begin within `keep_alive` seconds. `opened` is called with +1 and -1.
    """

    def __init__(
        self,
        active: Callable[[], bool],
        refusal: Callable[[bytes], Refusal | None],
        opened: Callable[[int], None],
        late: bytes,
        head_seconds: float,
        keep_alive: float,
    ) -> None:
        self.active, self._refusal, self._opened, self._late = active, refusal, opened, late
        self._head_seconds, self._keep_alive = head_seconds, keep_alive
        self._all: set[_Light] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    def add(self, sock: socket.socket, promote: Callable[[], object]) -> None:
        """Take an accepted, nonblocking socket. `promote` makes it an ordinary connection."""
        loop = asyncio.get_running_loop()
        light = _Light(sock, sock.fileno(), promote, loop.time() + self._head_seconds)
        self._all.add(light)
        self._opened(1)
        loop.add_reader(light.fd, self._readable, loop, light)
        if isinstance(fair := getattr(loop, "fair", None), FairSelector):
            fair.add_client(light.fd)
        if self._sweeping is None:
            self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep, loop)

    def close(self) -> None:
        """Close all light connections."""
        loop = asyncio.get_running_loop()
        for light in list(self._all):
            self._end(loop, light)
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    def _readable(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        """Refuse the requests that have arrived, up to the first that must be served."""
        try:
            for _ in range(_AT_ONCE):
                data = light.sock.recv(_PEEK, socket.MSG_PEEK)
                if not data:
                    self._end(loop, light)
                elif light.skip:
                    light.skip -= len(light.sock.recv(min(light.skip, len(data))))
                elif not self._refuse(loop, light, data):
                    self._promote(loop, light)
                if light not in self._all:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end(loop, light)

    def _refuse(self, loop: asyncio.AbstractEventLoop, light: _Light, data: bytes) -> bool:
        """Answer the request at the start of `data` if it is refused. Returns False if it is for the parser."""
        end = data.find(b"\r\n\r\n") + 4
        refusal = self._refusal(data[:end]) if end >= 4 and self.active() else None
        if refusal is None or (refusal.closes and refusal.length > len(data) - end):
            return False
        light.sock.recv(end + refusal.length if refusal.closes else end)
        light.skip, light.used, light.deadline = refusal.length, True, loop.time() + self._keep_alive
        if not _sent(light.sock, refusal.data) or refusal.closes:
            self._end(loop, light)
        return True

    def _promote(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        self._release(loop, light)
        light.promote()

    def _end(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        self._release(loop, light)
        light.sock.close()

    def _release(self, loop: asyncio.AbstractEventLoop, light: _Light) -> None:
        self._all.discard(light)
        self._opened(-1)
        if isinstance(fair := getattr(loop, "fair", None), FairSelector):
            fair.remove_client(light.fd)
        loop.remove_reader(light.fd)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections whose next request did not arrive in time."""
        now = loop.time()
        for light in [light for light in self._all if light.deadline <= now]:
            if not light.used:
                _sent(light.sock, self._late)
            self._end(loop, light)
        self._sweeping = loop.call_later(_SWEEP_SECONDS, self._sweep, loop) if self._all else None


def _sent(sock: socket.socket, data: bytes) -> bool:
    """Send without blocking. Returns False if the client does not take it."""
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False
