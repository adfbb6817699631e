"""Turns for connections that send at the same time, so that reading them does not delay the tokens of open streams.

Heads: one iteration of the event loop parses them for a limited time, and the others wait for the next iterations.
Bodies: few are read at a time, each for a short while. Hundreds of readable sockets make every iteration slow, even if
few of them are served. Connections that wait are paused, so that the kernel's buffers slow their clients down.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Protocol

HEAD_SECONDS = 0.001  # of parsing heads in one iteration of the event loop
PROBES = (b"GET /health ", b"GET /ready ")
MAX_BODIES = 8  # connections whose bodies are read at a time
BODY_BYTES = 512 << 10  # bytes of a body per turn
BODY_SECONDS = 0.02  # per turn, while others wait


class Connection(Protocol):
    """A connection whose reading can be paused."""

    def parse(self, data: bytes) -> None:
        """Parse the beginning of a request."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Continue reading, unless the part of the body read so far has not been consumed."""


class HeadTurns:
    """The connections of one server whose next request waits to be parsed, first come first served. Health probes do
    not wait.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Connection, bytes] = OrderedDict()
        self._spent = 0.0  # seconds in this iteration of the event loop
        self._next: asyncio.Handle | None = None

    def begin(self, connection: Connection, data: bytes) -> None:
        """Parse `data`, the beginning of a request, in this iteration or a later one."""
        if connection in self._waiting:  # TLS may hand over several pieces before the pause takes effect
            self._waiting[connection] += data
        elif (self._waiting or self._spent >= HEAD_SECONDS) and not data.startswith(PROBES):
            self._waiting[connection] = data
            connection.pause_reading()
        else:
            self._parse(connection, data)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def leave(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._waiting.pop(connection, None)

    def _turn(self) -> None:
        self._spent, self._next = 0.0, None
        while self._waiting and self._spent < HEAD_SECONDS:
            connection, data = self._waiting.popitem(last=False)
            connection.resume_reading()
            self._parse(connection, data)
        if self._spent:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _parse(self, connection: Connection, data: bytes) -> None:
        began = time.monotonic()
        connection.parse(data)
        self._spent += time.monotonic() - began


class BodyTurns:
    """The connections of one server that are in the middle of a body."""

    def __init__(self) -> None:
        self._active: OrderedDict[Connection, int] = OrderedDict()  # bytes read in the current turn
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def read(self, connection: Connection, size: int) -> None:
        """Count `size` bytes of a body that were read from this connection."""
        if connection in self._active:
            self._active[connection] += size
            if self._active[connection] >= BODY_BYTES:
                self._pass_on(connection)
        elif len(self._active) < MAX_BODIES and connection not in self._waiting:
            self._active[connection] = size
        else:
            self._wait(connection)
            self._watch()

    def leave(self, connection: Connection) -> None:
        """Remove a connection that is closed or whose body is complete."""
        if connection in self._waiting:
            del self._waiting[connection]
            connection.resume_reading()
        elif self._active.pop(connection, None) is not None:
            self._next()

    def _wait(self, connection: Connection) -> None:
        self._waiting[connection] = None
        connection.pause_reading()

    def _pass_on(self, connection: Connection) -> None:
        """End the connection's turn, if others wait."""
        self._active[connection] = 0
        if self._waiting:
            del self._active[connection]
            self._wait(connection)
            self._next()

    def _next(self) -> None:
        if self._waiting and len(self._active) < MAX_BODIES:
            connection, _ = self._waiting.popitem(last=False)
            self._active[connection] = 0
            connection.resume_reading()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BODY_SECONDS, self._tick)

    def _tick(self) -> None:
        """End the turns of the connections that were read since the last tick, as far as others wait."""
        self._timer = None
        for connection in list(self._active)[: len(self._waiting)]:
            self._pass_on(connection)
        if self._waiting:
            self._watch()
