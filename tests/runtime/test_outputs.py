"""Long outputs: the work per token does not grow with the number of tokens before it, nor wakes a reader each time."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import textkit
from draw import of_test
from llmc_runtime import SamplingParams
from llmc_runtime.api.async_request import MAX_UPDATE_TOKENS, AsyncRequestState
from llmc_runtime.engine.input_processor import prepare
from llmc_runtime.engine.messages import Delta, Rows, delta_of
from llmc_runtime.engine.output_processor import OutputProcessor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.logprobs import Logprob, LogprobRows
from llmc_runtime.outputs import OutputAssembler
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.packed_logprobs import PackedLogprobs
from llmc_runtime.sched.request import RequestDelta
from llmc_runtime.sched.step import TokenLogprobs
from llmc_runtime.text.tokenizer import Tokenizer


def test_the_whole_is_known_without_reading_it_again() -> None:
    rng = random.Random(of_test())
    tok = Tokenizer(textkit.byte_level(), {}, {})
    ids = [rng.randrange(10, tok.vocab_size) for _ in range(60)]
    values = [-rng.random() for _ in ids]
    part = OutputAssembler(0, [5], SamplingParams(max_tokens=60, logprobs=0), tok)
    messages = []
    for i, (token, value) in enumerate(zip(ids, values)):
        end = "length" if i == len(ids) - 1 else None
        part.add(RequestDelta("1", [token], end, logprobs=[TokenLogprobs(value, 1, [], [])]))
        if rng.random() < 0.5 or end:
            messages.append(part.new_output())
        whole = part.output()
        assert whole.cumulative_logprob == pytest.approx(sum(values[: i + 1]))
        assert len(part._text._returned) + len(part._text._new) < 5 + i - sum(len(one.token_ids) for one in messages)
    assert whole.text == "".join(one.text for one in messages) == tok.decode(ids)


@pytest.mark.parametrize(("length", "apart"), [(2, False), (200, False), (202, True), (1500, True)])
def test_the_scores_of_a_long_prompt_do_not_block_others(
    length: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tok = Tokenizer(textkit.byte_level(), {}, {})
    rng = random.Random(of_test())
    ids = [rng.randrange(10, 300) for _ in range(length)]
    scores = [TokenLogprobs(-rng.random(), 3, [7], [-0.1]) for _ in ids[1:]]
    where: set[bool] = set()
    inner = LogprobRows._row

    def watched(rows: LogprobRows, at: int) -> dict[int, Logprob] | None:
        where.add(threading.current_thread() is threading.main_thread())
        return inner(rows, at)

    monkeypatch.setattr(LogprobRows, "_row", watched)

    async def asked() -> None:
        outputs = OutputProcessor(lambda ids: None)
        request = prepare(Prompt(ids), SamplingParams(prompt_logprobs=1, max_tokens=1), [], tok.vocab_size)
        reader = AsyncRequestState("cumulative", 0.0, "r", None, ids, request.params, tok)
        outputs.add(request, reader)
        packed = PackedLogprobs(1)
        packed.extend(scores)
        rows = Rows(1, bytes(packed.data))
        outputs.process([delta_of(Delta(request.first, [50], "length", None, None, 0, None, rows, False))])
        assert not where
        output = await reader.next()
        assert output is not None and output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        for token, row, logprobs in zip(ids[1:], scores, output.prompt_logprobs[1:], strict=True):
            assert logprobs is not None and logprobs[token] == Logprob(row.logprob, 3, tok.token_text(token))

    asyncio.run(asked())
    assert where == {not apart}


def test_a_reader_with_an_interval_is_woken_for_the_first_output_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("llmc_runtime.api.async_request.time.monotonic", lambda: now)
    tok = Tokenizer(textkit.byte_level(), {}, {})

    async def read() -> list[list[int]]:
        nonlocal now
        outputs, got = OutputProcessor(lambda ids: None), []
        request = prepare(Prompt([50]), SamplingParams(max_tokens=9), [], tok.vocab_size)
        reader = AsyncRequestState("delta", 0.05, "r", None, [50], request.params, tok)
        outputs.add(request, reader)

        async def follow() -> None:
            while (output := await reader.next()) is not None:
                got.append(list(output.outputs[0].token_ids))

        following = asyncio.ensure_future(follow())
        for token, time in enumerate((100.0, 100.01, 100.04, 100.06, 100.07, 100.08), 60):
            now, reason = time, "length" if token == 65 else None
            outputs.process([delta_of(Delta(request.first, [token], reason, None, None, 0, None, None, False))])
            for _ in range(3):
                await asyncio.sleep(0)
        await following
        return got

    assert asyncio.run(read()) == [[60], [61, 62, 63], [64, 65]]


def test_an_error_does_not_wait_for_the_interval() -> None:
    async def read() -> None:
        outputs = OutputProcessor(lambda ids: None)
        request = prepare(Prompt([50]), SamplingParams(max_tokens=9), [], 512)
        reader = AsyncRequestState("delta", 1e6, "r", None, [50], request.params, None)
        outputs.add(request, reader)
        outputs.process([delta_of(Delta(request.first, [60], None, None, None, 0, None, None, False))])
        assert await reader.next() is not None
        outputs.expire(reader, 1.0)
        with pytest.raises(LlmcError, match="E666"):
            await reader.next()

    asyncio.run(read())


def test_a_step_notifies_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking for each of its outputs whether the request has ended would take quadratic time."""
    calls = list[str]()
    monkeypatch.setattr(AsyncRequestState, "notify", lambda self: calls.append(self.request_id))
    outputs, count = OutputProcessor(lambda ids: None), 16
    params = SamplingParams(n=count, max_tokens=4)
    states = []
    for name in ("a", "b"):
        state = AsyncRequestState("delta", 0.0, name, None, [5], params, None)
        outputs.add(prepare(Prompt([5]), params, [], 100), state)
        states.append(state)
    every = [RequestDelta(one, [7], None) for state in states for one in state.ids]
    outputs.process(every)
    outputs.process([RequestDelta(one, [7], "length") for one in states[1].ids])
    assert calls == ["a", "b", "b"] and states[1].finished and not states[0].finished
    assert [part.token_ids for part in states[1].parts] == [[7, 7]] * count


@pytest.mark.parametrize("stop", [None, ["zz", "Q"]])
def test_a_late_reader_gets_a_long_output_in_parts(stop: list[str] | None) -> None:
    """What a reader does with a part is limited; its text never precedes its tokens, and the last part ends it."""

    async def read() -> None:
        rng = random.Random(of_test())
        tok = Tokenizer(textkit.byte_level(), {}, {})
        params = SamplingParams(max_tokens=5000, n=3, stop=stop)
        state = AsyncRequestState("delta", 0.0, "r", None, [50], params, tok)
        wanted: list[list[int]] = []
        for part, length in zip(state.parts, (5000, 3, 1100), strict=True):
            ids = [rng.randrange(97, 123) for _ in range(length)]  # letters, perhaps a stop string
            for i, token in enumerate(ids):
                part.add(RequestDelta("1", [token], "length" if i == length - 1 else None))
            wanted.append(part.token_ids)
        state.notify()
        tokens: list[list[int]] = [[], [], []]
        texts = ["", "", ""]
        ends = [0, 0, 0]
        while (output := await state.next()) is not None:
            assert 0 < sum(len(one.token_ids) for one in output.outputs) <= MAX_UPDATE_TOKENS
            assert output.finished == (sum(ends) + sum(one.finished() for one in output.outputs) == 3)
            for one in output.outputs:
                assert not ends[one.index]
                tokens[one.index] += one.token_ids
                texts[one.index] += one.text
                ends[one.index] += one.finished()
                assert tok.decode(tokens[one.index]).startswith(texts[one.index])
        assert tokens == wanted and ends == [1, 1, 1]
        assert texts == [part._text.text for part in state.parts]

    asyncio.run(read())
