"""Slices of received data that has many lines, such as a body in chunks of a byte, which takes 10 us a chunk to parse.

A connection parses the first slice at once, and the others one after the other. `SliceTurns` gives all connections
together one further slice per iteration of the event loop, so that they do not delay the tokens of open streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

SLICE_LINES = 96  # of a slice; a chunk has two


def first_slice(data: bytes, start: int) -> tuple[bytes, bytes]:
    """Divide data after the SLICE_LINES-th line from `start` on; the second part is empty if it has no more lines."""
    if data.count(b"\n", start) <= SLICE_LINES:
        return data, b""
    rest = data[start:].split(b"\n", SLICE_LINES)[-1]
    return data[: len(data) - len(rest)], rest


class SliceTurns:
    """Calls the functions of connections that have a slice to parse, in order, one per iteration of the event loop."""

    def __init__(self) -> None:
        self._waiting = deque[Callable[[], None]]()

    def add(self, parse: Callable[[], None]) -> None:
        """Call `parse` in a later iteration."""
        self._waiting.append(parse)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._waiting[0]()
        self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
