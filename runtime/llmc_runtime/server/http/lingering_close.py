"""Lingering close: after the server closes a connection, data that the client still sends is discarded for a while.

If a connection is closed with unread data, the kernel resets it, and a client that is still sending its body never sees
the response that rejected it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0  # time for the client to stop sending
MAX_LINGERING = 16  # concurrent connections that linger: discarding data costs processor time
_READ = 256 << 10  # bytes discarded at a time


class LingerCount:
    """Counts the lingering connections of a server."""

    def __init__(self) -> None:
        self.used = 0


class Lingering:
    """Wraps the transport `inner` so that `close` lingers, if `unread` returns true and `count` is below MAX_LINGERING.

    The protocol discards data received after that, and calls `end` when asyncio has closed the connection.
    """

    def __init__(self, inner: asyncio.Transport, unread: Callable[[], bool], count: LingerCount) -> None:
        self._inner, self._unread, self._count = inner, unread, count
        self.write = inner.write
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def is_closing(self) -> bool:
        """Return whether the transport is closing or lingering."""
        return self.lingers or self._inner.is_closing()

    def close(self) -> None:
        """Close for writing. The connection itself is closed when the client closes it, or after LINGER_SECONDS."""
        if self.is_closing():
            return
        if self._count.used >= MAX_LINGERING or not (self._unread() and self._inner.can_write_eof()):
            self._inner.close()
            return
        try:
            self._inner.write_eof()
        except OSError:  # the client has reset the connection
            self._inner.close()
            return
        self.lingers = True
        self._count.used += 1
        self._inner.max_size = _READ  # type: ignore[attr-defined]  # an attribute of asyncio's socket transports
        self._inner.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._inner.close)

    def end(self) -> None:
        """Decrement the count once the connection is closed, and break cycles of references.

        Without cycles, closed connections are freed at once. Collecting those of thousands takes tens of milliseconds,
        in which no token is forwarded.
        """
        self._count.used -= self.lingers
        self._unread = bool
        del self.write
        vars(self._inner).pop("_read_ready_cb", None)  # a method of asyncio's socket transports, bound to itself
