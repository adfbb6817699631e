"""A limit on concurrent work, shared fairly by API keys: a key that submits much work delays only its own requests."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MAX_WAITING = 1024  # jobs of all keys
MAX_SECONDS = 30.0  # maximum wait of a job


class FairSlots:
    """Runs up to `slots` jobs at a time; keys with waiting jobs take turns, and each key's jobs run in order.

    `reserved` slots are kept free of any single key, so that a key with slow jobs cannot occupy all of them. If more
    than `max_waiting` jobs wait, the newest job of the key with the most waiting ones is rejected, as is a job that
    waits longer than `seconds`; `refusal` creates the exception.
    """

    def __init__(
        self,
        slots: int,
        refusal: Callable[[], Exception],
        *,
        reserved: int = 0,
        max_waiting: int = MAX_WAITING,
        seconds: float = MAX_SECONDS,
    ) -> None:
        self._free, self._each = slots, max(1, slots - reserved)
        self._refusal, self._max_waiting, self._seconds = refusal, max_waiting, seconds
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._running: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, key: str) -> AsyncIterator[None]:
        """Hold a slot for the block. Raises the exception of `refusal`."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    async def acquire(self, key: str) -> None:
        """Wait for a slot, which the caller returns with `release`. Raises the exception of `refusal`."""
        if self._free and self._running[key] < self._each and key not in self._waiting:
            self._take(key)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(waiter)
        self._shed()
        try:
            async with asyncio.timeout(self._seconds):
                await waiter
        except BaseException as e:
            self._forget(key, waiter)
            if isinstance(e, TimeoutError):
                raise self._refusal() from None
            raise

    def release(self, key: str) -> None:
        """Return a slot."""
        self._free += 1
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        self._dispatch()

    def _take(self, key: str) -> None:
        self._free -= 1
        self._running[key] += 1

    def _dispatch(self) -> None:
        while self._free:
            key = next((key for key in self._waiting if self._running[key] < self._each), None)
            if key is None:
                return
            waiter = self._waiting[key][0]
            self._remove(key, waiter)
            if key in self._waiting:
                self._waiting.move_to_end(key)
            if not waiter.done():  # a job cancelled in this iteration of the event loop is still in the queue
                self._take(key)
                waiter.set_result(None)

    def _shed(self) -> None:
        if self.waiting > self._max_waiting:
            key = max(self._waiting, key=lambda key: len(self._waiting[key]))
            newest = self._waiting[key][-1]
            self._remove(key, newest)
            if not newest.done():
                newest.set_exception(self._refusal())

    def _forget(self, key: str, waiter: asyncio.Future[None]) -> None:
        """Remove a job that will not run; it may have received a slot at the same moment."""
        if waiter in self._waiting.get(key, ()):
            self._remove(key, waiter)
        elif not waiter.cancelled() and waiter.exception() is None:
            self.release(key)

    def _remove(self, key: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting[key]
        queue.remove(waiter)
        if not queue:
            del self._waiting[key]
