"""Two engines of the demonstration model on the CPU: conversations keep their prefix; a killed engine restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kernel_cache import CACHE
from llmc_runtime import AsyncLLM, RequestOutput, SamplingParams
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.host_info import usable_cpus

from llmc.driver import compile_model
from llmc.options import Options

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(usable_cpus() < 2, reason="two engines need two CPUs"),
]  # fmt: skip
DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
OPENINGS = ("Once upon a time", "The kernel", "What is a river?", "In the beginning")
TURN, LONG = (SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (12, 300))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.llmc"
    compile_model(DEMO, path, Options(cache=CACHE))
    return path


async def answer(llm: AsyncLLM, tokens: list[int], params: SamplingParams) -> RequestOutput:
    found = [
        output async for output in llm.generate({"prompt_token_ids": tokens}, params, "r", output_kind="final_only")
    ]
    return found[-1]


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def test_conversations_and_a_kill(demo: Path) -> None:
    lines: list[str] = []

    async def main() -> list[list[int]]:
        async with AsyncLLM(demo, data_parallel_size=2, restart_delay=0.0, say=lines.append) as llm:
            assert llm.tokenizer is not None
            talks = [[*llm.tokenizer.encode(text * 6)] for text in OPENINGS]
            for turn in range(6):
                for tokens, output in zip(
                    talks, await asyncio.gather(*(answer(llm, t, TURN) for t in talks)), strict=True
                ):
                    cached, page = output.num_cached_tokens or 0, llm.config.page_size
                    assert not turn or cached >= len(tokens) - 24 - 2 * page  # all but the last turn
                    tokens += [*output.outputs[0].token_ids, *llm.tokenizer.encode(" and then")]
            await until(lambda: sum(one["request_success"]["length"] for one in llm.stats_by_engine()) == 24)
            assert [one["request_success"]["length"] for one in llm.stats_by_engine()] == [12, 12]

            running = [asyncio.create_task(answer(llm, tokens[:40], LONG)) for tokens in talks]
            await until(lambda: [len(engine.outputs) for engine in llm.engines] == [2, 2])
            first = llm.engines[0].pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            ended = await asyncio.gather(*running, return_exceptions=True)
            assert sorted(type(one).__name__ for one in ended) == ["LlmcError"] * 2 + ["RequestOutput"] * 2
            assert all(one.code == "E661" for one in ended if isinstance(one, LlmcError))
            await until(lambda: llm.engines[0].state == "ready")
            assert llm.engines[0].pid != first and llm.restarts == 1
            return [list((await answer(llm, tokens, TURN)).outputs[0].token_ids) for tokens in talks for _ in range(2)]

    found = asyncio.run(main())
    assert found[::2] == found[1::2]
    assert any(line.startswith("2 engines: ") and "in all" in line for line in lines)
