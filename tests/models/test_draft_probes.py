"""When a draft model or head tries drafts of a single row that do not pay, and which steps are plain meanwhile."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from draw import SEED
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.speculation import (
    HEAD_WAITS,
    MODEL_PROBE_PERIOD,
    MODEL_WAITS,
    WARM_UP_PLANS,
    Speculation,
)
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work

DRAFT, HEAD = SpeculationConfig(4, max_rows=4), SpeculationConfig(4, max_rows=4, head="eagle")
LOOKUP = SpeculationConfig(4, min_ngram=3, max_ngram=5)
SECONDS = (1.0, 1.35, 1.7, 2.1, 2.5)  # of a step by its drafts: the demonstration model and its head, relative


class Driver:
    """Plans and ends the steps of one request, of whose drafts `accepted` are."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.policy, self.behind, self.counters, self.last = Speculation(config), 0, Counters(), ""
        self.counters.drafted_at_most(4)
        for drafts, seconds in enumerate(SECONDS):
            for _ in range(5):
                self.policy.draft_count.costs.record(1, drafts, seconds)

    def step(self, request: Request, accepted: int) -> tuple[int, bool]:
        """Return how many tokens the step drafts, and whether it is plain."""
        policy = self.policy
        if request.id != self.last:
            policy.wake()
            self.last = request.id
        if not policy.begin_idle():
            policy.begin([request], 100)
        propose = policy.proposals(request) if policy.wants else 0
        work = Work(0, 1 + self.behind, True, drafts=self.behind, propose=propose)
        plain, more = policy.plain([work]), [(5, None)] * min(self.behind, accepted)
        output = StepOutput([5], [None], accepted={0: more} if self.behind else {})
        policy.learn([work], [request], output, SECONDS[self.behind], self.counters)
        self.behind = propose
        return propose, plain

    def steps(self, request: Request, plans: int, accepted: int) -> tuple[list[int], list[int]]:
        """Return the plans among the next ones that draft, and those whose steps are plain."""
        first = self.policy.plans + 1
        done = [self.step(request, accepted) for _ in range(plans)]
        numbered = list(enumerate(done, first))
        return [n for n, (propose, _) in numbered if propose], [n for n, (_, plain) in numbered if plain]


def test_a_single_row_is_tried_less_and_less() -> None:
    """The plans between two tries of a head double; it computes its entries before them."""
    driver, request = Driver(HEAD), Request("r", [1])
    request.draft_trials = (9.0, 0.0)
    drafting, plain = driver.steps(request, 31 * HEAD_WAITS[1] // 16, accepted=0)
    assert [b - a for a, b in pairwise([1, *drafting])] == [HEAD_WAITS[0] * 2**i for i in range(5)]
    verifying = {n + 1 for n in drafting}
    warm = {n - i for n in drafting for i in range(1, WARM_UP_PLANS + 1)}
    every = set(range(1, drafting[-1] + 1))
    assert every - set(plain) == (verifying | set(drafting) | warm) & every
    later, _ = driver.steps(request, 5 * HEAD_WAITS[1] // 2, accepted=0)
    assert later[1] - later[0] == HEAD_WAITS[1]
    drafting, plain = driver.steps(request, 3 * HEAD_WAITS[1], accepted=4)
    assert len(drafting) > HEAD_WAITS[1] // 2 and not set(plain) & set(drafting), "text that has become predictable"
    drafting, _ = driver.steps(Request("s", [1]), 16, accepted=4)
    assert len(drafting) > 12, "the next request is expected to be like the one before"


def test_a_draft_model_is_tried_seldom() -> None:
    """It first has to compute the KV that it lacks, which costs as much as many steps; all other steps are plain."""
    driver, request = Driver(DRAFT), Request("r", [1])
    request.draft_trials = (9.0, 0.0)
    drafting, plain = driver.steps(request, 4 * MODEL_PROBE_PERIOD, accepted=0)
    apart = [b - a for a, b in pairwise(drafting)]
    assert apart == [min(MODEL_PROBE_PERIOD, 2 * MODEL_WAITS[0] << i) for i in range(len(apart))] and len(apart) > 5
    assert len(plain) == 4 * MODEL_PROBE_PERIOD - 2 * len(drafting)


@pytest.mark.parametrize("config", [HEAD, DRAFT])
@pytest.mark.parametrize("length", [24, 300])
def test_the_cost_of_trials_is_limited(config: SpeculationConfig, length: int) -> None:
    """However short the requests are: at most 1 % of the time, and what the first trials may cost once."""
    driver, seconds, tokens = Driver(config), 0.0, 0
    for number in range(12_000 // length):
        request = Request(f"r{number}", [1], SamplingParams(temperature=0.7))
        for _ in range(length):
            seconds, tokens = seconds + SECONDS[driver.behind], tokens + 1
            driver.step(request, accepted=0)
        driver.behind = 0
    print(f"{tokens} tokens, {seconds - tokens:.1f} steps lost")
    assert 1.0 < seconds - tokens < 0.01 * tokens + 12


@pytest.mark.parametrize("lures", [0, 2, 5])
def test_the_cost_of_prompt_lookup_is_limited(lures: int) -> None:
    """Drafts are found for every step and rejected, but for `lures` accepted ones in a row from time to time."""
    draw, counters = random.Random(SEED + lures), Counters()
    policy, seconds, tokens = Speculation(LOOKUP), 0.0, 0
    counters.drafted_at_most(4)
    for number in range(60):
        request, made = Request(f"r{number}", [1], SamplingParams(temperature=1.0, max_tokens=256)), 0
        request.limit, lured = 257, 0
        while made < 255:
            if not policy.begin_idle():
                policy.begin([request], 100)
            drafts = policy.drafts(request, 4) if request.num_drafts and policy.wants else 0
            lured = lures if not lured and draw.random() < 0.02 else lured
            accepted, lured = (drafts, lured - bool(drafts)) if lured else (0, 0)
            work = Work(0, 1 + drafts, True, drafts=drafts)
            output = StepOutput([5], [None], accepted={0: [(5, None)] * accepted} if drafts else {}, proposed=[4])
            policy.learn([work], [request], output, SECONDS[drafts], counters)
            seconds, made = seconds + SECONDS[drafts], made + 1 + accepted
        tokens += made
    drafts = counters.spec_decode_num_draft_tokens
    print(f"{SEED = } {tokens} tokens, {seconds - tokens:.1f} steps lost, {drafts} drafts")
    assert drafts > 50
    assert seconds - tokens < 0.02 * tokens + 18  # 12 of these are spent to measure what verification costs


def test_prompt_lookup_without_drafts_is_idle() -> None:
    """A plan for which nothing was found is a plain one, and the next one with drafts is not."""
    policy, request = Speculation(LOOKUP), Request("r", [1], SamplingParams())
    for proposed, idle in ((0, True), (0, True), (3, False), (0, True), (1, False)):
        policy.learn([request.decode], [request], StepOutput([5], [None], proposed=[proposed]), 1.0, Counters())
        assert policy.begin_idle() is idle and request.num_drafts == proposed
        if not idle:
            policy.begin([request], 100)
        assert not (idle and policy.wants)


def test_kinds_of_requests_have_separate_estimates() -> None:
    """What greedy requests have taught is not applied to sampled ones, and is still known after them."""
    driver = Driver(HEAD)
    for number in range(4):
        greedy = Request(f"g{number}", [1], SamplingParams(temperature=0.0))
        drafting, _ = driver.steps(greedy, 40, accepted=4)
        assert len(drafting) > (30 if number else 20)
        sampled = Request(f"s{number}", [1], SamplingParams(temperature=1.0))
        drafting, _ = driver.steps(sampled, 300, accepted=0)
        assert len(drafting) < (10 if number else 30), f"request {number}"


@pytest.mark.parametrize("config", [HEAD, DRAFT])
def test_drafts_follow_a_text_that_changes(config: SpeculationConfig) -> None:
    """Faster than plain where easy and hard stretches take turns; hardly slower where drafts are never accepted."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for easy, least in ((0.95, 1.03 if config.head else 0.98), (0.0, 0.98)):
        driver, seconds, tokens, stretch, rate = Driver(config), 0.0, 0, 0, easy
        request = Request("r", [1])
        for _ in range(20_000):
            if stretch <= 0:
                stretch, rate = rng.randrange(100, 300), easy - rate
            accepted = next((i for i in range(4) if rng.random() >= rate), 4)
            seconds, got = seconds + SECONDS[driver.behind], 1 + min(driver.behind, accepted)
            tokens, stretch = tokens + got, stretch - got
            driver.step(request, accepted)
        print(f"share of accepted drafts {easy}: {tokens / seconds:.3f}")
        assert tokens / seconds >= least


def test_steps_are_plain_if_no_row_drafts() -> None:
    """Also of several rows, which are tried seldom, and of methods without a draft model; prompts are not plain."""
    policy, rows = Speculation(HEAD), [Request("r", [1]), Request("s", [1])]
    for request in rows:
        request.draft_trials = (900.0, 0.0)
    for drafts, seconds in enumerate(SECONDS):
        for _ in range(5):
            policy.draft_count.costs.record(2, drafts, 9 * seconds)
    tries: list[Any] = []
    for _ in range(3 * MODEL_PROBE_PERIOD):
        policy.begin(rows, 100)
        tries.append(policy.wants)
    assert sum(tries[MODEL_PROBE_PERIOD:]) == 2
    while policy.wants or policy._probe_plan - policy.plans <= WARM_UP_PLANS:
        policy.begin(rows, 100)
    assert policy.plain([Work(0, 1, True), Work(1, 1, True)])
    assert not policy.plain([Work(0, 7, True), Work(1, 1, True)])
    assert not policy.plain([Work(0, 1, True), Work(1, 1, True, propose=1)])
    assert Speculation(SpeculationConfig(4, 3, 5)).plain([Work(0, 1, True)])


def test_a_row_that_waits_is_idle_until_its_next_trial() -> None:
    """Nothing is decided between trials of a single row; another request ends that."""
    driver, request = Driver(DRAFT), Request("r", [1])
    request.draft_trials = (9.0, 0.0)
    driver.steps(request, 3 * MODEL_WAITS[0], accepted=0)
    policy = driver.policy
    idle = [policy.begin_idle() or bool(policy.begin([request], 100)) for _ in range(4 * MODEL_WAITS[0])]
    assert idle.count(False) in (1, 2), "a trial, and the plan after it"
    assert policy.begin_idle()
    policy.wake()
    assert not policy.begin_idle()
