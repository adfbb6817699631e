"""Threads, Ctrl-C, finalizers and forks against an LLM over the simulated device: no step is ever cut in two."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llmc_runtime import LlmcError
from llmc_runtime.fair_lock import FairLock

from tests.runtime.fake_executor import FakeExecutor
from tests.runtime.test_llm import device, make, params

PROMPTS = ("the kernel", "a b", "c d e", "once")


def answers(llm: Any, n: int = 12) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params(n), use_tqdm=False)]


def during(llm: Any, method: str, act: Callable[[], object]) -> None:
    """Have `act` run once, in the middle of the scheduler's `method`, from the third call on."""
    scheduler = llm.engine.scheduler
    inner = getattr(scheduler, method)
    calls: list[int] = []

    def outer(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            act()
        return inner(*args)

    setattr(scheduler, method, outer)


@pytest.mark.parametrize("depth", [1, 2])
def test_threads_share_an_llm(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FakeExecutor.wait

    def slow(self: FakeExecutor, ticket: Any) -> Any:
        time.sleep(1e-4)  # as a device does, it lets other threads go on
        return inner(self, ticket)

    monkeypatch.setattr(FakeExecutor, "wait", slow)
    llm, expected = make(device(depth)), answers(make())
    found: list[Any] = []

    def work(streamed: bool) -> None:
        try:
            for _ in range(5):
                if streamed:
                    pieces = list(llm.stream(PROMPTS[1], params(12)))
                    found.append([t for p in pieces for t in p.token_ids] == expected[1])
                else:
                    found.append(answers(llm) == expected)
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 1,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 30
    assert not llm.engine.has_work()


def test_turns_are_taken_in_order_of_arrival() -> None:
    turns, order, threads = FairLock(), [], []
    with turns:
        for i in range(8):
            waiting = len(turns._queue)

            def take(i: int = i) -> None:
                with turns:
                    order.append(i)

            threads.append(threading.Thread(target=take))
            threads[-1].start()
            while len(turns._queue) == waiting:
                pass
    for thread in threads:
        thread.join(60)
    assert order == list(range(8))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A background job may have Ctrl-C ignored; a program in a terminal has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["add", "next", "commit", "_append"])
def test_ctrl_c_waits_for_the_end_of_the_turn(ctrl_c: None, method: str, depth: int) -> None:
    llm, expected = make(device(depth)), answers(make())
    during(llm, method, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        for _ in range(4):
            answers(llm)
    assert llm.engine.error is None and not llm.engine.has_work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert answers(llm) == expected


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["next", "_append"])
def test_a_stream_lost_within_a_step_ends_after_it(method: str, depth: int) -> None:
    llm, expected = make(device(depth)), answers(make())
    box = [llm.stream("lost", params(60))]
    next(box[0])
    (lost,) = llm.engine.scheduler.requests

    def lose() -> None:
        box.clear()
        gc.collect()
        assert lost in llm.engine.scheduler.requests, "it was ended in the middle of a step"

    during(llm, method, lose)
    assert answers(llm) == expected
    assert not box and lost not in llm.engine.scheduler.requests
    assert llm.stats()["kv_cache_usage_perc"] == 0


def test_a_forked_process_gets_an_error() -> None:
    llm = make()
    stream = llm.stream("a b", params(20))
    next(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            answers(llm)
        except LlmcError as error:
            stream.close(), llm.close()
            os._exit(0 if error.code == "E609" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(stream)) == 19


def test_calls_of_a_closed_llm_raise_an_error() -> None:
    llm = make()
    stream = llm.stream("a b", params(20))
    next(stream)
    llm.close()
    llm.close()
    assert [piece.finish_reason for piece in stream] == ["abort"]
    for use in (lambda: answers(llm), lambda: llm.stream("a")):
        with pytest.raises(LlmcError, match=r"E608: .*the LLM is closed"):
            use()
    assert llm.stats()["num_requests_running"] == 0
