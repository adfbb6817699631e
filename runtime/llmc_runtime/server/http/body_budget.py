"""Memory for request bodies: a limit for the whole server, shared fairly by API key, and a minimum transfer rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from llmc_runtime.fair_queue import KeyCounts

MAX_BYTES = 128 << 20  # total of the bodies over FREE_BYTES that are arriving or waiting to be parsed
FREE_BYTES = 16 << 10  # bodies up to this size are not counted
STEP_BYTES, STEP_SECONDS = 64 << 10, 5.0  # beyond it: minimum bytes per interval in seconds


class BodyBudget:
    """The bytes of all bodies, at most `maximum`.

    If a growing body exceeds the limit, a body of the key with the most bytes is refused: the growing body itself if it
    has this key, otherwise the key's largest. `refusal` creates the exception that the reader of that body gets.
    """

    def __init__(self, refusal: Callable[[], Exception], maximum: int = MAX_BYTES) -> None:
        self.maximum, self.used = maximum, 0
        self.refusal = refusal
        self._by_key = KeyCounts()
        self._bodies: set[Body] = set()

    def update(self, body: Body) -> None:
        """Update the count to the body's current size. Raises the refusal if this body has to give way."""
        size = len(body.data) if len(body.data) > FREE_BYTES else 0
        self.used += size - body.counted
        self._by_key.change(body.key, size - body.counted)
        body.counted = size
        if size:
            self._bodies.add(body)
        else:
            self._bodies.discard(body)
        while self.used > self.maximum:
            self._make_room(body)

    def _make_room(self, grown: Body) -> None:
        heaviest = self._by_key.heaviest
        others = [body for body in self._bodies if body.key == heaviest and body.waits and body is not grown]
        if grown.key == heaviest or not others:
            grown.drop()
            raise self.refusal()
        max(others, key=lambda body: body.counted).evict()


class Body:
    """The bytes of a request's body, `data`, counted until they are dropped."""

    def __init__(self, budget: BodyBudget, key: str) -> None:
        self._budget, self.key = budget, key
        self.data, self.counted = bytearray(), 0
        self._clock: asyncio.Timeout | None = None
        self._evicted = False
        self._end, self._next = math.inf, FREE_BYTES

    def __len__(self) -> int:
        return len(self.data)

    @property
    def waits(self) -> bool:
        """Whether the body can be evicted now."""
        return self._clock is not None and not self._evicted

    @asynccontextmanager
    async def evictable(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Let `evict` end the block, which then raises the refusal. After `seconds`, it raises TimeoutError."""
        try:
            async with asyncio.timeout(seconds) as clock:
                self._clock, self._end = clock, clock.when() or math.inf
                yield
        except TimeoutError:
            if self._evicted:
                raise self._budget.refusal() from None
            raise
        finally:
            self._clock = None

    def take(self, part: bytes) -> None:
        """Append a part, within `evictable`, and set the deadline for the next parts. Raises the refusal."""
        self.data += part
        if len(self.data) > FREE_BYTES:
            if len(self.data) >= self._next and self._clock is not None:
                now = asyncio.get_running_loop().time()
                self._clock.reschedule(min(self._end, now + STEP_SECONDS))
                self._next = len(self.data) + STEP_BYTES
            self._budget.update(self)

    def evict(self) -> None:
        """Drop the body and interrupt its reader."""
        self._evicted = True
        if self._clock is not None:
            self._clock.reschedule(asyncio.get_running_loop().time())
        self.drop()

    def drop(self) -> None:
        """Release the memory."""
        self.data = bytearray()
        self._budget.update(self)
