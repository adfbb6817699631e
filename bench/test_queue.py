"""The cost of a long queue per step: the scheduler over a device that takes no time, with 0 and 10,000 waiting
requests.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.step import Step, StepOutput

from bench.kit import clock, interleave, median, record, table

ROWS, PROMPT, OUTPUT, STEPS, ROUNDS = 32, 64, 16, 200, 9
QUEUED = 10_000


class Free:
    """A device that returns token 7 at once."""

    depth = 1

    def launch(self, step: Step) -> Step:
        return step

    def wait(self, step: Step) -> StepOutput:
        return StepOutput([7 if work.emit else None for work in step.work], [None] * len(step.work))

    def guide(self, ticket: Any, masks: Any) -> None:
        raise AssertionError("nobody is guided")

    def settle(self) -> None:
        return


class Load:
    """An engine whose rows are always full: each request that ends is replaced, so that `queued` always wait."""

    def __init__(self, queued: int, tenants: int) -> None:
        config = SchedulerConfig(4096, 16, 1024, ROWS, 2048, 1000)
        self.engine = Engine(Scheduler(config, lambda: 1), Free())
        self.ids, self.tenants = itertools.count(), tenants
        for _ in range(ROWS + queued):
            self.arrive()
        self.seconds(STEPS)

    def arrive(self) -> None:
        i = next(self.ids)
        params = SamplingParams(temperature=0, max_tokens=OUTPUT + i % 5, ignore_eos=True)
        prompt = [(i + 3 * k) % 1000 for k in range(PROMPT)]
        self.engine.add(Request(str(i), prompt, params, tenant=str(i % self.tenants)))

    def seconds(self, steps: int) -> float:
        """Return the median seconds of a step; requests arrive between two steps."""
        took = []
        for _ in range(steps):
            begin = time.perf_counter()
            deltas = self.engine.step()
            took.append(time.perf_counter() - begin)
            for delta in deltas:
                if delta.finish_reason:
                    self.arrive()
        return median(took)


@pytest.mark.benchmark(timer=clock, group="queue")
def test_a_long_queue_does_not_slow_a_step(benchmark: Any) -> None:
    """Steps of 32 rows, in each of which two requests end and two arrive; nine rounds of 200 steps, interleaved."""
    loads = {"nobody": Load(0, 1), "10,000, one tenant": Load(QUEUED, 1), "10,000, 500 tenants": Load(QUEUED, 500)}
    gc.collect()
    gc.freeze()
    measures: dict[str, Callable[[], float]] = {
        name: (lambda load=load: load.seconds(STEPS)) for name, load in loads.items()
    }
    times = interleave(measures, ROUNDS)
    gc.unfreeze()
    t = table("One step of the scheduler", "who waits", "median us", "least us", "ratio to nobody (least)")
    fastest = min(times["nobody"])
    for name, seconds in times.items():
        t.add(name, f"{1e6 * median(seconds):.0f}", f"{1e6 * min(seconds):.0f}", f"{min(seconds) / fastest:.2f}")
    record(benchmark, times["10,000, one tenant"])
    assert min(times["10,000, one tenant"]) < 1.15 * fastest
