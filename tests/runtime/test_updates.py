"""The iterators that a token of a stream passes on its way to the client."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

pytest.importorskip("starlette")
from llmc_runtime.api.async_request import MAX_UPDATE_TOKENS
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.lazy_json import Encoding
from llmc_runtime.server.http.replies import Stream
from llmc_runtime.server.requests.request_fields import CompletionRequest
from llmc_runtime.server.updates import Updates, merged, started

from tests.runtime.async_kit import settled
from tests.runtime.served import served


def run(test: Callable[..., Any]) -> Callable[..., None]:
    """Make a test of a coroutine."""

    @functools.wraps(test)
    def wrapped(*args: Any, **options: Any) -> None:
        asyncio.run(test(*args, **options))

    return wrapped


def output(number: int) -> RequestOutput:
    """The update `number` of a request."""
    return RequestOutput(str(number), None, [], [], False)


class Source:
    """Updates of prompt `index`; whether they were closed, and which task asked for each."""

    def __init__(self, index: int, count: int, error: Exception | None = None) -> None:
        self.index, self.count, self.error = index, count, error
        self.closed = False

    async def items(self) -> Updates:
        """Yield the updates, then fail if there is an error."""
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                yield self.index, output(number)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


def numbers(found: list[tuple[int, RequestOutput]]) -> list[tuple[int, int]]:
    return [(index, int(item.request_id)) for index, item in found]


def test_a_single_source_is_not_wrapped() -> None:
    items = Source(0, 3).items()
    assert merged([items]) is items


@run
async def test_several_sources_are_merged_until_the_last_one_ends_or_the_first_error() -> None:
    sources = [Source(0, 2), Source(1, 3)]
    found = numbers([item async for item in merged([one.items() for one in sources])])
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    sources = [Source(0, 1, ValueError("x")), Source(1, 500)]
    with pytest.raises(ValueError, match="x"):
        async for _ in merged([one.items() for one in sources]):
            pass
    assert all(one.closed for one in sources)


@run
async def test_sources_wait_for_a_slow_reader() -> None:
    """Their requests merge what they generate meanwhile; updates in a queue would grow without a limit."""
    taken = [0, 0, 0]

    async def source(index: int) -> Updates:
        for number in range(1000):
            taken[index] = number + 1
            yield index, output(number)

    async with aclosing(merged([source(index) for index in range(3)])) as items:  # type: ignore[type-var]
        for read in range(1, 30):
            await anext(items)
            for _ in range(100):
                await asyncio.sleep(0)
            assert sum(taken) <= read + 6, "one in the queue and one at hand for each source"


@run
async def test_one_source_is_started_in_an_iteration_of_the_event_loop() -> None:
    """The start of a long prompt takes milliseconds, which its neighbours' streams would wait for together."""
    iteration, starts = 0, list[int]()

    async def source() -> Updates:
        starts.append(iteration)
        yield 0, output(0)

    async def count() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    async for _ in merged([source() for _ in range(20)]):
        pass
    counting.cancel()
    assert len(set(starts)) == len(starts) == 20


@run
async def test_a_few_sources_end_in_an_iteration_when_a_reader_leaves() -> None:
    """A client may leave several requests of 128 prompts, each of which takes the event loop time."""
    iteration, ends = 0, list[int]()

    async def source() -> Updates:
        try:
            while True:
                yield 0, output(0)
                await asyncio.sleep(0)
        finally:
            ends.append(iteration)

    async def count() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    for again in (False, True):  # the reader is cancelled once more while the sources end
        ends.clear()
        counting = asyncio.ensure_future(count())

        async def read() -> None:
            async for _ in merged([source() for _ in range(100)]):
                pass

        reading = asyncio.ensure_future(read())
        while iteration % 1000 < 150:
            await asyncio.sleep(0)
        reading.cancel()
        if again:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        counting.cancel()
        iteration = 1000
        assert reading.cancelled() and len(ends) == 100
        assert again or max(Counter(ends).values()) <= 16


@run
async def test_a_started_iterator_yields_the_first_update_and_then_those_of_the_source_itself() -> None:
    source = Source(0, 3)
    items = source.items()
    begun = await started(items)
    assert numbers([await anext(begun)]) == [(0, 0)]
    assert type(begun.__anext__()) is type(items.__anext__()), "no frame in between"
    source = Source(0, 3)
    assert numbers([item async for item in await started(source.items())]) == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(ValueError, match="refused"):
        await started(Source(0, 0, ValueError("refused")).items())


@pytest.mark.parametrize("read", [0, 1, 2])
@run
async def test_closing_a_started_iterator_closes_its_source(read: int) -> None:
    source = Source(0, 9)
    async with aclosing(await started(source.items())) as items:  # type: ignore[type-var]
        for _ in range(read):
            await anext(items)
    assert source.closed


class Parts(Stream):
    """A stream of one part, which records its task."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__(lambda: self.ends.append("disconnect"), lambda: self.ends.append("sent"))
        self.ends: list[str] = []
        self.task: asyncio.Task[Any] | None = None
        self.wait = wait

    async def _write(self, write: Any) -> bytes:
        self.task = asyncio.current_task()
        await self.wait()
        return b"end"


def receiver(first: AsyncIterator[str]) -> Callable[[], Any]:
    async def receive() -> Any:
        return {"type": await anext(first)}

    return receive


async def silent() -> AsyncIterator[str]:
    await asyncio.Event().wait()
    yield "http.request"


async def leaving() -> AsyncIterator[str]:
    await asyncio.sleep(0.01)
    yield "http.disconnect"


@run
async def test_a_stream_is_written_in_a_task_of_its_own_which_ends_with_the_client() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    whole = Parts(lambda: asyncio.sleep(0))
    await whole({}, receiver(silent()), send)
    assert whole.task is not None and whole.task is not asyncio.current_task()
    assert whole.ends == ["sent"] and sent[-1]["body"] == b"end"
    cut = Parts(lambda: asyncio.Event().wait())
    await cut({}, receiver(leaving()), send)
    assert cut.ends == ["disconnect", "sent"] and cut.task is not None and cut.task.cancelled()


def test_a_late_reader_lets_others_be_served_between_the_parts_of_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, pause = 0, Encoding.pause

    async def counted(encoding: Encoding) -> None:
        nonlocal pauses
        pauses += 1
        await pause(encoding)

    monkeypatch.setattr(Encoding, "pause", counted)
    with served() as server:

        async def read() -> list[int]:
            params = SamplingParams(n=8, max_tokens=200, ignore_eos=True)
            request = CompletionRequest(prompt=[7])
            updates = server.serving.run([Prompt([7])], params, request, Call("cmpl-1", "", "prompt"))
            sizes = [sum(len(one.token_ids) for one in (await anext(updates))[1].outputs)]
            await settled(server.llm)
            async for _, update in updates:
                sizes.append(sum(len(one.token_ids) for one in update.outputs))
            return sizes

        first, *rest = server.run(read())
    full = (1600 - first) // MAX_UPDATE_TOKENS
    assert rest[:full] == [MAX_UPDATE_TOKENS] * full and sum(rest) == 1600 - first
    assert full <= pauses <= full + 1
