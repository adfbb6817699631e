"""Bursts of prompts next to decoding requests: what longer steps gain and cost, on a model of a GPU.

The model has the step times of Llama-3.1-8B in bf16 on an H200, measured next to 64 decoding requests. It is run with
the scheduler's plans and no device, so that a result depends on the policy and on nothing else.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from llmc_runtime.sched import step_budget
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.step import StepOutput
from llmc_runtime.sched.step_budget import LONGER_INTERVAL, MAX_LONGER, MAX_SAVED

TARGET = 0.02
STREAMS, PROMPT, RATE, SECONDS = 64, 2000, 8.0, 30.0
SEEDS = (0, 1)  # more than one, so that a result is not that of one draw
DECODE_MS = 7.0  # a step without prompts
START = 1.1e-3 * DECODE_MS * MAX_SAVED * LONGER_INTERVAL  # seconds without prompts, which save up longer steps
# Milliseconds of a step by its tokens; linear in between, but for the jumps after 512, 640, 768 and 1,024 tokens.
STEP_MS = (
    (64, 7.0), (65, 11.0), (448, 14.5), (512, 15.5), (513, 18.5), (640, 18.8), (641, 22.0), (768, 21.8), (769, 25.5),
    (1024, 27.7), (1025, 34.5), (1536, 42.5), (2048, 53.5), (2560, 65.0), (4096, 98.0), (8192, 186.0),
)  # fmt: skip


def step_seconds(tokens: int) -> float:
    """Return the seconds of a step with so many tokens, some of which are of prompts."""
    index = bisect_left(STEP_MS, (tokens, 0.0))
    (low, fast), (high, slow) = STEP_MS[index - 1], STEP_MS[index]
    return (fast + (slow - fast) * (tokens - low) / (high - low)) / 1e3


@dataclass
class Run:
    """Seconds from a prompt's arrival to its first token, and the seconds of the steps after START."""

    ttft: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value that at least `percent` percent of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def poisson(seed: int, rate: float = RATE) -> Iterator[float]:
    """Yield arrival times of `rate` prompts per second."""
    now, rng = START, random.Random(seed)
    while (now := now + rng.expovariate(rate)) < START + SECONDS:
        yield now


def prompts_beside_streams(arrivals: Iterator[float]) -> Run:
    """Plan and commit steps, two in flight, until all prompts have their first token."""
    now, due = 0.0, list(arrivals)[::-1]
    config = SchedulerConfig(
        num_pages=200_000, page_size=16, max_model_len=50_000, max_num_seqs=128, max_num_batched_tokens=8192,
        vocab_size=100, target_itl=TARGET, prefix_caching=False,
    )  # fmt: skip
    scheduler, run, open_prompts = Scheduler(config, lambda: 7, lambda: now), Run(), {}
    scheduler.depth = 2

    def add(name: str, length: int, tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        scheduler.add(Request(name, [1] * length, params))

    for i in range(STREAMS):
        add(f"stream {i}", 2, 40_000)
    in_flight: deque[tuple[float, int]] = deque()  # the end of each step, and its rows
    while due or open_prompts:
        while due and due[-1] <= now:
            open_prompts[f"prompt {len(due)}"] = due[-1]
            add(f"prompt {len(due)}", PROMPT, 1)
            due.pop()
        while len(in_flight) < scheduler.depth:
            work = scheduler.next().work
            mixed = any(item.num_tokens > 1 for item in work)
            seconds = step_seconds(sum(item.num_tokens for item in work)) if mixed else DECODE_MS / 1e3
            in_flight.append(((in_flight[-1][0] if in_flight else now) + seconds, len(work)))
            if now > START:
                run.steps.append(seconds)
        now, rows = in_flight.popleft()
        for delta in scheduler.commit(StepOutput([5] * rows, [None] * rows)):
            if delta.id in open_prompts:
                run.ttft.append(now - open_prompts.pop(delta.id))
    return run


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """A run of each seed."""
    return [prompts_beside_streams(poisson(seed)) for seed in SEEDS]


def test_longer_steps_shorten_the_tail_of_bursts(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_budget, "LONGER_INTERVAL", 10**9)
    without = [prompts_beside_streams(poisson(seed)) for seed in SEEDS]
    assert all(max(run.steps) < 1.3 * TARGET for run in without), "no step is a longer one"
    before, now = (sum(percentile(run.ttft, 99) for run in some) for some in (without, runs))
    assert now < 0.85 * before, (now, before)


def test_longer_steps_leave_decoding_requests_their_pace(runs: list[Run]) -> None:
    crowded = prompts_beside_streams(poisson(0, 1.5 * RATE))  # a load that uses nearly all longer steps
    for run in (*runs, crowded):
        longer = [seconds for seconds in run.steps if seconds > 1.3 * TARGET]
        assert 5 <= len(longer) < 0.01 * len(run.steps), "those that were saved may be used in half a minute, too"
        assert max(longer) < 1.1 * MAX_LONGER * TARGET
        assert percentile(run.steps, 98) < 1.1 * TARGET
