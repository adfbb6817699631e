"""Requests whose masks are late delay no others, and free their rows for them."""

from __future__ import annotations

import random

import pytest
from llmc_runtime import SamplingParams
from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched.request import Request, Status
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig

from tests.runtime.guides import Wandering, state_of
from tests.runtime.simulator import make_device

CONFIG = SchedulerConfig(64, 4, 64, 2, 16, 1000)
LATE = 60  # times that a mask is asked for in vain


def engine(depth: int) -> Engine:
    return Engine(Scheduler(CONFIG, lambda: 7), make_device(CONFIG, depth, random.Random(1)), grace=0.0)


def late(name: str, tenant: str = "slow") -> Request:
    params = SamplingParams(max_tokens=6, seed=len(name), ignore_eos=True)
    return Request(name, [5, 6, 7], params, guide=Wandering(1000, lambda: LATE), tenant=tenant)


def tokens_of(one: Engine, names: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in names}
    while one.has_work():
        for delta in one.step():
            found[delta.id] += delta.new_token_ids
    assert one.error is None
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_others_get_the_rows_of_those_that_wait_for_masks(depth: int) -> None:
    one = engine(depth)
    slow = [late("a"), late("bb")]
    for request in slow:
        one.add(request)
    for _ in range(6):
        one.step()
    assert all(request.status is Status.RUNNING for request in slow) and not one.scheduler.free_rows
    one.add(Request("quick", [9, 9], SamplingParams(max_tokens=5, ignore_eos=True, seed=3), tenant="other"))
    parked, seen, steps = False, 0, 0
    while "quick" in one.scheduler.requests:
        steps += 1
        parked |= any(request.status is Status.PARKED for request in slow)
        seen += sum(len(delta.new_token_ids) for delta in one.step() if delta.id == "quick")
    assert parked and seen == 5 and steps < LATE, "it waited for masks of others"
    tokens_of(one, ["a", "bb"])
    assert all(request.status is Status.FINISHED for request in slow)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_the_same_however_late_the_masks_are(depth: int) -> None:
    """Parked, dropped and rebuilt, a request gets the tokens that it gets with masks that come at once."""

    def run(times: int) -> dict[str, list[int]]:
        one = engine(depth)
        for i in range(6):
            params = SamplingParams(max_tokens=9, seed=i, ignore_eos=True, temperature=1.0)
            guide = Wandering(1000, lambda: times) if i % 2 else None
            one.add(Request(str(i), [5 + i, 6], params, guide=guide, tenant=str(i % 3)))
        return tokens_of(one, [str(i) for i in range(6)])

    want = run(0)
    assert run(3) == run(25) == want
    assert all(state_of(want[str(i)]) is not None and want[str(i)] for i in range(6))


def test_an_aborted_request_that_is_parked_is_gone() -> None:
    one = engine(1)
    one.add(late("a"))
    one.add(late("bb"))
    for _ in range(6):
        one.step()
    one.add(Request("quick", [9], SamplingParams(max_tokens=40, ignore_eos=True, seed=3), tenant="other"))
    while not any(request.status is Status.PARKED for request in one.scheduler.requests.values()):
        one.step()
    for name in ("a", "bb", "quick"):
        assert one.abort(name)
    assert not one.has_work() and one.scheduler.pool.num_used == 0 and len(one.scheduler.free_rows) == 2
