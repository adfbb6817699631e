"""Scheduling scenarios, one a test, on the fake device: every token is checked and every step audited by the rig."""

from __future__ import annotations

import pytest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler_config import SchedulerConfig

from tests.runtime.rig import Rig
from tests.runtime.step_reply import reply


def test_the_budget_is_filled_running_first() -> None:
    rig = Rig(max_num_batched_tokens=10)
    rig.add("a", 4)
    rig.step()
    rig.add("b", 20)
    rig.add("c", 3)
    rig.step()
    assert rig.counts() == {"a": 1, "b": 9}, "a decode, then as much of the next prompt as fits"
    rig.step()
    assert rig.counts() == {"a": 1, "b": 9} and rig.waiting() == ["c"]
    assert rig.step().keys() == {"a", "b", "c"}
    assert [work.num_tokens for work in rig.plans[-1].work] == [1, 2, 3]


def test_partial_and_concurrent_prefills() -> None:
    rig = Rig(max_num_batched_tokens=16, long_prefill_threshold=6)
    rig.add("a", 20)
    rig.add("b", 20)
    rig.add("c", 20)
    assert not rig.step()
    assert rig.counts() == {"a": 6, "b": 6, "c": 4}
    assert not rig.step()
    assert rig.counts() == {"a": 6, "b": 6, "c": 4}
    rig.drain()


def test_chunks_do_not_change_the_answer() -> None:
    answers = []
    for budget in (1, 3, 7, 32):
        rig = Rig(max_num_batched_tokens=budget)
        request = rig.add("a", 30, max_tokens=8)
        rig.drain()
        answers.append(request.output_token_ids)
    assert all(answer == answers[0] for answer in answers)


def test_rows_limit_the_running_and_are_reused() -> None:
    rig = Rig(max_num_seqs=2)
    for name in "abc":
        rig.add(name, 3)
    rig.step()
    assert rig.running() == ["a", "b"] and rig.waiting() == ["c"]
    rows = {request.id: request.row for request in rig.scheduler.running}
    assert rig.drain() == ["a", "b", "c"]
    (init,) = rig.plans[4].inits
    assert init.row in rows.values()


def test_the_host_sends_diffs_only() -> None:
    rig = Rig(page_size=4)
    rig.add("a", 3, max_tokens=7)
    rig.drain()
    sent = [(len(plan.inits), [(g.start, len(g.pages)) for g in plan.pages]) for plan in rig.plans]
    assert sent == [(1, []), (0, []), (0, [(1, 1)]), (0, []), (0, []), (0, []), (0, [(2, 1)])]


def test_preemption_takes_the_latest_and_it_resumes() -> None:
    rig = Rig(num_pages=6, prefix_caching=False)
    rig.add("a", 8, max_tokens=9)
    late = rig.add("b", 8, max_tokens=9)
    rig.step()
    assert rig.running() == ["a", "b"]
    while rig.scheduler.counters.num_preemptions == 0:
        rig.step()
    assert rig.running() == ["a"] and rig.waiting() == ["b"] and late.status is Status.PREEMPTED
    tokens = list(late.tokens)
    while late.status is not Status.RUNNING:
        rig.step()
    (init,) = rig.plans[-1].inits
    assert init.tokens == tokens and init.computed == 0 and init.num_prompt == 8
    assert rig.drain() == ["b"] and len(late.output_token_ids) == 9


def test_a_preempted_request_goes_before_those_that_never_ran() -> None:
    rig = Rig(num_pages=6, max_num_seqs=3, prefix_caching=False)
    rig.add("a", 8, max_tokens=9)
    rig.add("b", 8, max_tokens=9)
    rig.step()
    rig.add("c", 20)
    while rig.scheduler.counters.num_preemptions == 0:
        rig.step()
    assert rig.waiting() == ["b", "c"]
    assert rig.drain() == ["a", "b", "c"]


def test_a_resumed_request_finds_its_own_pages() -> None:
    rig = Rig(num_pages=7)
    rig.add("a", 8, max_tokens=10)
    late = rig.add("b", 8, max_tokens=10)
    while late.status is not Status.PREEMPTED:
        rig.step()
    while late.status is not Status.RUNNING:
        rig.step()
    (init,) = rig.plans[-1].inits
    assert init.computed >= 4, "only what others overwrote is computed again"
    rig.drain()
    assert late.num_cached == 0, "cached prompt tokens are those of the first admission"


def test_priority_decides_admission_and_preemption_ties_by_arrival() -> None:
    rig = Rig(policy="priority", max_num_seqs=2, num_pages=6, prefix_caching=False)
    for name, priority in (("low", 5), ("first", 1), ("second", 1), ("top", 0)):
        rig.add(name, 4, priority, max_tokens=12)
    assert rig.waiting() == ["top", "first", "second", "low"]
    rig.step()
    assert rig.running() == ["top", "first"]
    while rig.scheduler.counters.num_preemptions == 0:
        rig.step()
    assert rig.running() == ["top"] and rig.waiting() == ["first", "second", "low"]
    assert rig.drain() == ["top", "first", "second", "low"]


def test_a_late_important_request_outlives_an_early_one() -> None:
    rig = Rig(policy="priority", num_pages=6, prefix_caching=False)
    rig.add("early", 8, 3, max_tokens=10)
    rig.step()
    rig.add("late", 8, 1, max_tokens=10)
    while rig.scheduler.counters.num_preemptions == 0:
        rig.step()
    assert rig.running() == ["late"] and rig.waiting() == ["early"]
    assert rig.drain() == ["late", "early"]


def test_fcfs_ignores_priority() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("a", 3, 9)
    rig.add("b", 3, 0)
    assert rig.drain() == ["a", "b"]


def test_the_head_of_the_line_is_not_overtaken() -> None:
    rig = Rig(num_pages=8)
    rig.add("a", 20)
    rig.step()
    rig.add("big", 24)
    rig.add("small", 2)
    rig.step()
    assert rig.running() == ["a"] and rig.waiting() == ["big", "small"]
    assert rig.drain() == ["a", "big", "small"]


def test_the_watermark_holds_for_admission_only() -> None:
    rig = Rig(num_pages=10, watermark=0.3)
    rig.add("a", 16, max_tokens=20)
    rig.step()
    rig.add("b", 16)
    rig.step()
    assert rig.waiting() == ["b"], "4 of 6 free pages would leave 2, the watermark is 3"
    while len(rig.scheduler.running[0].pages) < 8:
        rig.step()
    assert rig.scheduler.pool.num_free == 2, "the running request grows below the watermark"
    rig.drain()
    rig.add("c", 39, max_tokens=1)
    rig.step()
    assert rig.plans[-1].inits, "alone in the pool a request may have all of it"


def test_prefix_hit_on_admission() -> None:
    rig = Rig()
    prompt = list(range(18))
    rig.add("a", prompt)
    rig.drain()
    rig.add("b", [*prompt, 99])
    delta = rig.step()["b"]
    assert rig.plans[-1].inits[0].computed == 16 and rig.plans[-1].num_tokens == 3 and delta.num_cached == 16
    counters = rig.engine.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (18 + 19, 16)
    assert (counters.prompt_tokens, counters.prompt_tokens_cached) == (37, 16)


def test_a_prompt_of_whole_pages_computes_its_last_page_again() -> None:
    rig = Rig()
    for name in "ab":
        rig.add(name, list(range(16)))
        rig.drain()
    assert rig.plans[-4].inits[0].computed == 12


def test_output_is_a_prefix_too() -> None:
    rig = Rig()
    first = rig.add("a", 5, max_tokens=8)
    rig.drain()
    rig.add("b", [*first.tokens, 1, 2])
    rig.step()
    assert rig.plans[-1].inits[0].computed == 12, "13 tokens, of which the last was never computed"


def test_running_requests_share_pages_once_computed() -> None:
    rig = Rig(max_num_batched_tokens=8)
    prompt = list(range(15))
    one = rig.add("a", prompt)
    rig.step()
    two = rig.add("b", prompt)
    rig.step()
    assert rig.counts() == {"a": 7, "b": 1} and two.pages[:2] == one.pages[:2] and two.pages[2] != one.pages[2]
    rig.drain()


def test_a_salt_separates() -> None:
    rig = Rig()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        rig.add(name, list(range(10)), salt=salt)
        rig.drain()
    assert [plan.inits[0].computed for plan in rig.plans if plan.inits] == [0, 0, 8]


def test_reset_of_the_cache_waits_for_idle() -> None:
    rig = Rig()
    rig.add("a", list(range(10)))
    rig.step()
    assert not rig.scheduler.reset_prefix_cache()
    rig.drain()
    assert rig.scheduler.reset_prefix_cache()
    rig.add("b", list(range(10)))
    rig.step()
    assert rig.plans[-1].inits[0].computed == 0


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_abort_while_waiting_in_prefill_and_in_decode(steps: int) -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("a", 20)
    rig.add("b", 4)
    for _ in range(steps):
        rig.step()
    rig.abort("a")
    assert rig.drain() == ["b"]
    assert not rig.engine.abort("a") and not rig.engine.abort("never")
    assert rig.engine.counters.request_success == {"stop": 0, "length": 1, "abort": 1, "error": 0}


def test_abort_while_preempted() -> None:
    rig = Rig(num_pages=6, prefix_caching=False)
    rig.add("a", 8, max_tokens=9)
    rig.add("b", 8, max_tokens=9)
    while not rig.waiting():
        rig.step()
    while rig.waiting() != ["b"]:
        rig.step()
    rig.abort("b")
    assert rig.drain() == ["a"]


def test_late_output_of_an_aborted_request_is_dropped() -> None:
    rig = Rig()
    rig.add("a", 4)
    rig.add("b", 4)
    rig.step()
    plan = rig.scheduler.next()
    output = rig.device.run(plan)
    rig.abort("a")
    assert [delta.id for delta in rig.scheduler.commit(output)] == ["b"]
    rig.expected["b"].next()
    assert rig.drain() == ["b"]


def test_stop_tokens_and_lengths() -> None:
    def first(count: int, **params: object) -> list[int]:
        rig = Rig(eos_token_ids=params.pop("eos", ()))
        request = rig.add("a", 6, **params)
        rig.drain()
        assert len(request.output_token_ids) == count, request.output_token_ids
        return request.output_token_ids

    free = first(8, max_tokens=8)
    assert first(3, max_tokens=8, stop_token_ids=[free[2]]) == free[:3]
    assert first(3, max_tokens=8, eos=(free[2],)) == free[:3]
    assert first(8, max_tokens=8, eos=(free[2],), ignore_eos=True) == free
    assert free[2] not in first(8, max_tokens=8, eos=(free[2],), min_tokens=8)[:8]
    assert first(122, max_tokens=None)[:8] == free, "to the end of the context"


def test_stop_reasons() -> None:
    prompt = [1, 2, 3]
    rig = Rig()
    free = rig.add("a", prompt)
    rig.drain()
    token = free.output_token_ids[0]
    rig.add("b", prompt, stop_token_ids=[token])
    delta = rig.step()["b"]
    assert (delta.finish_reason, delta.stop_reason, delta.new_token_ids) == ("stop", token, [token])
    rig = Rig(eos_token_ids=(token,))
    rig.add("c", prompt, stop_token_ids=[token])
    delta = rig.step()["c"]
    assert (delta.finish_reason, delta.stop_reason) == ("stop", None), "an end-of-sequence token has no stop reason"


def test_the_pool_ends_a_request_without_max_tokens() -> None:
    rig = Rig(num_pages=3)
    request = rig.add("a", 5, max_tokens=None)
    rig.drain()
    assert len(request.tokens) == 13, "12 tokens of KV, and the last token needs none"


def test_logprobs_are_cut_to_the_requested_number() -> None:
    rig = Rig()
    rig.add("a", 3, logprobs=2)
    rig.add("b", 3, logprobs=0)
    rig.add("c", 3)
    deltas = rig.step()
    (found,) = deltas["a"].logprobs or []
    assert found.rank == 1 and len(found.top_ids) == len(found.top_logprobs) == 2
    assert deltas["b"].logprobs is not None and deltas["b"].logprobs[0].top_ids == ()
    assert deltas["c"].logprobs is None


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    rig = Rig()
    assert rig.add("a", 3).row_params.seed == 7
    assert rig.add("b", 3, seed=-5).row_params.seed == 2**64 - 5


def test_a_step_must_be_committed_or_rolled_back() -> None:
    rig = Rig()
    rig.add("a", 3)
    rig.scheduler.next()
    with pytest.raises(RuntimeError, match="neither committed nor rolled back"):
        rig.scheduler.next()
    rig.scheduler.rollback()
    assert rig.waiting() == ["a"]
    with pytest.raises(RuntimeError, match="no step was planned"):
        rig.scheduler.commit(reply([1]))
    assert rig.drain() == ["a"]


def refusal(rig: Rig, request: Request) -> LlmcError:
    before = (len(rig.scheduler.requests), rig.scheduler.pool.num_free)
    with pytest.raises(LlmcError) as caught:
        rig.engine.add(request)
    assert (len(rig.scheduler.requests), rig.scheduler.pool.num_free) == before and request.status is Status.NEW
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "params", "code", "words"),
    [
        ([], {}, "E605", "no tokens"),
        ([1, 1000], {}, "E606", "token id 1000; valid ids are 0 to 999"),
        ([1, -3], {}, "E606", "token id -3"),
        ([1, 2.0], {}, "E601", "prompt_token_ids"),
        ("text", {}, "E601", "prompt_token_ids"),
        ([1] * 128, {}, "E602", "the prompt is 128 tokens, the model was compiled for 128"),
        ([1] * 100, {"max_tokens": 40}, "E603", "100 tokens) and max_tokens (40) make 140"),
        ([1] * 80, {"max_tokens": None}, "E604", "needs 20 KV pages (80 tokens), the pool has 10 (40 tokens)"),
        ([1] * 20, {"max_tokens": 30}, "E604", "needs 13 KV pages (49 tokens), the pool has 10 (40 tokens)"),
        ([1], {"stop_token_ids": [1000]}, "E601", "stop_token_ids"),
        ([1], {"stop_token_ids": list(range(32)), "min_tokens": 1}, "E601", "stop_token_ids"),
    ],
)
def test_requests_that_can_never_run_are_refused(
    prompt: list[int], params: dict[str, object], code: str, words: str
) -> None:
    rig = Rig(num_pages=10, eos_token_ids=(500,))
    error = refusal(rig, Request("a", prompt, SamplingParams(**params)))  # type: ignore[arg-type]
    assert error.code == code and words in error.cause and error.remedy and len(str(error)) < 400


def test_ids_are_unique_and_requests_used_once() -> None:
    rig = Rig()
    request = rig.add("a", 3)
    with pytest.raises(LlmcError, match="E607"):
        rig.add("a", 3)
    rig.drain()
    with pytest.raises(LlmcError, match="E607"):
        rig.engine.add(request)
    rig.add("a", 3)
    rig.drain()


def test_the_longest_request_that_fits_runs() -> None:
    rig = Rig(num_pages=10)
    rig.add("a", 40, max_tokens=1)
    rig.add("b", 21, max_tokens=20)
    assert rig.drain() == ["a", "b"]


@pytest.mark.parametrize(
    "sizes", [{"num_pages": 0}, {"max_num_seqs": 0}, {"policy": "lifo"}, {"watermark": 1.0}, {"page_size": 2.5}]
)
def test_sizes_that_make_no_sense(sizes: dict[str, object]) -> None:
    with pytest.raises(LlmcError, match="E201"):
        Rig(**sizes)
    assert SchedulerConfig(1, 1, 2, 1, 1, 1).pool_tokens == 1
