"""Streams of updates of a request's outputs: merging those of several prompts, and waiting for the first one.

`serving` merges the outputs of AsyncLLM.generate here; the endpoints read the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from llmc_runtime.outputs import RequestOutput

_STARTED_TOGETHER = 4  # prompts of one request that are started in one iteration of the loop

Updates = AsyncIterator[tuple[int, RequestOutput]]  # the index of a prompt, and an update of its outputs
Items = asyncio.Queue[tuple[int, RequestOutput | Exception | None]]  # the index of a source, and an item or its end


async def merged(sources: list[AsyncIterator[RequestOutput]]) -> Updates:
    """Yield the items of all sources as they arrive, with the source's index. The first error ends all of them."""
    if len(sources) == 1:  # updates that arrive between reads are merged into one item
        async with aclosing(sources[0]) as only:  # type: ignore[type-var]
            async for output in only:
                yield 0, output
        return
    queue: Items = asyncio.Queue()
    tasks = [asyncio.ensure_future(_follow(i, source, queue)) for i, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(index: int, source: AsyncIterator[RequestOutput], queue: Items) -> None:
    """Put the items of a source into the queue, and then None, or the error that ended it."""
    for _ in range(index // _STARTED_TOGETHER):
        await asyncio.sleep(0)  # let others run between the starts of many prompts
    try:
        async with aclosing(source) as items:  # type: ignore[type-var]
            async for item in items:
                queue.put_nowait((index, item))
        queue.put_nowait((index, None))
    except Exception as e:
        queue.put_nowait((index, e))


async def started(updates: Updates) -> Updates:
    """Wait for the first update and return an equal stream, so that requests that cannot be served fail here."""
    first = await anext(updates)

    async def rest() -> Updates:
        async with aclosing(updates) as items:  # type: ignore[type-var]
            yield first
            async for item in items:
                yield item

    return rest()
