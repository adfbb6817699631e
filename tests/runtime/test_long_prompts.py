"""Outputs of a long prompt share its token ids, so that many of them cost little more than one.

The prompts of requests that wait are arrays: a queue may hold millions of tokens, and a list takes 40 bytes for each.
"""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Callable, Iterable, MutableSequence
from functools import partial
from typing import Any

import msgspec
import pytest
from llmc_runtime.api.async_request import AsyncRequestState
from llmc_runtime.engine.input_processor import EngineRequest
from llmc_runtime.engine.messages import Add, add_message, request_of
from llmc_runtime.exec.rank_messages import Launch, Link
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched import discarded_tokens
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import RowInit, RowParams, Step

from tests.runtime.oracle import Expected
from tests.runtime.rig import Rig

Make = Callable[[Iterable[int]], MutableSequence[int]]
PACKED: Make = partial(array, "I")
any_prompt = pytest.mark.parametrize("make", [list, PACKED], ids=["list", "array"])


def add_outputs(rig: Rig, prompt: MutableSequence[int], count: int) -> list[Request]:
    """Queue outputs of one request, named r0, r1, ..."""
    requests: list[Request] = []
    for i in range(count):
        leader = requests[0] if requests else None
        request = Request(f"r{i}", prompt, SamplingParams(max_tokens=3, temperature=0), leader=leader)
        rig.engine.add(request)
        rig.expected[f"r{i}"] = Expected(request, rig.config)
        requests.append(request)
    return requests


@any_prompt
def test_waiting_outputs_share_their_prompt(make: Make) -> None:
    """Outputs copy the prompt when they start, so that queueing 64 outputs of a long prompt takes no time for each."""
    rig, prompt = Rig(max_num_seqs=1), make(range(9))
    requests = add_outputs(rig, prompt, 3)
    assert all(request.tokens is prompt for request in requests)
    rig.step()
    assert [request.tokens is prompt for request in requests] == [False, True, True]
    rig.drain()
    assert prompt == make(range(9)) and [request.num_prompt for request in requests] == [9, 9, 9]


@any_prompt
def test_rows_of_outputs_share_their_prompt(make: Make) -> None:
    """The device converts the token ids once: rows that are built from the prompt alone get its list."""
    rig, prompt = Rig(max_num_seqs=4), make(range(41))
    add_outputs(rig, prompt, 4)
    while len(rig.scheduler.running) < 4:
        rig.step()
    inits = [init for plan in rig.plans for init in plan.inits]
    assert len(inits) == 4 and all(init.tokens is prompt for init in inits)
    rig.drain()
    assert prompt == make(range(41))


@any_prompt
def test_a_shared_prompt_outlives_an_output_that_never_started(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """The token ids of an aborted output are freed in later steps, but not those that other outputs still need."""
    monkeypatch.setattr(discarded_tokens, "FREED_PER_STEP", 4)
    rig, prompt = Rig(max_num_seqs=1), make(range(40))
    add_outputs(rig, prompt, 3)
    rig.step()
    rig.abort("r2")
    rig.abort("r0")
    assert rig.drain() == ["r1"]
    assert prompt == make(range(40))


def test_outputs_that_run_share_the_objects_of_an_array() -> None:
    rig = Rig(max_num_seqs=4)
    requests = add_outputs(rig, PACKED(range(500, 541)), 4)
    while len(rig.scheduler.running) < 4:
        rig.step()
    assert all(a is b for request in requests for a, b in zip(requests[0].tokens[:41], request.tokens))
    rig.drain()


def test_a_waiting_prompt_takes_few_bytes_a_token() -> None:
    """In the engine, and in the front end besides the array itself."""
    count = 50_000
    rig = Rig(max_model_len=1 << 17, num_pages=1 << 15, max_num_seqs=1)
    add_outputs(rig, list(range(9)), 1)
    rig.step()
    prompt = Prompt([i % 1000 for i in range(count)]).packed()
    sent = msgspec.msgpack.encode(add_message(EngineRequest(7, prompt, SamplingParams())))

    def size(make: Callable[[], Any]) -> float:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        after = tracemalloc.get_traced_memory()[0]
        assert made is not None
        return (after - before) / count

    def engine() -> Request:
        request = request_of(msgspec.msgpack.decode(sent, type=Add))
        waiting = Request("7", request.prompt.ids, request.params)
        rig.engine.add(waiting)
        return waiting

    tracemalloc.start()
    try:
        assert size(engine) < 5
        assert size(lambda: AsyncRequestState("delta", 0.0, "a", None, prompt.ids, SamplingParams(), None)) < 1
    finally:
        tracemalloc.stop()


def test_ranks_get_a_prompt_as_a_list() -> None:
    link = Link(None, Launch)  # type: ignore[arg-type]
    data = link.encode(Launch(Step(inits=[RowInit(0, array("I", [5, 6]), 0, 2, RowParams(), [1])])))
    assert msgspec.msgpack.decode(data[4:], type=Launch).step.inits[0].tokens == [5, 6]
