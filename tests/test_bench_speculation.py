"""bench.speculation with costs of steps instead of time: the same figures again, which follow from the costs."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from llmc_runtime import LLM, SamplingParams
from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work

from bench import speculation
from bench.step_clock import LEAST, MOST, STEP, StepClock, StepCosts, clocked, passes_of
from tests.runtime.simulator import make_device

MEASURED = (1.0, 1.2, 1.25, 1.4, 1.6)
HEAD = SpeculationConfig(4, max_rows=4, head="eagle", stops=True)


def run(costs: StepCosts, seed: str = "0", drafting: SpeculationConfig | None = HEAD) -> tuple[float, dict[str, Any]]:
    """Return the seconds of some requests on the simulated device by the clock, and the engine's counters."""
    config = SchedulerConfig(
        num_pages=256, page_size=4, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=32, vocab_size=40,
        speculation=drafting, max_num_logits=20,
    )  # fmt: skip
    opened = LLM.over(Engine(Scheduler(config, lambda: 7), make_device(config, rng=random.Random(1))))
    clock = StepClock(costs, seed)
    llm = clocked(opened, clock)
    for number in range(4):
        llm.generate([[1 + number, 2, 3]], SamplingParams(max_tokens=300, temperature=0.0), use_tqdm=False)
    return clock(), llm.stats()


def test_the_same_seed_gives_the_same_durations() -> None:
    """On a machine with any load: nothing depends on its own time."""
    costs = StepCosts(MEASURED, 0.18, 0.7)
    (seconds, stats), other = run(costs), run(costs, "1")[0]
    assert run(costs) == (seconds, stats)
    assert other != seconds and other == pytest.approx(seconds, rel=0.2)
    assert stats["spec_decode_num_draft_tokens"] > 0


def test_the_policy_goes_by_the_costs() -> None:
    """Where a pass of the head takes as long as a step, it makes fewer drafts."""
    drafts = [run(StepCosts(MEASURED, one_pass))[1]["spec_decode_num_draft_tokens"] for one_pass in (0.02, 1.0)]
    assert drafts[0] > 3 * drafts[1]
    seconds, stats = run(StepCosts(MEASURED, 0.18), drafting=None)
    assert LEAST * STEP * stats["num_steps"] < seconds < MOST * STEP * stats["num_steps"]


def test_times_of_steps() -> None:
    costs = StepCosts(MEASURED, 0.5, 0.7, 0.3)
    assert [costs.steps(1, k, 0) for k in (0, 1, 4)] == [1.0, 1.2, 1.6] and costs.steps(3, 1, 0) == 1.4
    assert costs.steps(1, 6, 0) == costs.steps(7, 0, 0) == pytest.approx(2.0), "the table is continued"
    assert costs.steps(1, 2, 3) == pytest.approx(2.75) and costs.steps(2, 0, 1) == pytest.approx(1.8)
    clock, times = StepClock(costs, "0"), [0.0]
    one, verifying = Work(0, 1, True), Work(0, 2, True, drafts=1)
    for work, plain in ((one, True), (verifying, False), (verifying, False), (one, False)):
        clock.ran([work], StepOutput([1], [None]), plain)
        times.append(clock())
    for took, steps in zip((b - a for a, b in pairwise(times)), (1.0, 1.9, 1.2, 1.3), strict=True):
        assert LEAST * steps <= took / STEP <= MOST * steps, "the first drafts after a step without are cold"
    with pytest.raises(SystemExit, match="the first is 1"):
        StepCosts((1.1, 1.2), 0.1)


def test_passes_that_follow_a_step() -> None:
    """A head that stops, one that does not since prompt lookup has found drafts, and KV that a draft model lacks."""
    head, looks = Work(0, 1, True, propose=4), Work(1, 1, True, propose=4, lookup=True)
    assert passes_of([head], StepOutput([1], [None])) == 4
    assert passes_of([head, looks], StepOutput([1, 1], [None] * 2, likely={0: [0.9, 0.2], 1: [0.1]})) == 2
    assert passes_of([looks], StepOutput([1], [None], proposed=[2])) == 0
    assert passes_of([looks], StepOutput([1], [None], proposed=[0])) == 4
    assert passes_of([Work(0, 1, True, fill=8)], StepOutput([1], [None])) == 1


@pytest.mark.slow(seconds=70)
def test_the_same_command_prints_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "TOKENS", 48)
    words = ["--loads", "chat, greedy", "--rounds", "1", "--step-costs", "1,1.2,1.25,1.4,1.6", "--artifacts"]
    args = speculation.arguments([*words, str(tmp_path)])
    first, second = (list(speculation.table(args, tmp_path)) for _ in range(2))
    assert first == second and len(first) == 3 and "| 1.00 |" in first[2]
