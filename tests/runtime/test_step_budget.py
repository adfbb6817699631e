"""The step budget: steps with prompts next to decoding requests take the target time, and prompts always advance."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.step import Work
from llmc_runtime.sched.step_budget import (
    FIRST_TOKENS,
    LONGER_INTERVAL,
    MAX_BACKLOG,
    MAX_LONGER,
    MAX_SAVED,
    MAX_STRETCH,
    MIN_BACKLOG,
    MIN_TOKENS,
    PROBE_INTERVAL,
    StepBudget,
    StepTimer,
    step_seconds,
)

from tests.runtime.rig import Rig

LIMIT, TARGET = 8192, 0.02


@dataclass
class Machine:
    """A model of a machine: seconds of a step that decodes, further seconds of one with prompts, and of each token."""

    decode: float
    mixed: float
    token: float

    def seconds(self, prompt: int) -> float:
        """Draw the duration of a step."""
        mean = self.decode + (self.mixed + prompt * self.token if prompt else 0.0)
        return mean * random.uniform(0.97, 1.03)


def decoding(rows: int) -> list[Request]:
    """Requests that have one token each to compute."""
    requests = [Request(str(i), [1, 2]) for i in range(rows)]
    for request in requests:
        request.num_total, request.num_planned = 2, 1
    return requests


def step(budget: StepBudget, machine: Machine, rows: int, prompt: int, waiting: int | None = None) -> tuple[int, float]:
    """Run a step for `rows` decoding requests and a prompt with so many tokens left, of `waiting` tokens of prompts
    (None: few, so that no step may be longer). Returns its tokens of the prompt, and seconds.
    """
    tokens = min(prompt, budget.tokens(decoding(rows), (prompt > 0) if waiting is None else waiting) - rows)
    seconds = machine.seconds(tokens)
    work = [Work(i, 1, True) for i in range(rows)]
    budget.learn(work + [Work(rows, tokens, False)] * (tokens > 0), seconds)
    return tokens, seconds


@pytest.mark.parametrize("seed", range(20))
def test_steps_take_the_target_on_any_machine(seed: int) -> None:
    random.seed(seed)
    machine = Machine(random.uniform(1e-4, 8e-3), random.uniform(0, 1e-3), 10 ** random.uniform(-5.5, -3.5))
    rows, budget = random.randint(1, 64), StepBudget(TARGET, LIMIT)
    for _ in range(5):
        step(budget, machine, rows, 0)
    for i in range(200):  # prompts without end, and now and then a pause, or a stall of the whole machine
        _, seconds = step(budget, machine, rows, 0 if i % 20 == 0 else LIMIT)
        if i % 50 == 25:
            budget.learn([Work(0, 1, True), Work(1, LIMIT, False)], 30 * TARGET)
    limit = step_seconds(TARGET, machine.decode)
    for _ in range(20):
        tokens, seconds = step(budget, machine, rows, LIMIT)
        assert tokens == LIMIT - rows or 0.75 * limit < seconds < 1.15 * limit, (tokens, machine)
        assert tokens < 64 or tokens == LIMIT - rows or (rows + tokens) % 16 == 0


def test_a_step_is_shorter_than_the_target_if_decoding_is_fast() -> None:
    milliseconds = {
        decode: round(1e3 * step_seconds(TARGET, decode / 1e3), 6) for decode in (0, 0.1, 2, 3, 5, 8, 10, 15)
    }
    assert milliseconds == {0: 8, 0.1: 8, 2: 8, 3: 12, 5: 20, 8: 20, 10: 20, 15: 30}


def test_prompts_advance_where_decoding_takes_longer_than_the_target() -> None:
    budget, machine = StepBudget(TARGET, LIMIT), Machine(0.2, 0.01, 2e-3)
    for i in range(100):
        tokens, seconds = step(budget, machine, 4, 0 if i < 5 else LIMIT)
    assert tokens > 60 and seconds == pytest.approx(MAX_STRETCH * machine.decode, rel=0.15)


def test_a_slow_machine_gives_every_step_a_few_tokens() -> None:
    budget, machine = StepBudget(TARGET, LIMIT), Machine(1e-3, 0.0, 0.01)
    for _ in range(100):
        tokens, _ = step(budget, machine, 4, LIMIT)
    assert tokens == MIN_TOKENS


def test_steps_of_one_kind_have_no_budget() -> None:
    budget, machine = StepBudget(TARGET, LIMIT), Machine(1e-3, 0.0, 1e-4)
    assert budget.tokens([], 1) == LIMIT
    running = decoding(4)
    assert budget.tokens(running, 0) == LIMIT, "nothing but decoding, perhaps with drafts"
    assert budget.tokens(running, 1) == 4 + 1, "decoding was never measured"
    assert budget.tokens(running, 1) == (4 + FIRST_TOKENS) // 64 * 64
    running[0].num_total = 500
    assert budget.tokens(running, 0) == (3 + FIRST_TOKENS) // 64 * 64
    for request in running:
        request.num_total = 500
    assert budget.tokens(running, 1) == LIMIT, "nothing waits for the next token"
    for _ in range(10):
        budget.learn([Work(0, 1, True)], machine.seconds(0))
        budget.learn([Work(0, 400, True)], 5.0)  # nobody decoded next to it
        budget.learn([Work(0, 1, True), Work(1, 5, True)], 0.5)  # too few tokens to say what one takes
    assert budget.tokens(decoding(1), 1) == (1 + FIRST_TOKENS) // 64 * 64


def test_decoding_is_measured_while_prompts_follow_each_other() -> None:
    """The time of decoding would count as that of the prompts' tokens: 60 of them would take all of the target."""
    random.seed(1)
    budget, machine = StepBudget(TARGET, LIMIT), Machine(6e-3, 1e-3, 2e-5)
    steps = [step(budget, machine, 64, LIMIT) for _ in range(3 * PROBE_INTERVAL)]
    assert [i for i, (tokens, _) in enumerate(steps) if tokens == 1] == [0, PROBE_INTERVAL + 1, 2 * PROBE_INTERVAL + 2]
    assert sum(tokens for tokens, _ in steps[PROBE_INTERVAL:]) / (2 * PROBE_INTERVAL) > 500
    machine.decode = 9e-3  # the contexts have grown
    for _ in range(4 * PROBE_INTERVAL):
        step(budget, machine, 64, LIMIT)
    assert budget.expected([Work(0, 1, True)]) == pytest.approx(machine.decode, rel=0.15)


def test_large_steps_fill_tiles_of_128_tokens() -> None:
    budget, machine = StepBudget(TARGET, LIMIT), Machine(5e-3, 0.0, 2e-5)
    random.seed(1)
    sizes = [3 + step(budget, machine, 3, 0 if i < 5 else LIMIT)[0] for i in range(100)]
    assert set(sizes[50:]) <= {640, 768, 4}, "750 tokens of prompts fit the target, and a step measures decoding"


@dataclass
class Stairs(Machine):
    """A machine on which steps of more than `small` tokens run slower kernels, by a fifth."""

    small: int = 640

    def seconds(self, prompt: int) -> float:
        """Draw the duration of a step of three decoding requests."""
        return super().seconds(prompt) * (1.2 if prompt + 3 > self.small else 1.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_size_that_misses_the_target_is_seldom_tried(seed: int) -> None:
    random.seed(seed)
    budget, machine = StepBudget(TARGET, LIMIT), Stairs(5e-3, 0.0, 1.9e-5)
    steps = [step(budget, machine, 3, 0 if i < 5 else LIMIT) for i in range(600)][100:]
    slow = [seconds for _, seconds in steps if seconds > 1.1 * TARGET]
    assert len(slow) <= 0.02 * len(steps)
    assert sum(tokens + 3 == 640 for tokens, _ in steps) > 0.95 * len(steps)
    machine.small = LIMIT  # for example, another process has ended
    sizes = [3 + step(budget, machine, 3, LIMIT)[0] for _ in range(700)]
    assert sizes[600:].count(768) > 80, "it is tried again"


@pytest.mark.parametrize("seed", range(5))
def test_one_step_in_many_is_longer_while_a_burst_of_prompts_waits(seed: int) -> None:
    random.seed(seed)
    budget = StepBudget(TARGET, LIMIT)
    machine = Machine(random.uniform(5e-3, 8e-3), 0.0, 10 ** random.uniform(-5, -3.3))
    for _ in range(10 * LONGER_INTERVAL):
        step(budget, machine, 4, 0)
    fits = max([step(budget, machine, 4, LIMIT)[0] for _ in range(100)][50:])
    few = [step(budget, machine, 4, LIMIT, MIN_BACKLOG * fits // 2)[1] for _ in range(LONGER_INTERVAL)]
    assert max(few) < 1.3 * TARGET, "less than a burst waits"
    many = [step(budget, machine, 4, LIMIT, 100 * LIMIT)[1] for _ in range(20 * LONGER_INTERVAL)]
    long = [seconds for seconds in many if seconds > 1.5 * TARGET]
    assert MAX_SAVED // 2 < len(long) <= MAX_SAVED + len(many) / LONGER_INTERVAL
    assert max(long) < 1.1 * MAX_LONGER * TARGET


@pytest.mark.parametrize(("saved", "backlog"), [(1, MAX_BACKLOG), (MAX_SAVED, MIN_BACKLOG)])
def test_the_last_longer_steps_are_kept_for_large_bursts(saved: int, backlog: int) -> None:
    random.seed(saved)
    budget, machine = StepBudget(TARGET, LIMIT), Machine(5e-3, 0.0, 2e-5)
    for _ in range(20):
        step(budget, machine, 4, LIMIT)
    for _ in range(saved * LONGER_INTERVAL - 10):
        step(budget, machine, 4, 0)
    fits = budget.tokens(decoding(4), 1)
    assert budget.tokens(decoding(4), int(0.9 * backlog * fits)) == fits
    assert budget.tokens(decoding(4), int(1.2 * (backlog + 0.5) * fits)) > 3 * fits, (
        "750 tokens fit, 640 are whole tiles"
    )


def test_no_step_is_longer_where_decoding_takes_longer_than_the_target() -> None:
    budget, machine = StepBudget(TARGET, LIMIT), Machine(0.1, 0.0, 1e-3)
    for i in range(2 * LONGER_INTERVAL):
        step(budget, machine, 4, 200 * (i % 2))
    seconds = [step(budget, machine, 4, LIMIT, 100 * LIMIT)[1] for _ in range(LONGER_INTERVAL)]
    assert max(seconds) < 1.2 * MAX_STRETCH * machine.decode, "6 times the target are less than twice of decoding"


def test_a_longer_step_on_a_slow_machine_has_tokens() -> None:
    budget, machine = StepBudget(TARGET, LIMIT), Machine(1e-3, 0.0, 5e-4)
    assert all(step(budget, machine, 4, LIMIT, 100 * LIMIT)[0] > 0 for _ in range(5 * LONGER_INTERVAL))


def test_durations_of_steps_that_overlap() -> None:
    timer = StepTimer()
    timer.planned(1.0)
    timer.planned(1.5)
    assert timer.ended(2.0) == 1.0, "from its plan"
    timer.planned(2.25)
    assert timer.ended(4.0) == 2.0, "from the end of the step before"
    timer.forget()
    timer.planned(5.0)
    assert timer.ended(5.5) == 0.5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_leaves_decoding_requests_their_pace(depth: int) -> None:
    rig = Rig(depth, num_pages=400, max_model_len=1000, max_num_batched_tokens=900, target_itl=TARGET)
    now, plans, wait = 0.0, 0, rig.wait

    def timed(ticket: Any) -> Any:
        nonlocal now, plans
        now += 1e-3 + 1e-4 * sum(work.num_tokens for work in rig.plans[plans].work if work.num_tokens > 1)
        plans += 1
        return wait(ticket)

    rig.scheduler.clock, rig.wait = lambda: now, timed  # type: ignore[method-assign]
    rig.add("long", 800, max_tokens=2)
    rig.step()
    assert rig.plans[0].work[0].num_tokens == 800, "nothing decodes yet"
    rig.drain()
    rig.add("stream", 4, max_tokens=120)
    for _ in range(20):
        rig.step()
    before = len(rig.plans)
    rig.add("other", 950, max_tokens=2)
    rig.drain()
    chunks = [sum(work.num_tokens for work in plan.work) for plan in rig.plans[before:] if len(plan.work) > 1]
    assert max(chunks) <= FIRST_TOKENS and sum(chunks) >= 950
    assert 64 <= chunks[3] <= 80, "1 ms for decoding and 0.1 ms for each token of the prompt make 8 ms, 40 % of 20"


def test_a_step_is_planned_shortly_before_the_one_that_runs_ends() -> None:
    """At depth 2, requests that arrive while a step runs join the next one, unless one waits already."""
    rig = Rig(2, num_pages=400, max_model_len=1000, max_num_batched_tokens=900, target_itl=TARGET)
    now, wait = 0.0, rig.wait

    def timed(ticket: Any) -> Any:
        nonlocal now
        now += 0.012
        return wait(ticket)

    rig.scheduler.clock, rig.wait = lambda: now, timed  # type: ignore[method-assign]
    assert rig.engine.spare_seconds() == 0.0, "no step runs"
    rig.add("stream", 4, max_tokens=100)
    rig.step()
    assert rig.engine.spare_seconds() <= 0.0, "the duration of a step is not known"
    for _ in range(30):
        rig.step()
    assert rig.engine.spare_seconds() == pytest.approx(0.012 - 0.003, rel=0.1), "a quarter of a step before its end"
    now += 0.01
    assert rig.engine.spare_seconds() <= 0.0
    now -= 0.01
    rig.add("other", 4, max_tokens=2)
    assert rig.engine.spare_seconds() == 0.0, "a request waits"
    rig.drain()


def test_a_request_whose_last_token_is_in_flight_does_not_decode() -> None:
    budget, ending, prompt = StepBudget(TARGET, LIMIT), decoding(3), Request("prompt", list(range(100)))
    for request in ending:
        request.limit = request.num_total
    prompt.num_total = 100
    budget.tokens([*decoding(1), prompt], 0)  # measures decoding
    assert budget.tokens([*ending, prompt], 0) == LIMIT, "no request decodes next to the prompt"
    assert budget.tokens([*decoding(5), *ending], 0) == LIMIT, "no request computes a prompt"
    assert budget.tokens([*decoding(5), *ending, prompt], 0) == budget.tokens([*decoding(5), prompt], 0)


def test_the_expected_duration_of_a_step() -> None:
    budget = StepBudget(TARGET, LIMIT)
    rows = [Work(i, 1, True) for i in range(3)]
    prompt = Work(3, 200, False)
    assert budget.expected(rows) == 0.0
    for _ in range(10):
        budget.learn(rows, 0.004)
        budget.learn([*rows, prompt], 0.009)
    assert budget.expected(rows) == pytest.approx(0.004)
    assert budget.expected([*rows, prompt]) == pytest.approx(0.009, rel=0.05)
    assert budget.expected([prompt]) == pytest.approx(0.005, rel=0.1)
