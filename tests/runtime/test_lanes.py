"""Slots shared by API key: turns, reserved slots, bounds on waiting, jobs that leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

pytest.importorskip("starlette")
from draw import of_test
from llmc_runtime.server.fair_slots import FairSlots, threads_of_key


class Full(Exception):
    pass


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def started(lanes: FairSlots, key: str, order: list[str] | None = None, name: str = "") -> asyncio.Task[None]:
    async def job() -> None:
        await lanes.acquire(key)
        if order is not None:
            order.append(name or key)

    task = asyncio.ensure_future(job())
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_keys_take_turns_and_each_key_is_first_in_first_out() -> None:
    async def main() -> None:
        lanes, order = FairSlots(1, Full), list[str]()
        await lanes.acquire("a")
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            await started(lanes, name[0], order, name)
        running = "a"
        while lanes.waiting:
            lanes.release(running)
            for _ in range(3):
                await asyncio.sleep(0)
            running = order[-1][0]
        assert order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    run(main())


def test_one_key_leaves_the_reserved_slots_to_others() -> None:
    async def main() -> None:
        lanes = FairSlots(3, Full, reserved=1)
        mine = [await started(lanes, "a") for _ in range(4)]
        assert [task.done() for task in mine] == [True, True, False, False]
        other = await started(lanes, "b")
        assert other.done() and lanes.waiting == 2
        lanes.release("b")
        assert lanes.waiting == 2  # the slot that is free now is not for a
        lanes.release("a")
        await asyncio.gather(mine[2])
        lanes.release("a")
        lanes.release("a")
        await asyncio.gather(mine[3])

    run(main())


def test_of_too_many_the_newest_of_the_key_with_the_most_is_refused() -> None:
    async def main() -> None:
        lanes = FairSlots(1, Full, max_waiting=3)
        await lanes.acquire("x")
        first = [await started(lanes, "a") for _ in range(3)]
        other = await started(lanes, "b")
        assert isinstance(first[2].exception(), Full) and not other.done() and lanes.waiting == 3
        newest = await started(lanes, "a")
        assert isinstance(newest.exception(), Full) and not first[1].done() and lanes.waiting == 3
        for task in (*first, other, newest):
            task.cancel()

    run(main())


def test_a_job_that_waits_too_long_is_refused_and_one_that_leaves_is_forgotten() -> None:
    async def main() -> None:
        lanes = FairSlots(1, Full, seconds=0.05)
        await lanes.acquire("x")
        with pytest.raises(Full):
            await lanes.acquire("a")
        left = await started(lanes, "a")
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert lanes.waiting == 0
        lanes.release("x")
        async with lanes.slot("b"):
            assert lanes.waiting == 0

    run(main())


def test_a_slot_that_is_given_to_a_job_that_has_just_left_goes_to_the_next() -> None:
    async def main() -> None:
        lanes = FairSlots(1, Full)
        await lanes.acquire("x")
        left, next_one = await started(lanes, "a"), await started(lanes, "b")
        lanes.release("x")  # a has the slot, and does not know it yet
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await next_one
        lanes.release("b")
        await lanes.acquire("c")

    run(main())


def test_jobs_cancelled_in_the_turn_of_a_release_keep_no_slot() -> None:
    """The event loop runs a cancelled task later; until then its place in the queue is still there."""

    async def main() -> None:
        lanes = FairSlots(1, Full)
        await lanes.acquire("a")
        leaving, staying = await started(lanes, "a"), await started(lanes, "b")
        leaving.cancel()
        lanes.release("a")
        await asyncio.gather(staying)
        lanes.release("b")
        await asyncio.wait_for(lanes.acquire("a"), 1)
        assert leaving.cancelled() and not lanes.waiting

    run(main())


def test_random_arrivals_and_departures_lose_no_slot() -> None:
    """Jobs come, leave while waiting or running, and are refused, several in one turn of the event loop."""
    draw = random.Random(of_test())

    async def main() -> None:
        lanes = FairSlots(3, Full, reserved=1, max_waiting=6)

        async def job(key: str) -> None:
            async with lanes.slot(key):
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)

        tasks: list[asyncio.Task[None]] = []
        for _ in range(2000):
            for _ in range(draw.randrange(5)):
                tasks.append(asyncio.ensure_future(job(draw.choice("abc"))))
            for task in draw.sample(tasks, min(len(tasks), draw.randrange(3))):
                task.cancel()
            await asyncio.sleep(0)
            tasks = [task for task in tasks if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not lanes.waiting
        await asyncio.gather(*(asyncio.wait_for(lanes.acquire(key), 1) for key in "aab"))

    run(main())


def test_a_key_has_the_threads_of_half_of_the_cpus() -> None:
    """Others always find a free one."""
    assert [threads_of_key(cpus) for cpus in (1, 2, 3, 4, 6, 8, 64)] == [1, 1, 1, 2, 3, 3, 3]
