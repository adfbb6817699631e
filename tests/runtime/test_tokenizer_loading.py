"""AsyncLLM loads the tokenizer while its engine opens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime import AsyncLLM, LlmcError, SamplingParams
from llmc_runtime.api import async_front
from llmc_runtime.engine.client import EngineClient
from llmc_runtime.engine.messages import Open

from tests.runtime.async_kit import PROGRAM, last, run

GREEDY = SamplingParams(temperature=0, max_tokens=5)


def opened(path: Path, **options: Any) -> AsyncLLM:
    return AsyncLLM(path, threads=1, heartbeat_timeout=20.0, say=lambda line: None, **options)


async def generated(path: Path, **options: Any) -> tuple[list[int], str | None]:
    """Return the tokens that follow "abc", and why they end."""
    async with opened(path, **options) as llm:
        output = (await last(llm, "abc", GREEDY)).outputs[0]
    return list(output.token_ids), output.finish_reason


class Spy:
    """Records the starts of engine processes and the loads of tokenizers, and replaces what is loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, eos: list[int] | LlmcError) -> None:
        self.events: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        popen, load = subprocess.Popen, async_front.open_tokenizer

        def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
            self.events.append("engine")
            self.processes.append(popen(*args, **kwargs))
            return self.processes[-1]

        def read(*args: Any) -> Any:
            self.events.append("tokenizer")
            if isinstance(eos, LlmcError):
                raise eos
            return load(*args)[0], eos

        monkeypatch.setattr("llmc_runtime.engine.client.subprocess.Popen", start)
        monkeypatch.setattr(async_front, "open_tokenizer", read)


def test_the_engine_opens_meanwhile_and_knows_the_end_of_texts(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, reason = run(generated(toy))
    assert (len(tokens), reason) == (5, "length")
    spy = Spy(monkeypatch, [10**6, tokens[2]])  # an id beyond the vocabulary ends nothing
    assert run(generated(toy)) == (tokens[: tokens.index(tokens[2]) + 1], "stop")
    assert spy.events == ["engine", "tokenizer"]


def test_several_engines_need_it_once(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch, [])
    assert run(generated(toy, data_parallel_size=2))[1] == "length"
    assert spy.events.count("engine") == 2 and spy.events.count("tokenizer") == 1


def test_its_error_ends_the_start(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch, LlmcError("E151", "the tokenizer is broken", "mend it"))
    with pytest.raises(LlmcError, match="the tokenizer is broken"):
        run(opened(toy).start())
    (process,) = spy.processes
    assert process.poll() is not None


def test_an_engine_that_waits_for_it_can_be_stopped() -> None:
    async def stopped() -> tuple[int | None, LlmcError]:
        command = [sys.executable, "-P", str(PROGRAM), "0"]
        client = EngineClient(command, 0.2, lambda deltas: None, lambda line: None)
        loads = asyncio.Event()

        async def eos() -> list[int]:
            loads.set()
            await asyncio.sleep(60)
            return []

        opening = asyncio.create_task(client.open(Open("ok", eos=None), 30, eos))
        await loads.wait()
        opening.cancel()
        await client.stop(20)
        error = client.check(0, 20, 20)
        assert error is not None
        return client.process.returncode, error

    code, error = run(stopped())
    assert code == 1 and error.code == "E663"
