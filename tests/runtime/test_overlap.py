"""Steps that are planned while others run: early launches and dropped work, which do not change outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Status
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import Step, StepOutput

from tests.runtime.audit import idle
from tests.runtime.rig import Rig
from tests.runtime.step_reply import reply
from tests.runtime.test_llm import TOK, Script, device, make, params


class Deep(Rig):
    """A rig of depth 2 that counts the steps under way at every wait, and can fail in a launch or wait."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(2, **sizes)
        self.waits: list[int] = []
        self.fault: dict[str, BaseException] = {}

    def launch(self, step: Step) -> Any:
        if "launch" in self.fault:
            raise self.fault.pop("launch")
        return super().launch(step)

    def wait(self, ticket: Any) -> StepOutput:
        self.waits.append(len(self.plans) - len(self.waits))
        if "wait" in self.fault:
            raise self.fault.pop("wait")
        return super().wait(ticket)


def test_one_step_is_always_ahead() -> None:
    rig = Deep()
    rig.add("a", 5, max_tokens=9)
    rig.add("b", 50, max_tokens=9)
    rig.drain()
    assert set(rig.waits[:-1]) == {2} and rig.waits[-1] == 1


def test_an_end_by_length_is_known_in_advance() -> None:
    for limit, sizes in ((4, {}), (None, {"num_pages": 2}), (None, {"max_model_len": 9})):
        rig = Deep(**sizes)
        request = rig.add("a", 5, max_tokens=limit)
        rig.drain()
        assert len(rig.plans) == len(request.output_token_ids) == 4


def test_an_end_by_token_leaves_one_step_too_many() -> None:
    free = Rig().add("a", 6, max_tokens=8)
    rig = Deep()
    first = rig.add("a", 6, max_tokens=8)
    rig.drain()
    stop = first.output_token_ids[2]
    rig = Deep(max_num_seqs=1)
    rig.add("a", free.prompt_token_ids, max_tokens=8, stop_token_ids=[stop])
    for _ in range(3):
        (delta,) = rig.step().values()
    assert delta.finish_reason == "stop" and len(rig.plans) == 4 and not rig.engine.has_work()
    rig.add("b", 6)
    assert rig.step() == {}, "the output of the fourth step is dropped"
    assert rig.plans[4].inits[0].row == rig.plans[0].inits[0].row
    assert rig.drain() == ["b"]
    assert rig.engine.step() == []


def test_pages_and_rows_of_an_aborted_request_are_used_by_the_next_plan() -> None:
    rig = Deep(num_pages=4, max_num_seqs=1, prefix_caching=False)
    rig.add("a", 12)
    rig.step()
    taken = set(rig.scheduler.running[0].pages)
    rig.abort("a")
    rig.add("b", 12)
    rig.step()
    (init,) = rig.plans[-1].inits
    assert set(init.pages) <= taken and rig.drain() == ["b"]


def test_a_preempted_request_gets_its_token_under_way() -> None:
    rig = Deep(num_pages=6, prefix_caching=False)
    rig.add("a", 8, max_tokens=9)
    late = rig.add("b", 8, max_tokens=9)
    while late.status is not Status.PREEMPTED:
        found = rig.step()
    assert "b" in found and late.num_total == len(late.tokens), "it came after the preemption"
    while late.status is not Status.RUNNING:
        rig.step()
    init = [init for plan in rig.plans for init in plan.inits][-1]
    assert init.tokens == late.tokens[: len(init.tokens)] and init.computed == 0
    assert rig.drain() == ["b"]


def test_the_last_token_under_way_survives_a_preemption() -> None:
    rig = Deep(num_pages=5, prefix_caching=False)
    rig.add("a", 8, max_tokens=12)
    rig.add("b", 7, max_tokens=2)
    rig.step()
    assert rig.scheduler.running[1].num_total == rig.scheduler.running[1].limit
    rig.scheduler.running[0].pages += rig.scheduler.pool.take(rig.scheduler.pool.num_free)
    victim = rig.scheduler.running[-1]
    rig.scheduler._preempt(victim, 0.0)
    (delta,) = rig.scheduler.commit(rig.device.wait(rig.engine._tickets.popleft()))[1:]
    assert (delta.id, delta.finish_reason) == ("b", "length") and victim.status is Status.FINISHED
    assert not rig.scheduler.waiting


@pytest.mark.parametrize("part", ["launch", "wait"])
def test_an_interrupt_costs_only_recomputation(part: str) -> None:
    rig = Deep(max_num_seqs=2)
    for name in "abc":
        rig.add(name, 5, max_tokens=6)
    rig.step()
    rig.step()
    rig.fault[part] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    assert rig.engine.error is None and rig.waiting() == ["a", "b", "c"] and not rig.scheduler.pool.num_used
    rig.waits += [0] * (len(rig.plans) - len(rig.waits))
    assert rig.drain() == ["a", "b", "c"]


def test_an_interrupt_while_an_interrupt_is_cleaned_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Deep()
    rig.add("a", 5)
    rig.step()
    rig.fault["wait"] = KeyboardInterrupt()
    calls = []

    def settle() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        rig.device.settle()

    monkeypatch.setattr(rig, "settle", settle)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rig.engine.step()
    assert rig.drain() == ["a"] and len(calls) == 2


@pytest.mark.parametrize("part", ["launch", "wait"])
def test_a_device_error_ends_the_engine_and_everyone_is_reported_once(part: str) -> None:
    rig = Deep(max_num_seqs=2)
    for name in "abc":
        rig.add(name, 5)
    rig.step()
    rig.fault[part] = LlmcError("E114", "the device failed", "restart")
    deltas = rig.engine.step()
    assert [(delta.id, delta.finish_reason) for delta in deltas] == [(name, "error") for name in "abc"]
    assert rig.engine.error is not None and rig.engine.error.code == "E114"
    assert rig.engine.step() == [] and not rig.engine.has_work() and idle(rig.engine)


def test_answers_do_not_depend_on_the_depth() -> None:
    found = []
    for depth in (1, 2, 3):
        draws = random.Random(5)
        rig = Rig(depth, num_pages=24, eos_token_ids=tuple(range(0, 1000, 17)))
        requests = []
        for i in range(40):
            requests.append(rig.add(f"r{i}", draws.randint(1, 30), max_tokens=draws.randint(1, 30)))
            if draws.random() < 0.5:
                rig.step()
        rig.drain()
        assert rig.engine.counters.num_preemptions
        found.append([request.tokens for request in requests])
    assert found[0] == found[1] == found[2]


def test_steps_under_way_are_bounded() -> None:
    rig = Rig(2)
    rig.add("a", 3)
    first, second = rig.scheduler.next(), rig.scheduler.next()
    assert first.work and second.work
    with pytest.raises(RuntimeError, match="neither committed nor rolled back"):
        rig.scheduler.next()
    rig.scheduler.rollback()
    assert rig.waiting() == ["a"]
    with pytest.raises(RuntimeError, match="no step was planned"):
        rig.scheduler.commit(reply([1]))
    assert rig.drain() == ["a"]


class DeepScript(Script):
    """Given ids, at depth 2."""

    depth = 2

    def launch(self, step: Any) -> Any:
        return self.run(step)

    def wait(self, ticket: Any) -> Any:
        return ticket


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_ends_a_request_that_is_under_way(streamed: bool) -> None:
    ids = TOK.encode(" the sea and the sky", add_special_tokens=False) + TOK.encode("the" * 40)
    llm = make(DeepScript(ids))
    wanted = params(40, stop=["sky", " and"])
    if streamed:
        pieces = list(llm.stream("a", wanted))
        text, reason = "".join(piece.text for piece in pieces), pieces[-1].stop_reason
    else:
        output = llm.generate("a", wanted, use_tqdm=False)[0].outputs[0]
        text, reason = output.text, output.stop_reason
        assert TOK.decode(output.token_ids) == " the sea and"
    assert (text, reason) == (" the sea", " and")
    assert not llm.engine.has_work() and llm.stats()["kv_cache_usage_perc"] == 0


def test_an_llm_answers_alike_at_every_depth() -> None:
    prompts = ["The kernel of a matrix", [5, 6, 7], "a b", "x", "y", "z"]
    wanted = SamplingParams(temperature=0.0, max_tokens=20, seed=7, logprobs=1)
    plain = make().generate(prompts, wanted, use_tqdm=False)
    for depth in (2, 3):
        llm = make(device(depth))
        again = llm.generate(prompts, wanted, use_tqdm=False)
        assert [o.outputs for o in again] == [o.outputs for o in plain]
        streams = [llm.stream(prompt, wanted) for prompt in prompts]
        assert [[t for p in s for t in p.token_ids] for s in streams] == [o.outputs[0].token_ids for o in plain]
        llm.close()
