"""What steps are compared with, and what the entries of prompts are charged."""

from __future__ import annotations

import pytest
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.draft_costs import DraftCount
from llmc_runtime.sched.draft_trials import TRIAL_COST, Credit, Trials, TrialsByKind
from llmc_runtime.sched.prompt_entries import PromptEntries
from llmc_runtime.sched.recent_steps import RecentSteps
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work


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


def paid_by(prompts: PromptEntries, request: Request, seconds: float, plan: int, tokens: int = 200) -> bool:
    """Run a prompt at this plan, whose step takes `seconds`; return whether it gets entries."""
    work = [Work(0, tokens, True)]
    skips = prompts.skips(work, [request], False, plan)
    assert prompts.in_flight[0].work is work and prompts.in_flight[0].tokens == tokens
    prompts.ended(work, [request], seconds, 1.0)
    assert not prompts.in_flight
    return not skips


def test_entries_of_prompts_are_paid_from_a_credit() -> None:
    """First from one of their own, which grows with the time, and then from that of trials of the request's kind."""
    trials = TrialsByKind(lambda: 8, Trials(512))
    prompts, request = PromptEntries(True, trials), Request("r", [1], SamplingParams(temperature=0.0))
    trials.of([request]).credit.balance = TRIAL_COST
    with_entries = [paid_by(prompts, request, 30.0, 1 + 10 * number) for number in range(100)]
    share = 0.04 * 30.0 * sum(with_entries) / (100 * 40)
    assert (
        with_entries[:2] == [True] * 2 and 0.0015 < share < 0.004 and trials.of([request]).credit.balance == TRIAL_COST
    )
    trials.of([request]).credit.balance = 20.0
    more = [paid_by(prompts, request, 30.0, 1001) for _ in range(30)]
    assert 17 <= sum(more) <= 19 and more[:14] == [True] * 14
    assert TRIAL_COST <= trials.of([request]).credit.balance < TRIAL_COST + 1.2
    assert paid_by(prompts, request, 1.5, 1001, 10), "a shorter one costs less"
    two, work = [request, Request("s", [1])], [Work(0, 200, True), Work(1, 1, True)]
    assert not prompts.skips(work, two, False, 1001), "rows that run together have a credit of their own"
    trials.batch.credit.balance = 0.0
    assert prompts.skips(work, two, False, 1001)
    assert not prompts.skips(work, two, True, 1001), "rows that decode need them"
    assert not prompts.skips([Work(0, 4, True, drafts=3)], [request], True, 1001)


def test_drafts_in_vain_are_tried_more_and_more_rarely() -> None:
    """What each plan adds is halved by a net loss of 32 steps, and the least is a quarter. Gains restore it."""
    credit = Credit(0.0)
    waits = [credit.wait_for(1.0)]
    for loss in (32.0, 64.0, 1000.0):
        credit.record(-loss)
        credit.balance = 0.0
        waits.append(credit.wait_for(1.0))
    assert waits == [500, 1000, 2000, 2000]
    credit.record(96.0)
    assert credit.balance == 32.0 and credit.wait_for(33.0) == 500
    credit.earn(250)
    assert credit.balance == 32.0, "the largest"


def test_all_steps_with_prompts_in_flight_are_charged() -> None:
    """A chunk that is planned before the one ahead of it has ended is not paid from the same credit."""
    prompts, request = PromptEntries(True, TrialsByKind(lambda: 8, Trials(512))), Request("r", [1])
    prompts._trials.of([request]).credit.balance = TRIAL_COST
    assert paid_by(prompts, request, 25.0, 0)
    before, works = prompts._credit, [[Work(0, 200, True)] for _ in range(4)]
    plain = [prompts.skips(work, [request], False, 0) for work in works]
    assert plain == [False, False, True, True] and 2 <= before < 3, "each takes 1 of the credit"
    prompts.ended([request.decode], [request], 1.0, 1.0)
    assert len(prompts.in_flight) == 4, "a step without prompts"
    for number, work in enumerate(works, 1):
        prompts.ended(work, [request], 25.0, 1.0)
        earned = number * 0.002 * 25.0
        assert prompts._credit == pytest.approx(before + earned - min(number, 2))
    prompts.skips(works[0], [request], False, 0)
    prompts.forget()
    assert not prompts.in_flight


def test_rows_that_decode_do_not_count() -> None:
    """A step with them takes longer, but not because of the prompt."""
    prompts, request = PromptEntries(True, TrialsByKind(lambda: 8, Trials(512))), Request("r", [1])
    for work, seconds in (([Work(0, 20, True)], 8.0), ([Work(0, 20, True), Work(1, 1, True)], 8.5)):
        before = prompts._credit
        assert not prompts.skips(work, [request] * len(work), False, 0)
        prompts.ended(work, [request] * len(work), seconds, 1.0)
        assert before - prompts._credit == pytest.approx((0.04 - 0.002) * 8.0)


def test_a_first_prompt_leaves_no_debt() -> None:
    """What it costs is not known before."""
    trials = TrialsByKind(lambda: 8, Trials(512))
    prompts, request = PromptEntries(True, trials), Request("r", [1])
    trials.of([request]).credit.balance = 2.0
    assert paid_by(prompts, request, 3000.0, 1) and not paid_by(prompts, request, 3000.0, 2)
    assert trials.of([request]).credit.balance == 0.0


def test_an_artifact_that_cannot_skip_prompts_is_not_charged() -> None:
    trials = TrialsByKind(lambda: 8, Trials(512))
    prompts, request = PromptEntries(False, trials), Request("r", [1])
    trials.of([request]).credit.balance = -9.0
    assert not prompts.skips([Work(0, 200, True)], [request], False, 1) and not prompts.in_flight


def test_a_slow_first_pass_does_not_make_verification_cheap() -> None:
    """The time of drafting is subtracted from that of a step. If too much was, the step does not count."""
    count = DraftCount(4, together=True)
    for _ in range(5):
        count.learn(1, 0, 0, 1.0, True)
    count.learn(1, 0, 1, 1.4, True)
    count.learn(1, 0, 4, 12.0, True)  # loads the head's weights
    count.learn(1, 1, 4, 2.9, True)
    assert not count.costs.is_measured(1, 1, 1)
    for _ in range(4):
        count.learn(1, 0, 4, 2.5, True)
    count.learn(1, 1, 4, 2.9, True)
    assert count.costs.seconds(1, 1) == pytest.approx(2.9 + 0.4 - 1.5)


@pytest.mark.parametrize(("stops", "proposed"), [(False, 8), (True, 3)])
def test_a_step_is_charged_for_the_drafts_that_it_made(
    stops: bool, proposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If drafting can stop early, these are fewer than planned. The duration of a step with a prompt does not count."""
    work = [Work(0, 4, True, drafts=3, propose=4), Work(1, 1, True, propose=4, fill=7), Work(2, 50, True)]
    output = StepOutput([1, 1, 1], [None] * 3, likely={0: [0.9, 0.8], 1: [0.5]})
    speculation, charged = Speculation(SpeculationConfig(4, max_rows=3, stops=stops)), list[tuple[object, ...]]()
    gross_duration = speculation.draft_count.gross_duration
    monkeypatch.setattr(
        speculation.draft_count, "gross_duration", lambda *step: charged.append(step) or gross_duration(*step)
    )
    speculation.learn(work, [Request(str(row), [1], SamplingParams()) for row in range(3)], output, 1.0, Counters())
    assert charged == [(3, 1.0, proposed / 3, None, True)]
