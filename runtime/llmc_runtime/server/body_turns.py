"""Turns of the connections whose bodies are arriving: few of them are read at a time, and none for long.

Hundreds of sockets that can all be read make every turn of the event loop long, however few of them it serves. A
connection whose turn has not come is paused, so that the system's own buffers slow its client down.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

MOST = 8  # connections that are read at a time
BYTES = 512 << 10  # of one turn
SECONDS = 0.02  # of one turn, while others wait


class Reader(Protocol):
    """A connection whose reading can be paused."""

    def pause_body(self) -> None:
        """Read nothing."""

    def resume_body(self) -> None:
        """Read again, unless the body read so far waits to be taken."""


class BodyTurns:
    """The connections of one server that are in the midst of a body."""

    def __init__(self) -> None:
        self._active: OrderedDict[Reader, int] = OrderedDict()  # bytes of this turn
        self._waiting: OrderedDict[Reader, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def read(self, one: Reader, size: int) -> None:
        """So many bytes of a body have come over this connection."""
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
        """The body has ended, or the connection has."""
        if one in self._waiting:
            del self._waiting[one]
            one.resume_body()
        elif self._active.pop(one, None) is not None:
            self._next()

    def _pass_on(self, one: Reader) -> None:
        """The turn of this one is over."""
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
        """While some wait, those that were read since the last look give way."""
        self._timer = None
        for one in list(self._active)[: len(self._waiting)]:
            self._pass_on(one)
        if self._waiting:
            self._watch()
