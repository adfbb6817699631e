"""Streams of updates of a request's outputs: merging those of several prompts, and waiting for the first one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from llmc_runtime.outputs import RequestOutput

_STARTED_TOGETHER = 4  # prompts of one request that are started in one iteration of the loop

Updates = AsyncIterator[tuple[int, RequestOutput]]  # the index of a prompt, and an update of its outputs


async def merged(sources: list[AsyncIterator[RequestOutput]]) -> Updates:
    """Yield the items of all sources as they arrive, with the source's index. The first error ends all of them."""
    if len(sources) == 1:  # updates that arrive between reads are merged into one item
        async with aclosing(sources[0]) as only:  # type: ignore[type-var]
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def follow(index: int) -> None:
        for _ in range(index // _STARTED_TOGETHER):
            await asyncio.sleep(0)  # let others run between the starts of many prompts
        try:
            async with aclosing(sources[index]) as source:  # type: ignore[type-var]
                async for item in source:
                    queue.put_nowait((index, item))
            queue.put_nowait((index, None))
        except Exception as e:
            queue.put_nowait((index, e))

    tasks = [asyncio.ensure_future(follow(i)) for i in range(len(sources))]
    running = len(tasks)
    try:
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def started(updates: Updates) -> Updates:
    """Wait for the first update and return an equal stream, so that requests that cannot be served fail here."""
    first = await anext(updates)

    async def rest() -> Updates:
        async with aclosing(updates) as items:  # type: ignore[type-var]
            yield first
            async for item in items:
                yield item

    return rest()
