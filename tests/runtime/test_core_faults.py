"""Faults of the engine process and the errors that requests get: exit, hang, failure, garbage, end of the server."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from draw import of_test
from llmc_runtime import AsyncLLM, LlmcError, SamplingParams, StructuredOutputsParams
from llmc_runtime.engine.messages import Abort, Add, Control, Report, params_message, params_of
from llmc_runtime.heartbeat import is_runnable
from llmc_runtime.sched.sampling_params import PARAMETERS

from tests.runtime.async_kit import LONG, fake, last, prompt_of, run, settled
from tests.runtime.fake_core import CRASH, FAIL, HANG

FRONT = Path(__file__).with_name("front_program.py")
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


async def ready_again(llm: AsyncLLM) -> None:
    while not llm.is_running:
        assert not llm.errored, llm.dead_error
        await asyncio.sleep(0.02)


async def errors_of(tasks: list[asyncio.Task[Any]]) -> tuple[set[str], float]:
    """The codes of their errors, and how long they took."""
    began = time.monotonic()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(e, LlmcError) for e in found), found
    return {e.code for e in found}, time.monotonic() - began


async def busy(llm: AsyncLLM, count: int = 30) -> list[asyncio.Task[Any]]:
    """Requests, more than there are rows, of which some have begun."""
    rng = random.Random(of_test())
    tasks = [asyncio.create_task(last(llm, prompt_of(rng))) for _ in range(count)]
    while not llm.stats().get("num_requests_running"):
        await asyncio.sleep(0.02)
    return tasks


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, "E661"), (signal.SIGSTOP, "E662")])
def test_an_ended_or_stopped_process_is_noticed_within_a_second_and_replaced(number: int, code: str) -> None:
    async def strike() -> None:
        async with fake(0.004, heartbeat_timeout=1.0) as llm:
            want = await last(llm, {"prompt_token_ids": [40, 41]}, SHORT)
            tasks = await busy(llm)
            pid = llm.engine_pid
            assert pid is not None
            os.kill(pid, number)
            codes, seconds = await errors_of(tasks)
            assert codes == {code} and seconds < 2.0  # a second, and what a busy machine adds
            with pytest.raises(LlmcError, match="E660"):
                await llm.check_health()
            await ready_again(llm)
            assert llm.restarts == 1 and llm.engine_pid != pid and not psutil.pid_exists(pid)
            assert (await last(llm, {"prompt_token_ids": [40, 41]}, SHORT)).outputs == want.outputs
            assert (await settled(llm))["kv_cache_usage_perc"] == 0

    run(strike())


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_process_that_waits_for_a_processor_has_longer(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped one that seems to be starved: five times the limit, and no longer."""
    monkeypatch.setattr("llmc_runtime.heartbeat.is_runnable", lambda pid: True)

    async def strike() -> None:
        async with fake(0.004, heartbeat_timeout=0.4) as llm:
            tasks = await busy(llm, 3)
            assert llm.engine_pid is not None
            began = time.monotonic()
            os.kill(llm.engine_pid, signal.SIGSTOP)
            await asyncio.sleep(0.9)
            assert llm.is_running and not llm.restarts
            if goes_on:
                os.kill(llm.engine_pid, signal.SIGCONT)
                assert all(one.finished for one in await asyncio.gather(*tasks)) and not llm.restarts
            else:
                codes, _ = await errors_of(tasks)
                assert codes == {"E662"} and time.monotonic() - began > 1.5

    run(strike())


def test_one_look_finds_a_starved_process_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads wait for each other at most checks: that it was runnable at one of them is enough."""
    looks = iter([False, True])
    monkeypatch.setattr("llmc_runtime.heartbeat.is_runnable", lambda pid: next(looks, False))

    async def strike() -> None:
        async with fake(0.004, heartbeat_timeout=0.8) as llm:
            tasks = await busy(llm, 3)
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGSTOP)
            await asyncio.sleep(1.4)
            assert llm.is_running and not llm.restarts
            os.kill(llm.engine_pid, signal.SIGCONT)
            assert all(one.finished for one in await asyncio.gather(*tasks)) and not llm.restarts

    run(strike())


def test_processes_that_are_runnable() -> None:
    for wants, program in {True: "while True: pass", False: "import time; time.sleep(60)"}.items():
        with subprocess.Popen(
            [sys.executable, "-c", f"print(flush=True)\n{program}"], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.5)
            found = {is_runnable(process.pid) for _ in range(20)}
            process.kill()
        assert found == {wants}
    assert not is_runnable(2**30)


@pytest.mark.parametrize(("deed", "code"), [(CRASH, "E661"), (HANG, "E662"), (FAIL, "E608")])
def test_a_request_that_ends_the_engine_is_reported_and_so_are_the_others(deed: list[int], code: str) -> None:
    async def strike() -> None:
        async with fake(0.004, step_timeout=0.8) as llm:
            tasks = await busy(llm, 5)
            tasks.append(asyncio.create_task(last(llm, {"prompt_token_ids": deed})))
            codes, seconds = await errors_of(tasks)
            assert codes == {code} and seconds < 3.0
            await ready_again(llm)
            assert (await last(llm, {"prompt_token_ids": [40]}, SHORT)).finished

    run(strike())


def test_after_too_many_ends_it_gives_up_and_says_why(tmp_path: Path) -> None:
    lines: list[str] = []

    async def strike(llm: AsyncLLM, times: int) -> None:
        async with llm:
            for _ in range(times):
                await ready_again(llm)
                with pytest.raises(LlmcError, match="SIGKILL"):
                    await last(llm, {"prompt_token_ids": CRASH})
            while not llm.errored:
                await asyncio.sleep(0.02)
            with pytest.raises(LlmcError) as refused:
                await last(llm, {"prompt_token_ids": [40]})
            assert refused.value.code == "E664"
            assert "was opened before" in refused.value.cause or "SIGKILL" in refused.value.cause

    run(strike(fake(max_restarts=1, say=lines.append), 2))
    assert sum("failed requests: 1" in line for line in lines) == 2
    run(strike(fake(path=str(tmp_path / "once"), max_restarts=2), 1))  # it does not open again
    run(strike(fake(max_restarts=0), 1))


def test_a_process_that_ends_or_talks_nonsense_while_opening_is_an_error() -> None:
    quits = [sys.executable, "-c", "import sys; sys.exit(7)"]
    babbles = [
        sys.executable, "-c",
        "import sys, time, zmq; s = zmq.Context().socket(zmq.PUSH); s.connect(f'ipc://{sys.argv[2]}/reports');"
        "s.send(bytes([193, 0, 255])); time.sleep(30)",
    ]  # fmt: skip

    async def opens(command: list[str], words: str) -> None:
        llm = fake()
        object.__setattr__(llm._front, "command", command)
        with pytest.raises(LlmcError, match=words):
            await llm.start()
        assert llm.errored

    run(opens(quits, "code 7"))
    run(opens(babbles, "invalid message"))


def some_add(rng: random.Random) -> bytes:
    params = params_message(SamplingParams(seed=rng.randrange(2**63), max_tokens=3))
    prompt = array("I", [rng.randrange(300)]).tobytes()[: rng.choice([4, 4, 3])]
    return msgspec.msgpack.encode(Add(rng.randrange(1 << 40), prompt, params, 0, "", []))


def garbled(rng: random.Random) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(80))
    message = bytearray(some_add(rng) if kind < 3 else msgspec.msgpack.encode(Abort([rng.randrange(1 << 70 >> 7)])))
    for _ in range(rng.randrange(1, 4)):
        message[rng.randrange(len(message))] = rng.randrange(256)
    return bytes(message[: rng.randrange(len(message) + 1)]) if kind == 2 else bytes(message)


def test_malformed_messages_have_no_effect_on_others() -> None:
    rng = random.Random(of_test())

    async def babble() -> None:
        async with fake() as llm:
            channel = llm._running()._client
            assert channel is not None
            want = await last(llm, {"prompt_token_ids": [44]})
            for _ in range(3000):
                channel._push(channel._control, rng.randbytes(rng.randrange(60)))
                channel._push(channel._adds, rng.randbytes(rng.randrange(60)))
            assert (await last(llm, {"prompt_token_ids": [44]})).outputs == want.outputs
            for _ in range(3000):
                channel._push(channel._adds, garbled(rng))
            stats = await settled(llm)
            assert stats["kv_cache_usage_perc"] == 0 and llm.restarts == 0
            assert channel.heartbeat is not None and channel.heartbeat.invalid_messages > 3000

    run(babble())
    allowed = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
    for _ in range(5000):
        for kind in (Add, Control, Report):
            try:
                msgspec.msgpack.decode(garbled(rng), type=kind)
            except allowed:
                pass


def test_the_parameters_that_the_engine_needs_reach_it() -> None:
    text = {"stop": "x", "include_stop_str_in_output": True, "skip_special_tokens": False, "bad_words": ["x"]}
    assert params_message(SamplingParams(**text)) == {} == params_message(SamplingParams(detokenize=False))
    params = SamplingParams(
        n=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.5, presence_penalty=1,
        frequency_penalty=-1, seed=2**64 - 1, max_tokens=9, stop_token_ids=[3], ignore_eos=True, logprobs=2,
        logit_bias={7: 1.5}, allowed_token_ids=[1, 7], prompt_logprobs=1,
    )  # fmt: skip
    assert params_message(params).keys() == {one.name for one in PARAMETERS.values() if one.engine} - {
        "min_tokens", "structured_outputs"
    }  # fmt: skip
    assert params_of(msgspec.msgpack.decode(msgspec.msgpack.encode(params_message(params)))) == params
    for form in ({"choice": ["a", "b"]}, {"json": {"type": "object"}}, {"json_object": True}, {"regex": "a+"}):
        wanted = StructuredOutputsParams(**form, disable_any_whitespace=True)
        got = params_of(params_message(SamplingParams(structured_outputs=wanted))).structured_outputs
        assert got is not None and (got.kind, got.text, got.disable_any_whitespace) == (wanted.kind, wanted.text, True)


def begun(folder: Path, tokens: int) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A program whose request runs, and its engine process."""
    program = subprocess.Popen(
        [sys.executable, str(FRONT), str(tokens)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{FRONT.parents[2]}{os.pathsep}{FRONT.parents[1]}"},
    )  # fmt: skip
    assert program.stdout is not None
    return program, psutil.Process(int(program.stdout.readline()))


def all_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped; psutil's status is that of the first one."""
    try:
        files = [thread / "stat" for thread in Path(f"/proc/{pid}/task").iterdir()]
        states = {file.read_text().rpartition(")")[2].split()[0] for file in files}
    except FileNotFoundError:  # a thread has ended meanwhile
        return False
    return states == {"T"}


@pytest.mark.parametrize("stopped", [False, True])
def test_the_engine_process_ends_with_the_front_and_leaves_nothing(tmp_path: Path, stopped: bool) -> None:
    program, engine = begun(tmp_path, 200)
    if stopped:
        engine.suspend()
        while not all_stopped(engine.pid):  # the kernel wakes no process that stops later than its parent ends
            time.sleep(0.01)
    program.kill()
    program.wait()
    assert not psutil.wait_procs([engine], 10)[1]
    assert not list(tmp_path.iterdir())


def test_sigterm_lets_requests_finish_within_the_limit(tmp_path: Path) -> None:
    for tokens, end in ((5, "5 finished"), (200, "E663")):
        program, engine = begun(tmp_path, tokens)
        began = time.monotonic()
        program.send_signal(signal.SIGTERM)
        out, _ = program.communicate(timeout=20)
        assert end in out and program.returncode == 0
        assert time.monotonic() - began < 8 and not engine.is_running()
        assert not list(tmp_path.iterdir())


def test_an_event_loop_that_stood_still_is_no_failure_of_the_engine() -> None:
    async def stands() -> None:
        async with fake(heartbeat_timeout=1.0) as llm:
            task = asyncio.create_task(last(llm, {"prompt_token_ids": [60]}))
            await asyncio.sleep(0.05)
            time.sleep(1.6)
            assert (await task).finished
            await asyncio.sleep(0.3)
            assert llm.restarts == 0 and llm.is_running

    run(stands())


def test_a_front_that_is_forgotten_takes_its_process_along() -> None:
    async def forgets() -> psutil.Process:
        llm = fake()
        await llm.start()
        return psutil.Process(llm.engine_pid)

    engine = run(forgets())
    gc.collect()
    assert not psutil.wait_procs([engine], 3)[1]


def test_while_it_drains_nothing_new_is_taken() -> None:
    async def drains() -> None:
        llm = fake(0.003)
        await llm.start()
        task = asyncio.create_task(last(llm, {"prompt_token_ids": [60]}, LONG))
        while not llm.stats().get("num_requests_running"):
            await asyncio.sleep(0.02)
        closing = asyncio.create_task(llm.shutdown(20))
        await asyncio.sleep(0.05)
        with pytest.raises(LlmcError, match="E663"):
            await last(llm, {"prompt_token_ids": [61]})
        assert len((await task).outputs[0].token_ids) == 200
        await closing
        assert llm.errored
        with pytest.raises(LlmcError, match="E663"):
            await last(llm, {"prompt_token_ids": [61]})

    run(drains())
