"""The threads in which the server tokenizes, renders templates and makes grammars, shared fairly by API keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llmc_runtime.host_info import usable_cpus
from llmc_runtime.server.fair_slots import FairSlots

THREADS = 4

T = TypeVar("T")


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
