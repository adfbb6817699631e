"""Failures of the engine: which requests get an error, which are unaffected, and what works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import Step, StepOutput

from tests.runtime.audit import idle
from tests.runtime.rig import Rig
from tests.runtime.step_reply import reply


class Broken:
    """The rig's executor with wrong outputs from a given step on."""

    def __init__(self, rig: Rig, at: int, wrong: Callable[[Step, StepOutput], StepOutput]) -> None:
        self.rig, self.left, self.wrong = rig, at, wrong
        self.depth, self.settle = rig.depth, rig.settle
        rig.engine.executor = self

    def launch(self, step: Step) -> tuple[Step, Any]:
        return step, self.rig.launch(step)

    def wait(self, ticket: tuple[Step, Any]) -> StepOutput:
        self.left -= 1
        step, inner = ticket
        output = self.rig.wait(inner)
        return self.wrong(step, output) if self.left < 0 else output


def raises(error: BaseException) -> Callable[[Step, StepOutput], StepOutput]:
    def wrong(step: Step, output: StepOutput) -> StepOutput:
        raise error

    return wrong


def rig_of_three() -> Rig:
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name, 5)
    return rig


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (raises(OSError("out of luck")), "OSError: out of luck"),
        (lambda step, output: reply([]), "2 rows ran, the executor returned tokens for 0"),
        (lambda step, output: reply([None] * 2), "returned token None"),
        (lambda step, output: reply([5, 1000]), "request 'b': the executor returned token 1000"),
        (lambda step, output: None, "AttributeError"),
    ],
)
def test_a_broken_executor_ends_the_engine_and_everyone_is_reported_once(
    wrong: Callable[[Step, StepOutput], StepOutput], words: str
) -> None:
    rig = rig_of_three()
    Broken(rig, 1, wrong)
    rig.step()
    deltas = rig.engine.step()
    assert [(delta.id, delta.finish_reason) for delta in deltas] == [("a", "error"), ("b", "error"), ("c", "error")]
    error = rig.engine.error
    assert error is not None and error.code == "E608" and words in error.cause and all(d.error is error for d in deltas)
    assert not rig.engine.has_work() and rig.engine.step() == []
    assert idle(rig.engine) and rig.engine.counters.request_success["error"] == 3
    with pytest.raises(LlmcError, match="E608"):
        rig.engine.add(Request("d", [1]))
    assert not rig.engine.abort("a")


def test_an_error_of_ours_keeps_its_code() -> None:
    rig = rig_of_three()
    Broken(rig, 0, raises(LlmcError("E210", "the device is full", "use a smaller pool")))
    assert all(delta.error is rig.engine.error for delta in rig.engine.step())
    assert rig.engine.error is not None and rig.engine.error.code == "E210"


def test_missing_logprobs_are_an_error() -> None:
    rig = Rig()
    rig.add("a", 3, logprobs=1)
    Broken(rig, 0, lambda step, output: reply(output.tokens))
    (delta,) = rig.engine.step()
    assert delta.finish_reason == "error" and "log-probabilities are missing" in str(delta.error)


def test_an_interrupt_costs_only_recomputation() -> None:
    rig = rig_of_three()
    broken = Broken(rig, 2, raises(KeyboardInterrupt()))
    rig.step()
    rig.step()
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    assert rig.engine.error is None and rig.waiting() == ["a", "b", "c"]
    broken.left = 100
    assert rig.drain() == ["a", "b", "c"]


def test_an_interrupt_outside_the_device_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of_three()
    rig.step()
    monkeypatch.setattr(rig.scheduler, "commit", lambda output: raises(KeyboardInterrupt())(Step(), output))
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    assert rig.engine.error is not None and not rig.engine.has_work()


def test_a_refused_request_does_not_affect_others() -> None:
    rig = rig_of_three()
    rig.step()
    for prompt in ([], [10**9], [1] * 500):
        with pytest.raises(LlmcError):
            rig.engine.add(Request("bad", prompt))
    assert rig.drain() == ["a", "b", "c"]


def test_stats_and_counters() -> None:
    rig = rig_of_three()
    budget = {"step_token_budget": rig.config.max_num_batched_tokens, "num_state_snapshots": 0}
    waiting = {"num_requests_running": 0, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.0}
    assert rig.engine.stats() == waiting | budget
    rig.step()
    stats = rig.engine.stats()
    running = {"num_requests_running": 2, "num_requests_waiting": 1, "kv_cache_usage_perc": 4 / 64}
    assert stats == running | budget
    rig.drain()
    found = rig.engine.counters.as_dict()
    assert found["generation_tokens"] == 12 and found["prompt_tokens"] == 15 and found["num_steps"] == len(rig.plans)
    assert found["num_scheduled_tokens"] == 15 + 9
    assert found["request_success"] == {"stop": 0, "length": 3, "abort": 0, "error": 0}


def test_an_idle_engine_does_nothing() -> None:
    rig = Rig()
    assert rig.engine.step() == [] and rig.plans == [] and rig.engine.counters.num_steps == 0
