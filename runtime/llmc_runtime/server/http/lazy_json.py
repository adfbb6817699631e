"""Incremental JSON encoding: lists backed by iterators, and an encoder that yields to the event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

from llmc_runtime.server.fair_slots import FairSlots

SLICE_SECONDS = 0.001  # encoding without a pause
PAUSE_BYTES = 8 << 10  # bytes of events with objects between two pauses: about SLICE_SECONDS of work
_SLICE_BYTES = 64 << 10  # the same, if the client is faster
_LONG = 512  # items of a list that are encoded in one call
_LONG_TEXT = 16 << 10  # characters of a text that are encoded in one call: 0.5 ms if each has to be escaped


class Lazy:
    """A JSON array whose items are computed during encoding, which is possible once.

    With `small`, each item is encoded in one call, without checking whether it contains lazy values.
    """

    __slots__ = ("items", "small")

    def __init__(self, items: Iterable[Any], small: bool = True) -> None:
        self.items, self.small = items, small


def is_lazy(value: Any) -> bool:
    """Return whether encoding may take long: the value contains a Lazy, a long list or a long text."""
    if isinstance(value, str):
        return len(value) > _LONG_TEXT
    if isinstance(value, dict):
        return any(is_lazy(item) for item in value.values() if isinstance(item, str | dict | list | Lazy))
    if isinstance(value, list):
        return len(value) > _LONG or any(is_lazy(item) for item in value if isinstance(item, str | dict | Lazy))
    return isinstance(value, Lazy)


def pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON text in small pieces; joined, they equal msgspec's encoding of the value with lists for Lazy."""
    if not is_lazy(value):
        yield msgspec.json.encode(value)
    elif isinstance(value, str):
        yield b'"'
        for begin in range(0, len(value), _LONG_TEXT):
            yield msgspec.json.encode(value[begin : begin + _LONG_TEXT])[1:-1]
        yield b'"'
    elif isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + msgspec.json.encode(key) + b":"
            yield from pieces(item)
            before = b","
        yield b"}"
    elif isinstance(value, Lazy) and value.small:
        before = b"["
        for item in value.items:
            yield before + msgspec.json.encode(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"
    else:
        yield from _array(value.items if isinstance(value, Lazy) else value)


def _array(items: Iterable[Any]) -> Iterator[bytes]:
    before, rest = b"[", iter(items)
    if isinstance(items, list) and not any(
        isinstance(item, dict | list | Lazy) or is_lazy(item) for item in islice(items, _LONG)
    ):
        while chunk := list(islice(rest, _LONG)):  # numbers or strings
            yield before + msgspec.json.encode(chunk)[1:-1]
            before = b","
    else:
        for item in rest:
            yield before
            yield from pieces(item)
            before = b","
    yield b"[]" if before == b"[" else b"]"


class Encoding:
    """Encodes lazy values for all connections of a server whose requests have this `key`.

    One slice of at most SLICE_SECONDS is encoded at a time, followed by a pause of the same length in which the event
    loop serves others. Keys take turns: many large responses of one key delay those of others by a slice each time.
    """

    def __init__(self, turns: FairSlots | None = None, key: str = "") -> None:
        self._turns = turns or FairSlots(1, RuntimeError, max_waiting=math.inf, seconds=None)
        self._key = key

    def of(self, key: str) -> Encoding:
        """Return the encoding of another key's responses, which takes turns with this one."""
        return Encoding(self._turns, key)

    async def pause(self) -> None:
        """Let the event loop serve others after about SLICE_SECONDS of encoding."""
        async with self._turns.slot(self._key):
            await asyncio.sleep(SLICE_SECONDS)

    async def parts(self, value: Any, before: bytes = b"", after: bytes = b"") -> AsyncIterator[bytes]:
        """Yield `before`, the JSON text of the value, and `after`, one slice at a time."""
        chunks, part = pieces(value), bytearray(before)
        while True:
            async with self._turns.slot(self._key):
                done = _fill(chunks, part)
                if not done:
                    await asyncio.sleep(SLICE_SECONDS)
            if done:
                part += after
            if part:
                yield bytes(part)
            if done:
                return
            part.clear()


def _fill(chunks: Iterator[bytes], part: bytearray) -> bool:
    """Encode one slice into `part`. Returns True at the end of the value."""
    until, limit = time.perf_counter() + SLICE_SECONDS, len(part) + _SLICE_BYTES
    for piece in chunks:
        part += piece
        if len(part) > limit or time.perf_counter() > until:
            return False
    return True
