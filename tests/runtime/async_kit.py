"""AsyncLLM over the simulated device, and functions with which tests wait for it."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from llmc_runtime import AsyncLLM, RequestOutput, SamplingParams
from llmc_runtime.api.async_front import Front
from llmc_runtime.engine.messages import Open
from llmc_runtime.text.tokenizer import Tokenizer

from tests.runtime.fake_core import VOCAB

PROGRAM = Path(__file__).with_name("fake_core.py")
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def fake(pace: float = 0.0, path: str = "ok", tok: Tokenizer | None = None, **options: Any) -> AsyncLLM:
    """Return an AsyncLLM that is not started. Each step takes `pace` additional seconds.

    Timeouts are long, so that a busy machine causes no failures.
    """
    opening = Open(path, digest="5e" * 32)
    front = Front([sys.executable, "-P", str(PROGRAM), str(pace)], opening, tok)
    calm = {"heartbeat_timeout": 20.0, "restart_delay": 0.0, "say": lambda line: None}
    return AsyncLLM.over(front, **(calm | options))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, with a limit of a minute, and return its result."""

    async def limited() -> Any:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


def prompt_of(rng: random.Random) -> dict[str, Any]:
    """Return a prompt of random token ids, none of which has a side effect on the engine."""
    return {"prompt_token_ids": [rng.randrange(10, VOCAB) for _ in range(rng.randrange(1, 40))]}


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams | None = LONG, kind: str = "final_only") -> Any:
    """Return the last output."""
    found: RequestOutput | None = None
    async for output in llm.generate(prompt, params, "r", output_kind=kind):
        found = output
    assert found is not None and found.finished
    return found


async def settled(llm: AsyncLLM) -> dict[str, Any]:
    """Return the statistics once all work is done."""
    before = llm._running().heartbeat
    for _ in range(200):
        await asyncio.sleep(0.05)
        stats = llm.stats()
        fresh = llm._running().heartbeat is not before
        if fresh and not stats["num_requests_running"] and not stats["num_requests_waiting"]:
            return stats
    raise AssertionError(f"requests are left: {stats}")
