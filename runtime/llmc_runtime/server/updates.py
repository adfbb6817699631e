"""Streams of updates of a request's outputs: merging those of several prompts, and waiting for the first one.

`serving` merges the outputs of AsyncLLM.generate here; the endpoints read the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing

from llmc_runtime.outputs import RequestOutput

_CANCELLED_AT_ONCE = 16  # each takes 25 us, and a client may leave several requests of 128 prompts at a time

Update = tuple[int, RequestOutput]  # the index of a prompt, and an update of its outputs
Updates = AsyncIterator[Update]
Items = asyncio.Queue[Update | Exception | None]  # an item of a source, or its end


def merged(sources: list[Updates]) -> Updates:
    """Return the items of all sources as they arrive. The first error ends all of them. A single source is returned
    itself, as each iterator that an item passes costs processor time for every token."""
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _merged(sources: list[Updates]) -> Updates:
    queue: Items = asyncio.Queue(len(sources))  # a source waits for a slow reader, and its request merges what follows
    tasks = list[asyncio.Task[None]]()
    starting, running = asyncio.ensure_future(_start(sources, queue, tasks)), len(sources)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await end_tasks([starting, *tasks])
        item = None  # an error refers to this frame, and those in the queue to the frames that refer to it
        while not queue.empty():
            queue.get_nowait()


async def end_tasks(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the tasks, a few in an iteration of the event loop, and wait until they have ended."""
    waiting = tasks[::-1]
    try:
        while waiting:
            for _ in range(min(_CANCELLED_AT_ONCE, len(waiting))):
                waiting.pop().cancel()
            await asyncio.sleep(0)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(sources: list[Updates], queue: Items, tasks: list[asyncio.Task[None]]) -> None:
    """Start one source in an iteration of the event loop, which others may need between the starts of long prompts."""
    for source in sources:
        tasks.append(asyncio.ensure_future(_follow(source, queue)))
        await asyncio.sleep(0)


async def _follow(source: Updates, queue: Items) -> None:
    """Put the items of a source into the queue, and then None, or the error that ended it."""
    try:
        async with aclosing(source) as items:  # type: ignore[type-var]
            async for item in items:
                await queue.put(item)
        await queue.put(None)
    except Exception as e:
        await queue.put(e)


class _Started:
    """An iterator of which the first item has been taken: yields that one, then the rest, without a frame of its own
    between the two."""

    def __init__(self, first: Update, rest: Updates) -> None:
        self._first: Update | None = first
        self._rest = rest

    def __aiter__(self) -> _Started:
        return self

    def __anext__(self) -> Awaitable[Update]:
        return self._rest.__anext__() if self._first is None else self._take(self._first)

    async def _take(self, first: Update) -> Update:
        self._first = None
        return first

    async def aclose(self) -> None:
        """Close the iterator."""
        await self._rest.aclose()  # type: ignore[attr-defined]


async def started(updates: Updates) -> Updates:
    """Wait for the first update and return an equal iterator, so that requests that cannot be served fail here."""
    return _Started(await anext(updates), updates)
