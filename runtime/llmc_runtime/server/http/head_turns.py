"""Limits how long one turn of the event loop parses the heads of requests.

Hundreds of connections may send a head at the same time. Parsing them all in one turn would delay the tokens that the
engine sends to open streams, and health probes. Heads beyond the limit wait for the next turns, first come first
served.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Protocol

SECONDS = 0.001  # of parsing in one turn
PROBES = (b"GET /health ", b"GET /ready ")


class Connection(Protocol):
    """A connection that begins a request."""

    def parse(self, data: bytes) -> None:
        """Parse the beginning of a request."""

    def pause_head(self) -> None:
        """Stop reading until `resume_head`."""

    def resume_head(self) -> None:
        """Continue reading."""


class HeadTurns:
    """The connections of one server whose next request waits to be parsed. Health probes do not wait."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Connection, bytes] = OrderedDict()
        self._spent = 0.0  # seconds in this turn of the event loop
        self._next: asyncio.Handle | None = None

    def begin(self, one: Connection, data: bytes) -> None:
        """Parse `data`, the beginning of a request, in this turn or a later one."""
        if one in self._waiting:  # TLS may hand over several pieces before the pause takes effect
            self._waiting[one] += data
        elif (self._waiting or self._spent >= SECONDS) and not data.startswith(PROBES):
            self._waiting[one] = data
            one.pause_head()
        else:
            self._parse(one, data)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def leave(self, one: Connection) -> None:
        """Forget a closed connection."""
        self._waiting.pop(one, None)

    def _turn(self) -> None:
        self._spent, self._next = 0.0, None
        while self._waiting and self._spent < SECONDS:
            one, data = self._waiting.popitem(last=False)
            one.resume_head()
            self._parse(one, data)
        if self._spent:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _parse(self, one: Connection, data: bytes) -> None:
        began = time.monotonic()
        one.parse(data)
        self._spent += time.monotonic() - began
