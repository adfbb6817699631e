"""Turns for connections whose bodies are arriving: few of them are read at a time, each for a short while.

Hundreds of readable sockets make every iteration of the event loop slow, even if few of them are served. Connections
waiting for their turn are paused, so that the kernel's buffers slow the client down.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

MOST = 8  # connections read at a time
BYTES = 512 << 10  # bytes per turn
SECONDS = 0.02  # per turn, while others wait


class Reader(Protocol):
    """A connection whose reading can be paused."""

    def pause_body(self) -> None:
        """Stop reading."""

    def resume_body(self) -> None:
        """Continue reading, unless the part of the body read so far has not been consumed."""


class BodyTurns:
    """The connections of one server that are in the middle of a body."""

    def __init__(self) -> None:
        self._active: OrderedDict[Reader, int] = OrderedDict()  # bytes read in the current turn
        self._waiting: OrderedDict[Reader, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def read(self, one: Reader, size: int) -> None:
        """Count `size` bytes of a body that were read from this connection."""
        if one in self._active:
            self._active[one] += size
            if self._active[one] >= BYTES:
                self._pass_on(one)
        elif len(self._active) < MOST and one not in self._waiting:
            self._active[one] = size
        else:
            self._waiting[one] = None
            one.pause_body()
            self._watch()

    def leave(self, one: Reader) -> None:
        """Remove a connection whose body or which itself has ended."""
        if one in self._waiting:
            del self._waiting[one]
            one.resume_body()
        elif self._active.pop(one, None) is not None:
            self._next()

    def _pass_on(self, one: Reader) -> None:
        """End the connection's turn, if others wait."""
        self._active[one] = 0
        if self._waiting:
            del self._active[one]
            self._waiting[one] = None
            one.pause_body()
            self._next()

    def _next(self) -> None:
        if self._waiting and len(self._active) < MOST:
            one, _ = self._waiting.popitem(last=False)
            self._active[one] = 0
            one.resume_body()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._tick)

    def _tick(self) -> None:
        """End the turns of the connections that were read since the last tick, as far as others wait."""
        self._timer = None
        for one in list(self._active)[: len(self._waiting)]:
            self._pass_on(one)
        if self._waiting:
            self._watch()
