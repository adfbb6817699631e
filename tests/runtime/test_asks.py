"""Control RPCs to a running engine, which record its loop or empty its prefix cache, do not change tokens."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from llmc_runtime import SamplingParams
from llmc_runtime.engine.control_rpc import MAX_ROWS, ControlServer
from llmc_runtime.engine.messages import ControlRequest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request
from llmc_runtime.trace import PARTS, document

from tests.runtime.async_kit import LONG, fake, last, prompt_of, run, settled
from tests.runtime.fake_core import HANG, build


def test_a_recording_has_the_steps_of_its_time_and_changes_nothing() -> None:
    prompts = [prompt_of(random.Random(i)) for i in range(6)]

    async def main() -> None:
        async with fake(0.001) as llm:
            quiet = await asyncio.gather(*(last(llm, prompt) for prompt in prompts))
            work = [asyncio.create_task(last(llm, prompt)) for prompt in prompts]
            recording = asyncio.create_task(llm.record(0.3))
            await asyncio.sleep(0)
            with pytest.raises(LlmcError, match="recorded already"):
                await llm.record(0.1)
            open_now = llm.open_requests()
            assert [one["prompt_tokens"] for one in open_now] == [len(p["prompt_token_ids"]) for p in prompts]
            assert all(one["age"] >= 0 and one["outputs"] == 1 and one["id"] == "r" for one in open_now)
            rows = await recording
            for before, after in zip(quiet, await asyncio.gather(*work), strict=True):
                assert before.outputs[0].token_ids == after.outputs[0].token_ids
            doc = document(rows)
            events = [e for e in json.loads(json.dumps(doc))["traceEvents"] if e["ph"] == "X"]
            assert {e["name"] for e in events} >= set(PARTS) and len(events) > 40
            # What is noted first has begun before the recording.
            assert all(e["dur"] >= 0 and e["ts"] + e["dur"] < 1e6 for e in events[5:])
            assert max(e["args"]["rows"] for e in events) == 6
            again = await llm.record(0.05)  # nothing runs
            assert len(again) < 3 and not llm.open_requests()

    run(main())


def test_the_prefix_cache_is_forgotten_when_nothing_runs() -> None:
    async def main() -> None:
        async with fake(0.005) as llm:
            prompt = {"prompt_token_ids": list(range(20, 60))}
            few = SamplingParams(max_tokens=2, temperature=0)
            assert [(await last(llm, prompt, few)).num_cached_tokens > 0 for _ in range(2)] == [False, True]
            running = asyncio.create_task(last(llm, prompt, LONG))
            while not llm.stats().get("num_requests_running"):
                await asyncio.sleep(0.01)
            assert await llm.reset_prefix_cache() is False
            await running
            await settled(llm)
            assert await llm.reset_prefix_cache() is True
            assert (await last(llm, prompt, few)).num_cached_tokens == 0

    run(main())


def test_a_call_to_an_engine_that_dies_raises_an_error() -> None:
    async def main() -> None:
        async with fake(0.0, step_timeout=0.5) as llm:
            hanging = asyncio.create_task(last(llm, {"prompt_token_ids": [*HANG, 9]}))
            await asyncio.sleep(0.1)
            with pytest.raises(LlmcError) as error:
                await llm.record(5.0)
            assert error.value.code == "E662"
            with pytest.raises(LlmcError):
                await hanging

    run(main())


def test_a_recording_is_bounded() -> None:
    engine = build(0.0, depth=1)
    answers = ControlServer(engine)
    assert answers.wait_ms is None and answers.finished_recording() is None
    assert answers.handle(ControlRequest(1, "record", 1e9)) is None
    assert 0 < (answers.wait_ms or 0) <= 60_001
    second = answers.handle(ControlRequest(2, "record", 1.0))
    assert second is not None and not second.done
    unknown = answers.handle(ControlRequest(3, "no such thing", 1.0))
    assert unknown is not None and not unknown.done
    note = engine.note
    for _ in range(MAX_ROWS // 3):
        note("begin", ())
        note("plan", _Plan())
        note("commit", True)
    _, _, recorder, stop = answers._recording or (None,) * 4
    assert recorder is not None and stop is not None and len(recorder.rows()) <= MAX_ROWS
    stop()
    assert engine.note is not note
    engine.add(Request("1", [20, 30], SamplingParams(max_tokens=2)))
    while engine.has_work():
        engine.step()


class _Plan:
    work: tuple[int, ...] = ()
    num_tokens = 0
