"""Plans in which nothing is to be decided: they end when other requests run, and skip nothing that matters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from draw import SEED
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.step import Step

from runtime import test_draft_overhead
from runtime.test_draft_overhead import LOOKUP_AND_HEAD, METHODS, Device

STEPS = 1500  # of a run
Planned = tuple[Any, ...]  # what a step computes for its rows, and whether it is plain


def add(device: Device, name: str, draw: random.Random) -> None:
    """Add a request with a random length, prompt and temperature."""
    params = SamplingParams(temperature=draw.choice((0.0, 0.7, 1.0)), max_tokens=draw.randrange(1, 400))
    device.engine.add(Request(name, draw.choices(range(40), k=draw.randrange(1, 40)), params))


def steps(device: Device, draw: random.Random, *rates: float) -> Iterator[Step]:
    """Run requests that come and are aborted at random; yield the steps after they have ended.

    rates: acceptance of the drafts, which changes at random.
    """
    launched: list[Step] = []
    device.launch = lambda step: launched.append(step) or step  # type: ignore[method-assign,func-returns-value]
    for number in range(STEPS):
        live = device.engine.scheduler.requests
        if not live or draw.random() < 0.01:
            add(device, f"r{number}", draw)
        elif draw.random() < 0.003:
            device.engine.abort(draw.choice(list(live)))
        device.rate = draw.choice(rates) if draw.random() < 0.01 else device.rate
        device.engine.step()
        assert device.engine.error is None
        yield from launched
        launched.clear()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_a_plan_decides_if_other_requests_run(
    method: str,
    rows: int,
    plans: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Than in the plan before; otherwise most plans decide nothing while drafts do not pay."""
    device, draw = Device(METHODS[method], rows, 0.0, plans, 0.1), random.Random(f"{SEED} {method} {rows}")
    begin, seen = Scheduler._begin_step, list[tuple[list[str], bool]]()

    def begun(self: Scheduler) -> int:
        ids, decided = [request.id for request in self.running], len(plans)
        budget = begin(self)
        seen.append((ids, len(plans) > decided))
        return budget

    monkeypatch.setattr(Scheduler, "_begin_step", begun)
    for _ in steps(device, draw, 0.0):
        pass
    changed = [decided for (before, _), (ids, decided) in pairwise(seen) if ids != before]
    print(f"seed {SEED}: {len(changed)} changes, {len(plans)} of {len(seen)} plans decide")
    assert len(changed) > 4 and all(changed)
    assert len(plans) < 0.6 * len(seen)


@pytest.mark.parametrize("method", METHODS)
def test_quiet_plans_change_nothing(
    method: str,
    plans: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps of a single row are the same if all are measured, and all that is found is looked at.

    Durations are not random, so that more measurements of the same step do not change its mean.
    """
    print(f"seed {SEED}")
    monkeypatch.setattr(test_draft_overhead, "NOISE", 0.0)
    monkeypatch.setattr(test_draft_overhead, "DECIDE", {1: 0.0})
    monkeypatch.setattr(test_draft_overhead, "VERIFY", (0.0, 0.4137, 0.6271, 0.7513, 1.0119))
    found = 0.3 if METHODS[method] is LOOKUP_AND_HEAD else 0.0

    def planned() -> list[Planned]:
        plans.clear()
        device, draw = Device(METHODS[method], 1, 0.0, plans, found), random.Random(f"{SEED} {method}")
        speculation, taken = device.engine.scheduler.speculation, list[Planned]()
        assert speculation is not None
        for step in steps(device, draw, 0.0, 0.95):
            items = [(w.row, w.num_tokens, w.drafts, w.fill, w.propose, w.lookup) for w in step.work]
            if all(w.num_tokens == 1 for w in step.work):
                assert step.plain is speculation.plain(step.work)
            taken.append((*items, step.plain))
        return taken

    quiet = planned()
    for name, value in (("unmeasured", False), ("_ignores_until", 0)):
        monkeypatch.setattr(Speculation, name, property(lambda self, v=value: v, lambda self, v: None), raising=False)
    assert planned() == quiet
    assert sum(item[2] > 0 for *items, _ in quiet for item in items) > 0
