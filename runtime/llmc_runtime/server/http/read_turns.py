"""Turns for bodies, so that many clients that send at the same time do not delay the tokens of open streams.

`BodyTurns` limits the number of bodies that are read at a time. The other connections are paused until it is their
turn: then the event loop does not poll them (hundreds of readable sockets make each iteration slow), and TCP's flow
control slows their clients down. `head_turns` does the same for heads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

MAX_BODIES = 8  # connections whose bodies are read at a time
BODY_BYTES = 512 << 10  # maximum bytes of a turn, if other connections wait
BODY_SECONDS = 0.02  # maximum time of a turn, if other connections wait


class Connection(Protocol):
    """A connection whose reading can be paused."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Continue reading, unless the part of the body read so far has not been consumed."""


class BodyTurns:
    """The connections of one server that are sending a body: at most MAX_BODIES are active, the others are paused.

    An active connection becomes the last waiting one after BODY_BYTES bytes or BODY_SECONDS seconds, if others wait.
    """

    def __init__(self) -> None:
        self._active: OrderedDict[Connection, int] = OrderedDict()  # -> bytes read in its turn
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
        """Give the turn to the first waiting connection."""
        if self._waiting and len(self._active) < MAX_BODIES:
            connection, _ = self._waiting.popitem(last=False)
            self._active[connection] = 0
            connection.resume_reading()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BODY_SECONDS, self._tick)

    def _tick(self) -> None:
        """End the turns of as many active connections as others wait."""
        self._timer = None
        for connection in list(self._active)[: len(self._waiting)]:
            self._pass_on(connection)
        if self._waiting:
            self._watch()
