"""Requests to models that pool take turns with the event loop: their prompts' starts, their scores, their documents."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llmc_runtime.format.names import EMBED, LAST
from llmc_runtime.format.pooling import Pooling
from llmc_runtime.outputs import RequestOutput
from llmc_runtime.prompts import Prompt

pytest.importorskip("starlette")
from llmc_runtime.server import serving
from llmc_runtime.server.call import Call, Resources
from llmc_runtime.server.fair_slots import FairSlots
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.openai import pooled
from llmc_runtime.server.operations.admission import Admission
from llmc_runtime.server.requests.pooling_request import RerankRequest

WIDTH = 8
POOLING = Pooling(EMBED, LAST, WIDTH)


class Pauses:
    """The server's encoding, which counts its pauses."""

    count = 0

    def of(self, key: str) -> Pauses:
        """All keys count here."""
        return self

    async def pause(self) -> None:
        """Count a pause."""
        self.count += 1


class FakeServing(SimpleNamespace):
    """What a request needs of the server. The model answers at once, and `starts_in` counts its prompts by the
    iteration of the event loop in which they were sent."""

    def __init__(self, answers: int = 1 << 30) -> None:
        super().__init__()
        self.admission = Admission(512, 1 << 20, keys=2, answers=answers)
        self.starts = FairSlots(serving._STARTS_PER_ITERATION, lambda: AssertionError("refused"))
        self.encoding, self.names, self.max_answer = Pauses(), ("m",), 64 << 20
        self.metrics = SimpleNamespace(count_for_key=lambda *_: None, begin=lambda *_: None)
        self.llm = SimpleNamespace(pool=self.pool, pooling=POOLING)
        self.iteration, self.starts_in = 0, Counter[int]()
        self.check_model = self.check_ready = lambda *_: None

    async def pool(self, prompt: Prompt, *_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
        """Return an embedding after an iteration."""
        self.starts_in[self.iteration] += 1
        await asyncio.sleep(0)
        values = np.arange(len(prompt.ids), len(prompt.ids) + WIDTH, dtype=np.float32)
        yield RequestOutput("r", prompt.text, prompt.ids, [], True, pooled=values.tobytes())

    async def watched(self, source: Any, *_: Any) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Pass outputs on."""
        async for output in source:
            yield 0, output

    async def counting(self) -> None:
        """Count the iterations of the event loop."""
        while True:
            self.iteration += 1
            await asyncio.sleep(0)


class Job:
    """A large body whose documents a text process has read."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    async def prompts(self, characters: int) -> list[Prompt]:
        """Return the prompts."""
        assert characters == -1
        return [Prompt([5], "query"), *(Prompt([5, 6], text) for text in self.texts)]


def called(key: str = "a") -> Call:
    return Call("c", key, "documents", resources=Resources())


def run(work: Callable[[], Any]) -> Any:
    return asyncio.run(work())


def test_few_prompts_are_started_in_an_iteration() -> None:
    """However many wait: starting one takes a quarter of a millisecond, for which streams and probes would wait."""

    async def work() -> FakeServing:
        server = FakeServing()
        counting = asyncio.ensure_future(server.counting())
        calls = [called(key) for key in "aabb"]
        for call in calls:
            pooled.reserve_slot(server, call, 64)  # type: ignore[arg-type]
        prompts = [Prompt([5, 6]) for _ in range(64)]
        await asyncio.gather(
            *(pooled.run_prompts(server, prompts, 0, "", call) for call in calls)  # type: ignore[arg-type]
        )
        counting.cancel()
        return server

    found = run(work)
    assert found.starts_in.total() == 4 * 64 and max(found.starts_in.values()) <= serving._STARTS_PER_ITERATION


def test_a_few_prompts_end_in_an_iteration_when_a_client_leaves() -> None:
    async def work() -> Counter[int]:
        server, ends = FakeServing(), Counter[int]()

        async def pool(*_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
            try:
                await asyncio.Event().wait()
                yield RequestOutput("r", None, [], [], True)
            finally:
                ends[server.iteration] += 1

        server.llm.pool, call = pool, called()
        counting = asyncio.ensure_future(server.counting())
        pooled.reserve_slot(server, call, 64)  # type: ignore[arg-type]
        running = asyncio.ensure_future(pooled.run_prompts(server, [Prompt([5])] * 64, 0, "", call))  # type: ignore[arg-type]
        while server.iteration < 100:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        counting.cancel()
        assert running.cancelled() and not server.admission.open_sequences
        return ends

    ends = run(work)
    assert ends.total() == 64 and max(ends.values()) <= 16


def test_a_request_that_is_cancelled_twice_releases_its_slot() -> None:
    async def work() -> None:
        server, call, released = FakeServing(), called(), asyncio.Event()

        async def pool(*_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
            try:
                await asyncio.Event().wait()
                yield RequestOutput("r", None, [], [], True)
            finally:
                await released.wait()

        server.llm.pool = pool
        pooled.reserve_slot(server, call, 64)  # type: ignore[arg-type]
        running = asyncio.ensure_future(pooled.run_prompts(server, [Prompt([5])] * 64, 0, "", call))  # type: ignore[arg-type]
        for _ in range(2):
            for _ in range(100):
                await asyncio.sleep(0)
            assert server.admission.open_sequences
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled() and not server.admission.open_sequences

    run(work)


def test_the_first_error_ends_all_prompts_and_leaves_nothing_to_the_garbage_collector() -> None:
    calls = list[Any]()

    async def work() -> None:
        server, call = FakeServing(), called()

        async def pool(prompt: Prompt, *_: Any, **__: Any) -> AsyncIterator[RequestOutput]:
            await asyncio.sleep(0)
            if prompt.ids == [6]:
                raise ApiError("refused")
            await asyncio.Event().wait()
            yield RequestOutput("r", None, [], [], True)

        server.llm.pool = pool
        calls.append(weakref.ref(call))
        pooled.reserve_slot(server, call, 3)  # type: ignore[arg-type]
        with pytest.raises(ApiError, match="refused"):
            await pooled.run_prompts(server, [Prompt([5]), Prompt([6]), Prompt([6])], 0, "", call)  # type: ignore[arg-type]
        assert not server.admission.open_sequences

    gc.disable()
    try:
        run(work)
        assert calls[0]() is None
    finally:
        gc.enable()


def reranked(server: FakeServing, texts: list[str], call: Call) -> Any:
    request = RerankRequest(query="", documents=[""] * len(texts))
    return pooled.PooledResponse(server, request, call, Job(texts))  # type: ignore[arg-type]


def test_scores_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that moves by a millisecond whenever it is read, each score is a part."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.0011
        return now[0]

    monkeypatch.setattr(pooled, "time", SimpleNamespace(perf_counter=clock, time=lambda: 0.0))
    server = FakeServing()
    found = run(lambda: reranked(server, ["x"] * 300, called()).complete())
    assert len(list(found["results"].items)) == 300 and server.encoding.count == 300


def test_the_documents_of_a_large_body_are_charged_to_their_key() -> None:
    """Until the response, which repeats them, was sent."""
    server, call = FakeServing(answers=4 << 20), called()
    text = "x" * (1 << 20)

    async def complete(asked: Call) -> None:
        await reranked(server, [text], asked).complete()

    run(lambda: complete(call))
    assert server.admission.answer_bytes["a"] > len(text)
    other = called()
    with pytest.raises(ApiError, match="bytes of open responses"):
        run(lambda: complete(other))
    other.resources.release_response()
    run(lambda: complete(called("b")))
    call.resources.release_response()
    assert not server.admission.answer_bytes["a"]
    run(lambda: complete(called()))


def test_the_embeddings_behind_scores_are_charged() -> None:
    server, call = FakeServing(), called()
    run(lambda: reranked(server, ["x"] * 100, call).complete())
    assert server.admission.answer_bytes["a"] >= 100 * 4 * WIDTH + 100 * pooled._ITEM + 100
