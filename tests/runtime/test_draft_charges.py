"""What steps are compared with, and what the entries of prompts are charged."""

from __future__ import annotations

import pytest
from llmc_runtime.sched.draft_trials import TRIAL_COST, Trials, TrialsByKind
from llmc_runtime.sched.prompt_entries import PromptEntries
from llmc_runtime.sched.recent_steps import RecentSteps
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.step import StepOutput, Work
from llmc_runtime.sched.step_drafts import StepDrafts


def test_steps_are_compared_with_those_before_them() -> None:
    """By the median of the last steps, as long as they are recent and of the same requests."""
    recent = RecentSteps()
    assert recent.factor(1, 2.0) == 1.0
    for plan, seconds in enumerate((9.0, *[1.0, 1.1, 0.9] * 3)):
        recent.add(plan, seconds)
    assert recent.factor(12, 2.0) == pytest.approx(2.0), "short sequences: a step at the mean takes twice as long"
    assert recent.factor(12, 0.8) == pytest.approx(0.8)
    assert recent.factor(12, 50.0) == 2.0 and recent.factor(12, 0.01) == 0.5, "limited"
    assert recent.factor(12, 0.0) == 1.0 and recent.factor(9 + 65, 2.0) == 1.0
    recent.clear()
    assert recent.factor(12, 2.0) == 1.0


def test_entries_of_prompts_are_paid_from_the_credit() -> None:
    """Of the request's kind if it runs alone; a prompt leaves no debt, and the next one is skipped."""
    trials = TrialsByKind(lambda: 8, Trials(512))
    prompts, request = PromptEntries(True, trials), Request("r", [1], SamplingParams(temperature=0.0))
    work = [Work(0, 200, True)]
    before = trials.of([request]).credit
    assert not prompts.skips(work, [request], False) and prompts.charged is work and prompts.tokens == 200
    prompts.charge(work, [request], 30.0, 1.0)
    paid = before - trials.of([request]).credit
    assert paid == pytest.approx(0.04 * 30.0) and not prompts.charged
    assert not prompts.skips(work, [request], False)
    trials.of([request]).credit = TRIAL_COST + paid - 0.01
    prompts.charged = ()
    assert prompts.skips(work, [request], False) and not prompts.charged
    assert not prompts.skips([Work(0, 100, True)], [request], False), "a shorter one costs less"
    assert not prompts.skips(work, [request], True), "rows that decode need entries"
    prompts.charge(work, [request], 3000.0, 1.0)
    assert trials.of([request]).credit == 0.0
    trials.batch.credit = 30.0
    two = [request, Request("s", [1])]
    assert not prompts.skips([*work, Work(1, 1, True)], two, False), "rows that run together have a credit of their own"
    assert prompts.tokens == 200 and trials.batch.credit == 30.0
    verifying = [Work(0, 4, True, drafts=3)]
    assert not prompts.skips(verifying, [request], True) and prompts.tokens == 0 and prompts.charged is not verifying


def test_an_artifact_that_cannot_skip_prompts_is_not_charged() -> None:
    trials = TrialsByKind(lambda: 8, Trials(512))
    prompts, request = PromptEntries(False, trials), Request("r", [1])
    trials.of([request]).credit = -9.0
    assert not prompts.skips([Work(0, 200, True)], [request], False) and not prompts.charged


def test_sums_of_a_step() -> None:
    work = [Work(0, 4, True, drafts=3, propose=4), Work(1, 1, True, propose=4, fill=7), Work(2, 50, True)]
    output = StepOutput([1, 1, 1], [None] * 3, likely={0: [0.9, 0.8], 1: [0.5]})
    assert StepDrafts.of(work, output, stops=False) == (3, 8, 7, 50)
    assert StepDrafts.of(work, output, stops=True) == (3, 3, 7, 50)
