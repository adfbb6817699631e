"""Tenants: who goes next when there is too little for all. Exact orders; the simulator holds bounds over long runs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from llmc_runtime.sched import scheduler
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.waiting_queue import _MIN_KEPT, OUTPUT_WEIGHT, ROW_WAIT_SECONDS, WaitingQueue

from tests.runtime.oracle import Expected
from tests.runtime.rig import Rig


def add(rig: Rig, name: str, prompt: int, tenant: str, priority: int = 0, **params: Any) -> Request:
    ids = [random.randrange(rig.config.vocab_size) for _ in range(prompt)]
    given = SamplingParams(temperature=0, ignore_eos=True, **params)
    request = Request(name, ids, given, priority, tenant=tenant)
    rig.engine.add(request)
    rig.expected[name] = Expected(request, rig.config)
    return request


def test_one_request_does_not_wait_for_the_five_hundred_of_another() -> None:
    rig = Rig(max_num_seqs=2, num_pages=16)
    for i in range(500):
        add(rig, f"a{i}", 8, "many", max_tokens=4)
    for _ in range(6):
        rig.step()
    light = add(rig, "b", 8, "few", max_tokens=4)
    steps = 0
    while light.status is not Status.FINISHED:
        rig.step()
        steps += 1
    assert steps <= 9 and len(rig.expected) > 480, "it waits for one that runs, at most"
    for name in list(rig.expected):
        rig.abort(name)


def test_two_take_turns_by_what_they_get_not_by_how_much_they_ask() -> None:
    rig = Rig(max_num_seqs=1, prefix_caching=False)
    for i in range(40):  # 4 tokens of prompt and 2 of output: 8
        add(rig, f"s{i:02}", 4, "short", max_tokens=2)
    for i in range(10):  # 16 and 8: 32
        add(rig, f"l{i:02}", 16, "long", max_tokens=8)
    order = "".join(name[0] for name in rig.drain())
    assert Counter(order[:25]) == {"s": 20, "l": 5}, order
    assert {order[i : i + 5].count("l") for i in range(0, 45, 5)} <= {0, 1, 2}, order


def test_output_weighs_more_than_prompts_and_cached_prompts_nothing() -> None:
    rig = Rig(max_num_seqs=1)
    prompt = add(rig, "p", 9, "a", max_tokens=3).prompt_token_ids
    rig.add("wait", 3)  # so that not all is forgotten when it ends
    rig.step()
    service = rig.scheduler.waiting.tenants["a"]
    assert service.service == 9 + OUTPUT_WEIGHT
    rig.step()
    rig.step()
    assert service.service == 9 + 3 * OUTPUT_WEIGHT
    again = Request("q", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), tenant="a")
    rig.engine.add(again)
    rig.expected["q"] = Expected(again, rig.config)
    before = service.service
    rig.drain()
    assert again.num_cached == 8 and service.service == before + 1 + OUTPUT_WEIGHT


@pytest.mark.parametrize("flood", ["other", "same"])
def test_many_prompts_of_one_tenant_leave_the_prefixes_of_another(flood: str) -> None:
    rig = Rig(max_num_seqs=2, num_pages=32)
    prompt = add(rig, "p", 41, "same", max_tokens=1).prompt_token_ids
    rig.drain()
    for i in range(8):
        add(rig, f"f{i}", 41, flood, max_tokens=1)
        rig.drain()
    again = Request("q", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), tenant="same")
    rig.engine.add(again)
    rig.expected["q"] = Expected(again, rig.config)
    rig.drain()
    assert again.num_cached == (40 if flood == "other" else 0)


def test_scored_prompts_weigh_as_output_does() -> None:
    rig = Rig(max_num_seqs=1)
    add(rig, "p", 9, "a", max_tokens=1, prompt_logprobs=2)
    rig.add("wait", 3)
    account = rig.scheduler.waiting.tenants["a"]
    rig.step()
    assert account.service == 9 * OUTPUT_WEIGHT
    for name in list(rig.expected):
        rig.abort(name)


def test_scoring_leaves_a_row_for_another_tenant() -> None:
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=64, prefix_caching=False)
    for i in range(20):
        add(rig, f"s{i:02}", 40, "scorer", max_tokens=1, prompt_logprobs=1)
    rig.step()
    assert [r.id for r in rig.scheduler.running] == ["s00"], "alone it takes all rows of logits"
    light = add(rig, "b", 4, "other", max_tokens=3)
    steps = 0
    while light.status is Status.WAITING:
        rig.step()
        steps += 1
    assert steps <= 3, "it does not wait until the prompt that runs is scored"
    assert rig.scheduler.running[0].id == "s00"
    for name in list(rig.expected):
        rig.abort(name)


def test_two_scorers_and_readers_take_turns_by_what_they_cost() -> None:
    rig = Rig(max_num_seqs=1, prefix_caching=False)
    for i in range(40):  # 4 tokens of prompt and 2 of output: 8
        add(rig, f"s{i:02}", 4, "short", max_tokens=2)
    for i in range(10):  # 15 scored tokens and 1 of output: 32
        add(rig, f"l{i:02}", 15, "scorer", max_tokens=1, prompt_logprobs=0)
    order = "".join(name[0] for name in rig.drain())
    assert Counter(order[:25]) == {"s": 20, "l": 5}, order


def test_a_returning_tenant_has_no_credit() -> None:
    rig = Rig(max_num_seqs=1, prefix_caching=False)
    for i in range(60):
        add(rig, f"a{i:02}", 4, "a", max_tokens=2)
    add(rig, "b00", 4, "b", max_tokens=2)  # and then it pauses
    while "a20" in rig.expected:
        rig.step()
    for i in range(1, 10):
        add(rig, f"b{i:02}", 4, "b", max_tokens=2)
    order = "".join(name[0] for name in rig.drain())
    assert order.startswith(("abab", "baba", "abba", "baab")) and abs(order[:16].count("b") - 8) <= 1, order


def test_within_a_tenant_the_policy_counts() -> None:
    rig = Rig(max_num_seqs=1, policy="priority", prefix_caching=False)
    for name, tenant, priority in (("a5", "a", 5), ("a1", "a", 1), ("b9", "b", 9), ("b0", "b", 0)):
        add(rig, name, 4, tenant, priority, max_tokens=2)
    assert rig.drain() == ["a1", "b0", "a5", "b9"], "a's smaller number is no claim against b's"


def test_the_tenant_that_has_received_most_gives_pages_first() -> None:
    """The light tenant's request came last, but is not preempted; the heavy one's last request is."""
    rig = Rig(num_pages=12, max_num_seqs=4, prefix_caching=False)
    for name in ("a0", "a1"):
        add(rig, name, 12, "heavy", max_tokens=20)
    for _ in range(4):
        rig.step()
    light, given = add(rig, "b", 4, "light", max_tokens=20), rig.engine.scheduler.requests["a1"]
    while given.status is not Status.PREEMPTED:
        rig.step()
        assert light.status is not Status.PREEMPTED
    rig.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tenant_that_waits_gets_rows_of_one_that_has_all(depth: int) -> None:
    """Until both have equal numbers of rows. Tokens do not change, and requests that lost a row continue."""
    now, rig = [0.0], Rig(depth, max_num_seqs=4, num_pages=128)
    rig.scheduler.clock = lambda: now[0]
    for i in range(8):
        add(rig, f"a{i}", 8, "many", max_tokens=100)
    for _ in range(20):
        rig.step()
    light = [add(rig, f"b{i}", 8, "few", max_tokens=60) for i in range(4)]
    now[0] = 0.9 * ROW_WAIT_SECONDS
    for _ in range(10):
        rig.step()
    assert not any(name.startswith("b") for name in rig.running())
    now[0] = ROW_WAIT_SECONDS
    for _ in range(10):
        rig.step()
    counts = Counter(name[0] for name in rig.running())
    assert counts == {"a": 2, "b": 2}
    assert light[0].output_token_ids
    while any(name.startswith("b") for name in rig.expected):
        rig.step()
    rig.drain()


def test_a_tenant_that_waits_gets_pages_of_one_that_has_all() -> None:
    now, rig = [0.0], Rig(max_num_seqs=16, num_pages=27, prefix_caching=False)
    rig.scheduler.clock = lambda: now[0]
    for i in range(3):
        add(rig, f"a{i}", 28, "many", max_tokens=30)
    for _ in range(4):
        rig.step()
    late = add(rig, "b", 28, "few", max_tokens=4)
    for seconds in (0.9 * ROW_WAIT_SECONDS, ROW_WAIT_SECONDS):
        assert not late.output_token_ids
        now[0] = seconds
        for _ in range(3):
            rig.step()
    assert late.output_token_ids
    rig.drain()


def test_a_priority_holds_no_row_against_another_tenant() -> None:
    """Whatever the number is; of the rows of the tenant that has too many, those of its lowest priority go first."""
    now, rig = [0.0], Rig(policy="priority", num_pages=128)
    rig.scheduler.clock = lambda: now[0]
    for i in range(4):
        add(rig, f"a{i}", 8, "many", -(2**40) - i, max_tokens=100)
    for _ in range(4):
        rig.step()
    late = add(rig, "b", 8, "few", max_tokens=4)
    now[0] = ROW_WAIT_SECONDS
    for _ in range(5):
        rig.step()
    assert late.output_token_ids
    assert rig.scheduler.counters.num_preemptions == 1 and "a0" not in rig.running()
    rig.drain()


def test_rows_are_not_taken_from_requests_of_the_same_tenant() -> None:
    now, rig = [0.0], Rig()
    rig.scheduler.clock = lambda: now[0]
    for i in range(4):
        add(rig, f"a{i}", 8, "a", max_tokens=40)
    rig.step()
    late = add(rig, "b", 8, "a", max_tokens=4)
    now[0] = 2 * ROW_WAIT_SECONDS
    for _ in range(5):
        rig.step()
    assert late.status is Status.WAITING and not rig.scheduler.counters.num_preemptions
    rig.drain()


def test_times_are_those_of_the_clock() -> None:
    now = [100.0]
    rig = Rig(max_num_seqs=1)
    rig.scheduler.clock = lambda: now[0]
    add(rig, "a", 40, "", max_tokens=3)
    add(rig, "b", 4, "", max_tokens=2)
    found: dict[str, Any] = {}
    while rig.engine.has_work():
        found |= {name: delta.times for name, delta in rig.step().items() if delta.times}
        now[0] += 1.0
    assert found == {"a": (0.0, 1.0), "b": (4.0, 0.0)}, "two chunks of a prompt; a's four steps"


def test_names_that_come_and_go_are_forgotten_and_the_heap_stays_small() -> None:
    waiting = WaitingQueue()
    keys = iter(range(1 << 30))

    def come(tenant: str) -> Request:
        request = Request("r", [1], tenant=tenant)
        request.key, request.status = (0, next(keys)), Status.WAITING
        waiting.enter(request)
        waiting.add(request)
        return request

    stays = come("stays")
    waiting.tenants["stays"].service = 5
    for i in range(20 * _MIN_KEPT):
        request = come(f"t{i}")
        assert waiting.first() is stays, "both have 5, and the first has waited longer"
        waiting.remove(request)
        waiting.leave(request)
        again = come("restless")
        waiting.tenants["restless"].service += 3
        waiting.remove(again)
        waiting.leave(again)
    assert len(waiting.tenants) <= _MIN_KEPT + 2 and len(waiting._heap) <= 3 * _MIN_KEPT + 10
    waiting.remove(stays)
    waiting.leave(stays)
    assert not waiting.tenants and not len(waiting) and waiting.first() is None


def test_nothing_is_owed_after_an_idle_moment() -> None:
    rig = Rig(max_num_seqs=1)
    add(rig, "a", 20, "a", max_tokens=9)
    rig.drain()
    scheduler: Scheduler = rig.scheduler
    assert not scheduler.waiting.tenants
    add(rig, "x", 4, "a", max_tokens=2)
    add(rig, "y", 4, "b", max_tokens=2)
    assert rig.drain() == ["x", "y"]


def test_prompts_that_are_admitted_late_leave_the_tokens_of_those_that_decode() -> None:
    """The prompts of one request arrived before a request of another tenant, and get their rows after it: by key they
    stand before it, and each of them needs many steps."""
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=8, num_pages=128, prefix_caching=False)
    for i in range(12):
        add(rig, f"a{i:02}", 40, "many", max_tokens=2)
    rig.step()
    stream = add(rig, "stream", 4, "few", max_tokens=30)
    gaps, last = [], None
    for step in range(400):
        before = len(stream.tokens)
        rig.step()
        if len(stream.tokens) > before:
            gaps.append(step - last if last is not None else 0)
            last = step
        if stream.status is Status.FINISHED:
            break
    assert len(gaps) == 30 and max(gaps) <= 2, gaps
    rig.drain()


def test_a_step_admits_few_requests_with_long_cached_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of the host for cached tokens delays the requests that run, so a step admits a limited number of
    them, and at least one request."""
    monkeypatch.setattr(scheduler, "MAX_ADMITTED_TOKENS", 30)
    rig = Rig(max_num_seqs=8)
    prompt = list(range(20))
    rig.add("first", [*prompt, 50])
    rig.drain()
    for i in range(5):
        rig.add(f"a{i}", [*prompt, 60 + i], max_tokens=8)
    admitted = []
    for _ in range(3):
        rig.step()
        admitted.append(len(rig.plans[-1].inits))
    assert admitted == [2, 2, 1], "21 tokens each: the second one exceeds the limit"
    rig.drain()
    rig.add("long", 40)
    rig.add("short", 4)
    rig.step()
    assert rig.running() == ["long"]
