"""Several engines of one front: requests with a common prefix share an engine, killed engines are replaced, and metrics
are per engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime import LLM, AsyncLLM, RequestOutput, SamplingParams
from llmc_runtime.api.async_front import Front
from llmc_runtime.engine.instances import Instances, MeteredOutputs
from llmc_runtime.engine.messages import Open
from llmc_runtime.engine.supervisor import Supervisor
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.host_info import usable_cpus
from llmc_runtime.metrics import total_stats

from tests.runtime.async_kit import LONG, fake, last, prompt_of, run
from tests.runtime.fake_core import CRASH, build
from tests.runtime.served import TOK

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def loads(llm: AsyncLLM) -> list[tuple[int, int]]:
    """Queued prompt tokens and open sequences of each engine, as the front counts them."""
    found = []
    for engine in llm.engines:
        assert isinstance(engine.outputs, MeteredOutputs)
        found.append((engine.outputs.load.queued_tokens, engine.outputs.load.sequences))
    return found


async def until(condition: Any) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


def test_the_same_tokens_as_one_engine_and_nothing_is_left() -> None:
    rng = random.Random(1)
    prompts = [prompt_of(rng) for _ in range(60)]
    params = SamplingParams(temperature=1, seed=5, max_tokens=12, n=2, ignore_eos=True)

    async def ours() -> tuple[list[RequestOutput], dict[str, Any], list[dict[str, Any]]]:
        async with fake(data_parallel_size=3) as llm:
            assert isinstance(llm._running(), Instances) and len({engine.pid for engine in llm.engines}) == 3
            found = await asyncio.gather(*(last(llm, prompt, params) for prompt in prompts))
            assert loads(llm) == [(0, 0)] * 3 and not llm.open_requests()
            await until(lambda: llm.stats()["request_success"]["length"] == 120)
            return found, llm.stats(), llm.stats_by_engine()

    found, stats, each = run(ours())
    alone = LLM.over(build(0.0, depth=1)).generate(prompts, params)
    assert [[one.token_ids for one in out.outputs] for out in found] == [
        [one.token_ids for one in out.outputs] for out in alone
    ]
    assert all(one["request_success"]["length"] > 20 for one in each)
    assert stats["generation_tokens"] == sum(one["generation_tokens"] for one in each) == 60 * 24


def test_one_engine_has_no_router() -> None:
    async def main() -> None:
        async with fake() as llm:
            assert type(llm._running()) is Supervisor and llm.engines[0].route(None) is llm.engines[0]  # type: ignore[arg-type]

    run(main())


def test_conversations_stay_on_one_engine() -> None:
    rng = random.Random(2)
    talks = [[rng.randrange(10, 400) for _ in range(30)] for _ in range(4)]

    async def main() -> list[dict[str, Any]]:
        async with fake(data_parallel_size=2) as llm:
            for turn in range(5):
                for tokens in talks:
                    output = await last(llm, {"prompt_token_ids": tokens}, SHORT)
                    assert (output.num_cached_tokens or 0) >= (len(tokens) - 14 if turn else 0)
                    tokens += [*output.outputs[0].token_ids, *(rng.randrange(10, 400) for _ in range(6))]
            await until(lambda: llm.stats()["request_success"]["length"] == 20)
            return llm.stats_by_engine()

    assert [one["request_success"]["length"] for one in run(main())] == [10, 10]


def test_an_engine_that_dies_takes_its_requests_and_no_others() -> None:
    async def main() -> None:
        async with fake(0.02, data_parallel_size=2) as llm:
            tasks = [asyncio.create_task(last(llm, {"prompt_token_ids": [20 + i] * 8})) for i in range(6)]
            await until(lambda: [one for _, one in loads(llm)] == [3, 3])
            rows = llm.open_requests()
            assert sorted(row["engine"] for row in rows) == [0, 0, 0, 1, 1, 1]
            victim = llm.engines[0]
            pid = victim.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: victim.state != "ready")
            assert llm.is_running and llm.state == "ready"
            await llm.check_health()
            assert len((await last(llm, {"prompt_token_ids": [60] * 8}, SHORT)).outputs[0].token_ids) == 4
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [one for one in ended if isinstance(one, LlmcError)]
            assert [one.code for one in failed] == ["E661"] * 3
            assert sum(isinstance(one, RequestOutput) for one in ended) == 3
            await until(lambda: victim.state == "ready")
            assert (
                victim.pid != pid and llm.restarts == 1 and [one["restarts"] for one in llm.stats_by_engine()] == [1, 0]
            )
            assert loads(llm) == [(0, 0)] * 2
            await asyncio.gather(*(last(llm, {"prompt_token_ids": [70 + i] * 8}, SHORT) for i in range(4)))
            await until(lambda: victim.stats()["request_success"]["length"] >= 2)  # type: ignore[index]

    run(main())


def test_all_engines_down_is_what_one_engine_down_is() -> None:
    async def main() -> None:
        async with fake(data_parallel_size=2, max_restarts=0) as llm:
            for left in (1, 0):
                with pytest.raises(LlmcError) as e:
                    await last(llm, {"prompt_token_ids": [*CRASH, 9]})
                assert e.value.code == "E661" and not (left and llm.gave_up)
                if left:
                    assert (await last(llm, {"prompt_token_ids": [20]}, SHORT)).finished
            await asyncio.wait_for(llm.wait_given_up(), 10)
            assert llm.errored and not llm.is_running
            with pytest.raises(LlmcError) as e:
                await last(llm, {"prompt_token_ids": [20]})
            assert e.value.code == "E664"

    run(main())


def test_aborts_and_resets_reach_the_engine_that_has_the_request() -> None:
    async def main() -> None:
        async with fake(0.02, data_parallel_size=2) as llm:
            outputs = [llm.generate({"prompt_token_ids": [30 + i] * 12}, LONG, f"r{i}") for i in range(4)]
            for output in outputs:
                await anext(output)
            assert await llm.reset_prefix_cache() is False
            assert [await llm.abort(f"r{i}") for i in range(4)] == [1] * 4
            for output in outputs:
                assert (await anext(output)).outputs[0].finish_reason == "abort"
                await output.aclose()
            assert loads(llm) == [(0, 0)] * 2
            await until(lambda: not llm.stats()["num_requests_running"])
            assert (await last(llm, {"prompt_token_ids": [30] * 12}, SHORT)).num_cached_tokens
            await until(lambda: not llm.stats()["num_requests_running"])
            assert await llm.reset_prefix_cache() is True
            assert (await last(llm, {"prompt_token_ids": [30] * 12}, SHORT)).num_cached_tokens == 0
            rows = await llm.record(0.05)
            assert isinstance(rows, list)

    run(main())


def test_scores_grammars_and_timeouts_work_as_with_one() -> None:
    async def main() -> None:
        async with fake(0.01, tok=TOK, data_parallel_size=2) as llm:
            tokens = {"prompt_token_ids": list(range(40, 60))}
            scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
            for _ in range(3):
                assert len((await last(llm, tokens, scored)).prompt_logprobs or ()) == 20
            form: Any = {"choice": ["yes", "no"]}
            from llmc_runtime import StructuredOutputsParams

            choice = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(**form))
            texts = await asyncio.gather(*(last(llm, {"prompt_token_ids": [80 + i] * 9}, choice) for i in range(4)))
            assert all(one.outputs[0].text in form["choice"] for one in texts)
            with pytest.raises(LlmcError) as e:
                async for _ in llm.generate({"prompt_token_ids": [20]}, LONG, "late", timeout=0.1):
                    pass
            assert e.value.code == "E666" and loads(llm) == [(0, 0)] * 2

    run(main())


def test_one_engine_that_does_not_open_ends_all(tmp_path: Path) -> None:
    async def main() -> None:
        once = str(tmp_path / "opened")  # the second engine cannot open it
        llm = fake(path=once, data_parallel_size=2)
        with pytest.raises(LlmcError) as e:
            await llm.start()
        assert e.value.code == "E106" and llm.errored
        assert all(engine.pid is None for engine in llm.engines)
        await llm.shutdown()

    run(main())


def test_shutdown_drains_all() -> None:
    async def main() -> None:
        llm = fake(0.01, data_parallel_size=2)
        await llm.start()
        tasks = [asyncio.create_task(last(llm, {"prompt_token_ids": [20 + i] * 8}, SHORT)) for i in range(4)]
        await until(lambda: [one for _, one in loads(llm)] == [2, 2])
        await llm.shutdown(drain=10.0)
        assert all(len(one.outputs[0].token_ids) == 4 for one in await asyncio.gather(*tasks))
        assert llm.errored and all(engine.pid is None for engine in llm.engines)

    run(main())


@pytest.mark.parametrize("value", [0, -1, 65, 1.5, "2", True])
def test_wrong_numbers_are_refused(value: Any) -> None:
    with pytest.raises(LlmcError) as e:
        EngineArgs("", data_parallel_size=value)
    assert e.value.code == "E201"


def test_more_engines_than_cpus_and_one_trace_for_two_are_refused(toy: Path, tmp_path: Path) -> None:
    cpus = usable_cpus()

    async def start(**options: Any) -> None:
        async with AsyncLLM(toy, say=lambda line: None, **options):
            pass

    with pytest.raises(LlmcError) as e:
        run(start(data_parallel_size=min(64, cpus + 1)))
    assert e.value.code == "E201" and str(cpus) in e.value.remedy
    with pytest.raises(LlmcError) as e:
        EngineArgs(toy, data_parallel_size=2, trace=tmp_path / "trace")
    assert e.value.code == "E201"
    with pytest.raises(LlmcError) as e:
        LLM(toy, data_parallel_size=2)
    assert e.value.code == "E201" and "AsyncLLM" in e.value.remedy


def test_totals_are_sums_and_usage_is_a_mean() -> None:
    one = {"a": 1, "by": {"x": 1}, "h": [0.5, 1, 0], "kv_cache_usage_perc": 0.2}
    two = {"a": 2, "by": {"x": 1, "y": 3}, "h": [0.5, 0, 2], "kv_cache_usage_perc": 0.4}
    total = total_stats([one, two])
    assert total["a"] == 3 and total["by"] == {"x": 2, "y": 3} and total["h"] == [1.0, 1, 2]
    assert total["kv_cache_usage_perc"] == pytest.approx(0.3)


def test_engines_are_numbered_and_divide_threads() -> None:
    async def main() -> list[int]:
        supervisor = Instances(["true"], Open("ok"), EngineArgs("", data_parallel_size=3), 1.0, lambda line: None)
        return [engine._opening.engine for engine in supervisor.engines]

    assert run(main()) == [0, 1, 2]
    assert EngineArgs("", data_parallel_size=64).engine_threads == 1
    assert EngineArgs("", data_parallel_size=2, threads=5).engine_threads == 5
    assert Front([], Open("ok")).opening.engine == 0
