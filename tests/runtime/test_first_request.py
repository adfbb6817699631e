"""An AsyncLLM that was not started: its first request starts the engine, as with vLLM's."""

from __future__ import annotations

import asyncio

import pytest
from llmc_runtime import LlmcError

from tests.runtime.async_kit import fake, last, run


def test_the_first_request_starts_the_engine_and_others_wait_for_it() -> None:
    async def requests() -> None:
        llm = fake()
        tasks = [asyncio.create_task(last(llm, {"prompt_token_ids": [40 + i]})) for i in range(5)]
        await asyncio.sleep(0)
        tasks.pop(0).cancel()  # the request that started it
        outputs = await asyncio.gather(*tasks)
        assert all(one.finished for one in outputs) and not llm.restarts
        with pytest.raises(LlmcError, match="started before"):
            await llm.start()
        await llm.shutdown()
        with pytest.raises(LlmcError, match="E663"):
            await last(llm, {"prompt_token_ids": [40]})

    run(requests())


def test_a_start_by_a_request_that_fails_is_reported_to_each() -> None:
    async def requests() -> None:
        llm = fake(path="missing")
        outcomes = await asyncio.gather(
            *(last(llm, {"prompt_token_ids": [40]}) for _ in range(3)), return_exceptions=True
        )
        assert [getattr(one, "code", one) for one in outcomes] == ["E101"] * 3
        with pytest.raises(LlmcError, match="E101"):
            await last(llm, {"prompt_token_ids": [40]})
        await llm.shutdown()

    run(requests())


def test_a_shutdown_ends_a_start_by_a_request() -> None:
    async def requests() -> None:
        llm = fake()
        task = asyncio.create_task(last(llm, {"prompt_token_ids": [40]}))
        await asyncio.sleep(0.05)
        await llm.shutdown()
        with pytest.raises(LlmcError, match="E663"):
            await task

    run(requests())
