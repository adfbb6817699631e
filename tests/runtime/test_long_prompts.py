"""Outputs of a long prompt share its list of token ids, so that many of them cost little more than one."""

from __future__ import annotations

import pytest
from llmc_runtime.sched import discarded_tokens
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams

from tests.runtime.oracle import Expected
from tests.runtime.rig import Rig


def add_outputs(rig: Rig, prompt: list[int], count: int) -> list[Request]:
    """Queue outputs of one request, named r0, r1, ..."""
    requests: list[Request] = []
    for i in range(count):
        leader = requests[0] if requests else None
        request = Request(f"r{i}", prompt, SamplingParams(max_tokens=3, temperature=0), leader=leader)
        rig.engine.add(request)
        rig.expected[f"r{i}"] = Expected(request, rig.config)
        requests.append(request)
    return requests


def test_waiting_outputs_share_their_prompt() -> None:
    """Outputs copy the prompt when they start, so that queueing 64 outputs of a long prompt takes no time for each."""
    rig, prompt = Rig(max_num_seqs=1), list(range(9))
    requests = add_outputs(rig, prompt, 3)
    assert all(request.tokens is prompt for request in requests)
    rig.step()
    assert [request.tokens is prompt for request in requests] == [False, True, True]
    rig.drain()
    assert prompt == list(range(9)) and [request.num_prompt for request in requests] == [9, 9, 9]


def test_rows_of_outputs_share_their_prompt() -> None:
    """The device converts the token ids once: rows that are built from the prompt alone get its list."""
    rig, prompt = Rig(max_num_seqs=4), list(range(41))
    add_outputs(rig, prompt, 4)
    while len(rig.scheduler.running) < 4:
        rig.step()
    inits = [init for plan in rig.plans for init in plan.inits]
    assert len(inits) == 4 and all(init.tokens is prompt for init in inits)
    rig.drain()
    assert prompt == list(range(41))


def test_a_shared_prompt_outlives_an_output_that_never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token ids of an aborted output are freed in later steps, but not those that other outputs still need."""
    monkeypatch.setattr(discarded_tokens, "FREED_PER_STEP", 4)
    rig, prompt = Rig(max_num_seqs=1), list(range(40))
    add_outputs(rig, prompt, 3)
    rig.step()
    rig.abort("r2")
    rig.abort("r0")
    assert rig.drain() == ["r1"]
    assert prompt == list(range(40))
