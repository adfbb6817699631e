"""JSON that is made while it is sent: lists that hold an iterator, and an encoder that walks them. No HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

SLICE_SECONDS = 0.001  # of encoding without a pause
PAUSE_BYTES = 8 << 10  # of events with objects: about SLICE_SECONDS of work
_SLICE_BYTES = 64 << 10  # the same, where the client is the faster one
_LONG = 512  # items of a list that are encoded at once


class Lazy:
    """A JSON array whose items are made while it is encoded, which happens once. `small`: each item is encoded at once,
    without a look at whether it is lazy itself."""

    __slots__ = ("items", "small")

    def __init__(self, items: Iterable[Any], small: bool = True) -> None:
        self.items, self.small = items, small


def is_lazy(value: Any) -> bool:
    """Whether encoding the value may take long: it contains a Lazy or a long list."""
    if isinstance(value, dict):
        return any(is_lazy(one) for one in value.values() if isinstance(one, dict | list | Lazy))
    if isinstance(value, list):
        return len(value) > _LONG or any(is_lazy(one) for one in value if isinstance(one, dict | Lazy))
    return isinstance(value, Lazy)


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON text in small pieces; joined they are what msgspec makes of the value with lists for Lazy."""
    if not is_lazy(value):
        yield msgspec.json.encode(value)
    elif isinstance(value, dict):
        before = b"{"
        for key, one in value.items():
            yield before + msgspec.json.encode(key) + b":"
            yield from pieces(one)
            before = b","
        yield b"}"
    elif isinstance(value, Lazy) and value.small:
        before = b"["
        for one in value.items:
            yield before + msgspec.json.encode(one)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    else:
        yield from _array(value.items if isinstance(value, Lazy) else value)


def _array(items: Iterable[Any]) -> Iterator[bytes]:
    before, rest = b"[", iter(items)
    if isinstance(items, list) and not any(isinstance(one, dict | list | Lazy) for one in islice(items, _LONG)):
        while chunk := list(islice(rest, _LONG)):  # numbers or texts
            yield before + msgspec.json.encode(chunk)[1:-1]
            before = b","
    else:
        for one in rest:
            yield before
            yield from pieces(one)
            before = b","
    yield b"[]" if before == b"[" else b"]"


class Encoding:
    """Encodes lazy values for all connections of a server: one slice of SLICE_SECONDS at a time, and a pause as long
    behind each, in which the event loop serves the others."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def pause(self) -> None:
        """Let the event loop serve the others, after about SLICE_SECONDS of encoding."""
        async with self._turn:
            await asyncio.sleep(SLICE_SECONDS)

    async def parts(self, value: Any, before: bytes = b"", after: bytes = b"") -> AsyncIterator[bytes]:
        """The JSON text of the value between two texts, a slice at a time."""
        made, part = pieces(value), bytearray(before)
        while True:
            async with self._turn:
                done = _fill(made, part)
                if not done:
                    await asyncio.sleep(SLICE_SECONDS)
            if done:
                part += after
            if part:
                yield bytes(part)
            if done:
                return
            part.clear()


def _fill(made: Iterator[bytes], part: bytearray) -> bool:
    """Encode one slice into `part`. True at the end of the value."""
    until, most = time.perf_counter() + SLICE_SECONDS, len(part) + _SLICE_BYTES
    for piece in made:
        part += piece
        if len(part) > most or time.perf_counter() > until:
            return False
    return True
