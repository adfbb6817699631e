"""A transport that closes when the client has heard: what it still sends is dropped, for a while; it reads nothing.

A connection that is closed with something unread is reset, and a client that was still sending its body never sees the
answer that refused it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

SECONDS = 2.0  # that a client has to stop sending
MOST = 16  # connections that do so at a time: dropping what clients send costs processor time
_READ = 256 << 10  # bytes that are dropped at a time


class Room:
    """How many connections of a server linger."""

    def __init__(self) -> None:
        self.used = 0


class Lingering:
    """`inner` with another way of closing, where `unread` says that the client has more to send and `room` has room.
    Its protocol drops what comes from then on, and says `end` when asyncio has closed the connection."""

    def __init__(self, inner: asyncio.Transport, unread: Callable[[], bool], room: Room) -> None:
        self._inner, self._unread, self._room = inner, unread, room
        self.write = inner.write
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_closing(self) -> bool:
        """Nothing more is sent or taken."""
        return self.lingers or self._inner.is_closing()

    def close(self) -> None:
        """Say that this is the end; the connection itself ends when the client has done so, too, or had its time."""
        if self.is_closing():
            return
        if self._room.used >= MOST or not (self._unread() and self._inner.can_write_eof()):
            self._inner.close()
            return
        self.lingers = True
        self._room.used += 1
        self._inner.max_size = _READ  # type: ignore[attr-defined]  # of asyncio's socket transports
        self._inner.write_eof()
        self._inner.resume_reading()
        asyncio.get_running_loop().call_later(SECONDS, self._inner.close)

    def end(self) -> None:
        """The connection is closed."""
        self._room.used -= self.lingers
