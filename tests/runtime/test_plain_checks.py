"""Drafts that seem to pay because a step without them was measured while the machine was busy."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from draw import SEED
from llmc_runtime.sched.draft_costs import StepCosts
from llmc_runtime.sched.plain_checks import CHECK_PLANS, PlainChecks

from tests.runtime.test_draft_overhead import HEAD, SIBLING, Device


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("method", ["head", "sibling"])
def test_a_wrong_duration_of_steps_without_drafts_is_corrected(method: str, rows: int) -> None:
    """Drafting would cost a third of the time or more; at the end it costs less than 3 %."""
    device = Device(HEAD if method == "head" else SIBLING, rows, 0.3, [])
    device.draw = random.Random(f"{SEED} {rows} {method}")
    device.generate("before", 400, 1.0)
    speculation = device.engine.scheduler.speculation
    assert speculation is not None
    speculation.draft_count.costs.correct_plain(rows, 5 * speculation.draft_count.costs.seconds(rows, 0))
    speculation.wake()
    lost = []
    for number in range(12):
        device.tokens = device.lost = 0.0
        device.generate(str(number), 250, 1.0)
        lost.append(device.lost / device.tokens)
    print(f"seed {SEED}: {[f'{share:.3f}' for share in lost]}")
    assert sum(lost[-4:]) / 4 < 0.03


def test_checks_become_rarer_while_drafts_pay() -> None:
    """Each draws a median of the steps without drafts; others do not count, and a long pause begins anew."""
    checks, costs, begun = PlainChecks(), StepCosts(), list[int]()
    costs.record(4, 0, 2.0)
    for plan in range(1, 2000):
        ended = checks.end(plan, costs)
        assert ended == (bool(begun) and plan == begun[-1] + CHECK_PLANS)
        was_active = checks.active
        checks.begin(plan, 4, drafts=not was_active)
        if checks.active:
            begun += [] if was_active else [plan]
            checks.add(9.0 if plan == begun[-1] else 1.0)
    gaps = [later - earlier for earlier, later in pairwise(begun)]
    assert [round(gap, -1) for gap in gaps] == [130, 260, 520, 520], gaps
    assert costs.seconds(4, 0) == pytest.approx(1.0, abs=0.04)
    checks.begin(2100, 4, drafts=True)
    begins = next(plan for plan in range(2101, 2300) if checks.begin(plan, 4, drafts=True) or checks.active)
    assert begins - 2100 == 64


def test_a_check_is_dropped_if_other_rows_run() -> None:
    checks, costs = PlainChecks(), StepCosts()
    for plan in range(1, 70):
        checks.begin(plan, 4, drafts=True)
    for seconds in (1.0, 1.0, 1.0):
        checks.add(seconds)
    checks.begin(70, 5, drafts=True)
    assert not checks.end(80, costs)
