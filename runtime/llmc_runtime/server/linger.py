"""A transport that closes when the client has heard: what it still sends is dropped, for a while; it reads nothing.

A connection that is closed with something unread is reset, and a client that was still sending its body never sees the
answer that refused it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

SECONDS = 2.0  # that a client has to stop sending


class Lingering:
    """`inner` with another way of closing, where `unread` says that the client has more to send. Its protocol drops
    what comes from then on; at its end asyncio closes the connection."""

    def __init__(self, inner: asyncio.Transport, unread: Callable[[], bool]) -> None:
        self._inner, self._unread = inner, unread
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
        if not (self._unread() and self._inner.can_write_eof()):
            self._inner.close()
            return
        self.lingers = True
        self._inner.write_eof()
        self._inner.resume_reading()
        asyncio.get_running_loop().call_later(SECONDS, self._inner.close)
