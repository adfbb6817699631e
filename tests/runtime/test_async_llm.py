"""AsyncLLM over an engine process: the same tokens as LLM, many at a time, aborts, slow readers, bad requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import textkit
from draw import of_test
from llmc_runtime import LLM, AsyncLLM, LlmcError, RequestOutput, SamplingParams, StructuredOutputsParams
from llmc_runtime.api import async_llm
from llmc_runtime.text.tokenizer import Tokenizer

from tests.runtime.async_kit import LONG, fake, last, prompt_of, run, settled
from tests.runtime.fake_core import LENGTH, VOCAB, build

TOK = Tokenizer(textkit.byte_level(bos=True), {"bos_token": "<s>", "eos_token": "</s>"}, {})


def random_params(rng: random.Random) -> SamplingParams:
    ids = rng.sample(range(VOCAB), 5)
    return SamplingParams(
        n=rng.choice([1, 1, 2, 3]), temperature=0.5 + rng.random(), seed=rng.randrange(2**64), top_k=rng.randrange(9),
        max_tokens=rng.randrange(1, 40), min_tokens=rng.randrange(2), stop_token_ids=ids[:2],
        logit_bias={ids[3]: 2.5} if rng.random() < 0.3 else None, ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 0, 3]), prompt_logprobs=rng.choice([None, None, 2]),
        allowed_token_ids=ids[2:] if rng.random() < 0.3 else None,
    )  # fmt: skip


def test_a_hundred_at_a_time_give_what_LLM_gives_one_by_one() -> None:
    rng = random.Random(of_test())
    work = [(prompt_of(rng), random_params(rng)) for _ in range(100)]

    async def together() -> list[RequestOutput]:
        async with fake() as llm:
            outputs = await asyncio.gather(*(last(llm, *one, rng.choice(["cumulative", "final_only"])) for one in work))
            stats = await settled(llm)
            assert stats["kv_cache_usage_perc"] == 0 and not stats["num_requests_open"]
            return list(outputs)

    one = LLM.over(build(0.0, depth=1))
    for (prompt, params), got in zip(work, run(together())):
        (want,) = one.generate(prompt, params, use_tqdm=False)
        assert got.outputs == want.outputs
        assert (got.prompt_token_ids, got.prompt_logprobs) == (want.prompt_token_ids, want.prompt_logprobs)


def test_the_pieces_joined_are_the_whole_and_stop_strings_end_it() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, n=1)

    async def both() -> None:
        async with fake(0.005, tok=TOK) as llm:
            whole = await last(llm, "The kernel", params)
            text = whole.outputs[0].text
            stop = text[len(text) // 2 :][:2]
            limited = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, stop=[stop])  # aborted long before
            pieces, seen = [], ""
            async for output in llm.generate("The kernel", limited, "p", output_kind="delta"):
                pieces += output.outputs
            async for output in llm.generate("The kernel", limited, "q"):
                assert output.outputs[0].text.startswith(seen)
                seen = output.outputs[0].text
            assert seen == "".join(p.text for p in pieces) == text[: text.index(stop)]
            assert pieces[-1].finish_reason == "stop" and pieces[-1].stop_reason == stop
            ids = [token for p in pieces for token in p.token_ids]
            assert ids == whole.outputs[0].token_ids[: len(ids)] and len(ids) < 60
            assert (await settled(llm))["request_success"]["abort"] == 2

    run(both())


def test_outputs_wait_to_be_read_together_but_never_those_of_a_stream() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked: list[float] = []

    def pause() -> float:
        asked.append(0.03)
        return asked[-1]

    async def both() -> None:
        async with fake(0.002) as llm:
            want = await last(llm, {"prompt_token_ids": [50, 51]}, params)
            llm.output_pause = pause
            got = await last(llm, {"prompt_token_ids": [50, 51]}, params, "final_only")
            assert got.outputs == want.outputs
            assert 0 < len(asked) < 60, "the outputs of several steps are read together"
            prompt = {"prompt_token_ids": [52, 53]}
            whole = asyncio.create_task(last(llm, prompt, params, "final_only"))
            counts = [len(asked) async for _ in llm.generate(prompt, params, "stream")]
            assert len(counts) > 20 and len(set(counts)) == 1, "a stream is open"
            assert len((await whole).outputs[0].token_ids) == 60
            await settled(llm)
            before = len(asked)
            await last(llm, prompt, params, "final_only")
            assert len(asked) > before, "the stream has ended"

    run(both())


def test_leaving_the_iterator_frees_the_pages_within_two_steps() -> None:
    pace = 0.2
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def leave() -> None:
        async with fake(pace) as llm:
            task = asyncio.create_task(last(llm, {"prompt_token_ids": [50, 51]}, params))
            while not llm.stats().get("num_requests_running"):
                await asyncio.sleep(0.02)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            steps = llm.stats()["num_steps"]
            stats = await settled(llm)
            assert stats["kv_cache_usage_perc"] == 0
            assert stats["num_steps"] <= steps + 1 + 2  # one that no pulse had reported
            outputs = llm.generate({"prompt_token_ids": [60]}, params, "x")
            await anext(outputs)
            await outputs.aclose()
            assert (await settled(llm))["request_success"]["abort"] == 2
            reader = asyncio.create_task(last(llm, {"prompt_token_ids": [61]}, params))
            while not await llm.abort("r"):
                await asyncio.sleep(0.02)
            assert (await reader).outputs[0].finish_reason == "abort"

    run(leave())


def test_a_thousand_quick_cancels_leak_nothing() -> None:
    rng = random.Random(of_test())
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def cancel_all() -> None:
        async with fake() as llm:
            for _ in range(10):
                tasks = [asyncio.create_task(last(llm, prompt_of(rng), params)) for _ in range(100)]
                for task in tasks:
                    await asyncio.sleep(0 if rng.random() < 0.9 else 0.002)
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            stats = await settled(llm)
            assert stats["kv_cache_usage_perc"] == 0 and stats["num_requests_open"] == 0
            outputs = llm._running().outputs
            assert not outputs._parts and not outputs._states
            ended = await last(llm, {"prompt_token_ids": [77]}, params)
            assert len(ended.outputs[0].token_ids) == 100

    run(cancel_all())


def test_a_slow_reader_delays_no_others_and_gets_everything() -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def slowly() -> None:
        async with fake() as llm:
            slow = llm.generate({"prompt_token_ids": [90]}, params, "slow", output_kind="delta")
            first = await anext(slow)
            for _ in range(3):
                await last(llm, {"prompt_token_ids": [91]}, params)
            stats = await settled(llm)  # the slow one's tokens, too, though nobody has read them
            assert stats["generation_tokens"] == 800
            rest = [output async for output in slow]
            assert len(rest) == 1
            ids = first.outputs[0].token_ids + rest[0].outputs[0].token_ids
            whole = await last(llm, {"prompt_token_ids": [90]}, params)
            assert ids == whole.outputs[0].token_ids

    run(slowly())


@pytest.mark.parametrize(
    ("prompt", "options", "code"),
    [
        ({"prompt_token_ids": [VOCAB]}, {}, "E606"),
        ({"prompt_token_ids": []}, {}, "E605"),
        ({"prompt_token_ids": [2**70]}, {}, "E606"),
        ({"prompt_token_ids": [9] * LENGTH}, {}, "E602"),
        ({"prompt_token_ids": [9]}, {"max_tokens": LENGTH}, "E603"),
        ({"prompt_token_ids": [9]}, {"stop": "x"}, "E620"),
        ({"prompt_token_ids": [9]}, {"stop_token_ids": [VOCAB]}, "E601"),
        ("text", {}, "E620"),
        (3.5, {}, "E625"),
    ],
)
def test_requests_that_cannot_run_are_refused_without_effect_on_others(
    prompt: Any, options: dict[str, Any], code: str
) -> None:
    async def refused() -> None:
        async with fake() as llm:
            other = asyncio.create_task(last(llm, {"prompt_token_ids": [70]}, SamplingParams(max_tokens=50)))
            with pytest.raises(LlmcError) as error:
                await last(llm, prompt, SamplingParams(**options))
            assert error.value.code == code
            with pytest.raises(LlmcError, match="cannot be sent"):
                async for _ in llm.generate({"prompt_token_ids": [9]}, None, "s", cache_salt="\ud800"):
                    pass
            assert (await other).finished and llm.restarts == 0

    run(refused())


def test_values_that_no_message_can_hold_are_refused_at_once() -> None:
    """The engine could not read it, and would never answer."""
    bad: list[dict[str, Any]] = [
        {"cache_salt": None}, {"cache_salt": 5}, {"tenant": None}, {"priority": "1"}, {"priority": 1.5},
        {"priority": None}, {"priority": True}, {"timeout": "5"}, {"timeout": -1}, {"timeout": float("nan")},
        {"output_kind": "all"}, {"sampling_params": {"max_tokens": 5}}, {"priority": 2**80},
    ]  # fmt: skip

    async def refused() -> None:
        async with fake() as llm:
            for given in bad:
                whole: dict[str, Any] = {"sampling_params": LONG, "request_id": "r"} | given
                with pytest.raises(LlmcError, match=r"E601|E625"):
                    async for _ in llm.generate({"prompt_token_ids": [9]}, **whole):
                        break
            assert not llm.open_requests() and not (await settled(llm))["num_requests_open"]

    run(refused())


def test_many_bad_words_are_tokenized_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[bool] = []
    inner = async_llm.bad_word_tokens

    def watched(params: SamplingParams, tok: Tokenizer | None) -> list[list[int]]:
        where.append(threading.current_thread() is threading.main_thread())
        return inner(params, tok)

    monkeypatch.setattr(async_llm, "bad_word_tokens", watched)

    async def asks() -> None:
        async with fake(tok=TOK) as llm:
            for words in (["ab"], ["ab", *(f"{i} " * 100 for i in range(50))]):
                params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, bad_words=words)
                assert "ab" not in (await last(llm, "abc", params)).outputs[0].text

    run(asks())
    assert where == [True, False]


def test_opening_fails_with_the_engine_s_own_error() -> None:
    async def fails() -> None:
        llm = fake(path="missing")
        with pytest.raises(LlmcError) as error:
            await llm.start()
        assert (error.value.code, error.value.remedy, llm.state) == ("E101", "give another", "dead")
        with pytest.raises(LlmcError, match="E101"):
            await last(llm, {"prompt_token_ids": [9]}, None)

    run(fails())


def test_an_artifact_on_the_CPU_target_gives_what_LLM_gives(toy: Path) -> None:
    rng = random.Random(of_test())
    prompts = ["abc", "the end", {"prompt_token_ids": [5, 6, 7]}]
    wanted = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=2),
        SamplingParams(seed=rng.randrange(2**63), max_tokens=12, n=2, bad_words=["a"]),
        None,
    ]
    lines: list[str] = []

    async def ours() -> list[RequestOutput]:
        async with AsyncLLM(toy, threads=1, heartbeat_timeout=20.0, say=lines.append) as llm:
            assert llm.config.num_pages > 0
            return list(await asyncio.gather(*(last(llm, p, w) for p, w in zip(prompts, wanted))))

    got = run(ours())
    with LLM(toy, threads=1, say=lines.append) as llm:
        for prompt, params, output in zip(prompts, wanted, got):
            (want,) = llm.generate(prompt, params, use_tqdm=False)
            assert output.outputs == want.outputs
    assert lines[0].startswith("opening ") and lines[:2] == [lines[2], f"{lines[3]}, target of prompt steps: 20 ms"]


def test_structured_outputs_are_compiled_by_the_engine_process() -> None:
    pytest.importorskip("llguidance")
    rng = random.Random(of_test())
    texts = ["".join(rng.choices("abcde", k=4)) for _ in range(3)]

    def wanted(**form: Any) -> SamplingParams:
        forms = StructuredOutputsParams(**form)
        return SamplingParams(seed=rng.randrange(2**63), max_tokens=20, structured_outputs=forms)

    work = [wanted(choice=texts), wanted(regex="[ab]{3}c"), SamplingParams(temperature=0, max_tokens=20)]

    async def ours() -> list[RequestOutput]:
        async with fake(tok=TOK) as llm:
            quick = asyncio.create_task(last(llm, "abc", wanted(regex="a{1,200}b")))
            await asyncio.sleep(rng.random() / 20)
            quick.cancel()  # perhaps while it compiles
            with pytest.raises(LlmcError, match="E651"):
                await last(llm, "abc", wanted(regex="(((("))
            got = await asyncio.gather(*(last(llm, "abc", one) for one in work))
            assert (await settled(llm))["kv_cache_usage_perc"] == 0
            return list(got)

    got = run(ours())
    assert got[0].outputs[0].text in texts
    one = LLM.over(build(0.0, depth=1), TOK)
    for params, output in zip(work, got):
        assert output.outputs == one.generate("abc", params, use_tqdm=False)[0].outputs


def test_an_idle_engine_takes_no_processor_whatever_grammar_processes_say() -> None:
    """The messages end, and a compilation that no request waits for is completed."""
    pytest.importorskip("llguidance")

    async def seconds(pid: int) -> float:
        before = psutil.Process(pid).cpu_times()
        await asyncio.sleep(1)
        after = psutil.Process(pid).cpu_times()
        return float(after.user + after.system - before.user - before.system)

    async def main() -> None:
        async with fake(tok=TOK) as llm:
            form = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[ab]{3}c"))
            await last(llm, "abc", form)
            pid = llm.engine_pid
            assert pid is not None
            left = asyncio.create_task(
                last(llm, "abc", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a?){300}b")))
            )
            await asyncio.sleep(0.02)
            left.cancel()
            await asyncio.sleep(2)
            assert await seconds(pid) < 0.5
            for child in psutil.Process(pid).children(recursive=True):
                child.kill()
            await asyncio.sleep(2)
            assert await seconds(pid) < 0.5
            await last(llm, "abc", form)

    run(main())


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for options in ({"heartbeat_timeout": 0}, {"max_restarts": -1}, {"step_timeout": "x"}):
        with pytest.raises(LlmcError, match="E201"):
            AsyncLLM(tmp_path, **options)
    with pytest.raises(LlmcError, match="E648: there is no option 'no_such_option'"):
        AsyncLLM(tmp_path, no_such_option=1)


def test_a_request_ends_when_its_time_is_over_whether_somebody_reads_or_not() -> None:
    async def main() -> None:
        async with fake(0.01) as llm:
            unread = llm.generate({"prompt_token_ids": [50]}, LONG, "unread", timeout=0.3, output_kind="delta")
            assert (await anext(unread)).outputs
            with pytest.raises(LlmcError, match=r"E666.*0\.2 s"):
                await last_within(llm, 0.2)
            await asyncio.sleep(0.4)
            stats = await settled(llm)
            assert stats["kv_cache_usage_perc"] == 0 and stats["request_success"]["abort"] == 2
            with pytest.raises(LlmcError, match="E666"):
                await anext(unread)
            quick = SamplingParams(max_tokens=3, ignore_eos=True)
            done = llm.generate({"prompt_token_ids": [50]}, quick, "done", timeout=0.5, output_kind="final_only")
            await asyncio.sleep(0)
            finished = [output async for output in done]
            await asyncio.sleep(0.6)
            assert finished[0].finished and finished[0].times is not None and not llm.stats()["num_requests_open"]

    async def last_within(llm: AsyncLLM, seconds: float) -> None:
        async for _ in llm.generate({"prompt_token_ids": [60]}, LONG, "r", timeout=seconds):
            pass

    run(main())


def test_tenants_get_equal_service() -> None:
    short = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    async def main() -> None:
        async with fake(0.003) as llm:

            async def one(tenant: str) -> str:
                async for _ in llm.generate(
                    {"prompt_token_ids": [50, 60]}, short, "r", tenant=tenant, output_kind="final_only"
                ):
                    pass
                order.append(tenant)
                return tenant

            order: list[str] = []
            many = [asyncio.create_task(one("many")) for _ in range(150)]
            await asyncio.sleep(0.1)
            few = [asyncio.create_task(one("few")) for _ in range(5)]
            await asyncio.gather(*many, *few)
            place = max(i for i, name in enumerate(order) if name == "few")
            assert place < 100, f"the last of the few was number {place} of 155"

    run(main())
