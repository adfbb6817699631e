"""A limit on concurrent work, shared fairly by API keys: a key that submits much work delays only its own requests.

`TextThreads` are the threads in which the server tokenizes, renders templates and makes grammars.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from llmc_runtime.fair_queue import FairQueue
from llmc_runtime.host_info import usable_cpus

MAX_WAITING = 1024  # jobs of all keys
MAX_SECONDS = 30.0  # maximum wait of a job
THREADS = 4

T = TypeVar("T")


class FairSlots:
    """Runs up to `slots` jobs at a time; keys with waiting jobs take turns, and each key's jobs run in order.

    `reserved` slots are kept free of any single key, so that a key with slow jobs cannot occupy all of them. If more
    than `max_waiting` jobs wait, the newest job of the key with the most waiting ones is rejected, as is a job that
    waits longer than `seconds` (None: never); `refusal` creates the exception.
    """

    def __init__(
        self,
        slots: int,
        refusal: Callable[[], Exception],
        *,
        reserved: int = 0,
        max_waiting: float = MAX_WAITING,
        seconds: float | None = MAX_SECONDS,
    ) -> None:
        self._queue = FairQueue[asyncio.Future[None]](slots, max(1, slots - reserved))
        self._refusal, self._max_waiting, self._seconds = refusal, max_waiting, seconds

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for a slot."""
        return len(self._queue)

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
        if self._queue.start(key):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.add(key, waiter)
        if len(self._queue) > self._max_waiting and not (newest := self._queue.pop_newest()).done():
            newest.set_exception(self._refusal())
        try:
            async with asyncio.timeout(self._seconds):
                await waiter
        except BaseException as e:
            if not self._queue.remove(key, waiter) and not waiter.cancelled() and waiter.exception() is None:
                self.release(key)  # it received a slot at the same moment
            if isinstance(e, TimeoutError):
                raise self._refusal() from None
            raise
        finally:
            del waiter  # its exception refers to this frame

    def release(self, key: str) -> None:
        """Return a slot."""
        self._queue.end(key)
        while (job := self._queue.next()) is not None:
            key, waiter = job
            if waiter.done():  # a job cancelled in this iteration of the event loop is still in the queue
                self._queue.end(key)
            else:
                waiter.set_result(None)


def threads_of_key(cpus: int) -> int:
    """Return how many of the threads one of several keys may use at a time: those of half of the CPUs.

    Tokenizing runs outside the interpreter's lock, so that a key with more of them would take the CPUs from the model.
    """
    return max(1, min(THREADS - 1, cpus // 2))


class TextThreads:
    """Runs functions on texts in THREADS threads; `slots` shares these among `keys` API keys.

    `refusal` makes the error of a function that waits too long, or for which too many wait.
    """

    def __init__(self, keys: int, refusal: Callable[[], Exception]) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "llmc-text")
        reserved = THREADS - threads_of_key(usable_cpus()) if keys > 1 else 0
        self.slots = FairSlots(THREADS, refusal, reserved=reserved)

    async def run(self, key: str, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)` from a thread, in the turn of an API key. Raises the error of `refusal`."""
        async with self.slots.slot(key):
            return await self._in_thread(function, *args)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    def close(self) -> None:
        """Drop the functions that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
