"""The number of drafts that `Speculation` chooses, compared with the optimum for the steps' costs and acceptance rate.

Steps are simulated: their costs are given, and drafts are accepted at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.speculation_config import SpeculationConfig
from llmc_runtime.sched.step import StepOutput, Work
from llmc_runtime.sched.step_budget import StepTimer

LEARNED, COUNTED = 200, 10_000  # plans of a simulation before those that are counted, and rows of all of these
NOISE = 0.02  # standard deviation of what a step takes longer, relative to its cost
LATE, DELAY = 0.1, 0.5  # share of steps whose end is noticed late, and by how much at most, relative to their cost
ROOM = 256  # drafts of a step of all rows together: no more entries than twice the rows where 256 run
# Milliseconds of a step by drafts per row, Llama-3.1-8B on an H200, rounded; of 256 rows, and of 8 with a draft model,
# on an H100. A draft model's steps include drafting.
COSTS: Mapping[tuple[str, int], Mapping[int, float]] = {
    ("ngram", 1): {0: 3.84, 1: 4.15, 2: 4.18, 3: 4.2, 5: 4.25, 7: 4.29},
    ("ngram", 8): {0: 4.1, 1: 4.8, 2: 4.9, 3: 5.0, 5: 5.6, 7: 6.2},
    ("ngram", 32): {0: 4.54, 1: 6.1, 2: 6.5, 3: 7.0, 5: 8.6, 7: 10.0},
    ("ngram", 256): {0: 11.6, 1: 19.4},
    ("draft", 256): {0: 11.3, 1: 23.6},
    ("draft", 8): {0: 5.6, 1: 7.2, 2: 8.4, 3: 9.6, 5: 12.5, 7: 14.9},
    ("draft", 1): {0: 3.84, 1: 5.2, 2: 6.0, 3: 6.8, 5: 8.2, 7: 9.8},
}  # fmt: skip


@dataclass
class Simulation:
    """Rows whose drafts are accepted with probability `rate` each, in steps with the costs `costs`."""

    method: str
    rows: int
    costs: Mapping[int, float]
    rate: float
    counters: Counters = field(default_factory=Counters)
    tokens: float = 0.0
    spent: float = 0.0

    def run(self, learned: int = LEARNED, counted: int = COUNTED) -> float:
        """Return the speed-up over plain decoding, after `learned` plans."""
        timer = StepTimer()
        policy = Speculation(SpeculationConfig(7, max_rows=256 if self.method == "draft" else 0))
        requests = [Request(str(i), [1]) for i in range(self.rows)]
        self.counters.drafted_at_most(7)
        now = 0.0
        for plan in range(learned + max(400, counted // self.rows)):
            now = self.step(policy, timer, requests, now, plan >= learned)
        return self.tokens / self.spent * self.costs[0] / self.rows

    def step(self, policy: Speculation, timer: StepTimer, requests: list[Request], now: float, counted: bool) -> float:
        """Plan and end a step; return the time of its end."""
        for request in requests:
            request.num_drafts = 7
        policy.begin(requests, ROOM)
        drafts, room = [], ROOM
        for request in requests:
            drafts.append(policy.choose(request, min(7, room)) if policy.wants else 0)
            room -= drafts[-1]
        timer.planned(now)
        cost = self.seconds(max(drafts) if self.method == "draft" else sum(drafts) / self.rows)
        seconds = cost * (1 + abs(random.gauss(0, NOISE)))
        accepted = {i: [(5, None)] * self.accepted(count) for i, count in enumerate(drafts) if count}
        propose = self.method == "draft"
        work = [Work(i, 1 + k, True, drafts=k, propose=k * propose) for i, k in enumerate(drafts)]
        output = StepOutput([5] * self.rows, [None] * self.rows, accepted=accepted, proposed=[7] * self.rows)
        late = random.uniform(0, DELAY * seconds) if random.random() < LATE else 0.0  # the next step seems shorter
        policy.learn(work, requests, output, timer.ended(now + seconds + late), self.counters)
        if counted:
            self.tokens += self.rows + sum(map(len, accepted.values()))
            self.spent += cost
        return now + seconds

    def seconds(self, drafts: float) -> float:
        """Interpolate the cost of a step; another program runs in one with any drafts."""
        if drafts:
            drafts = max(1.0, drafts)
        low, high = max(k for k in self.costs if k <= drafts), min(k for k in self.costs if k >= drafts)
        part = (drafts - low) / (high - low) if high > low else 0.0
        return self.costs[low] + part * (self.costs[high] - self.costs[low])

    def accepted(self, drafts: int) -> int:
        """Draw how many of the first drafts are accepted."""
        return next((i for i in range(drafts) if random.random() >= self.rate), drafts)

    def allowed(self) -> float:
        """The speed-up with the best fixed number of drafts (arXiv 2211.17192)."""
        tokens = {k: (1 - self.rate ** (k + 1)) / (1 - self.rate) for k in self.costs}
        return max(tokens[k] * self.costs[0] / cost for k, cost in self.costs.items() if k * self.rows <= ROOM)


@pytest.mark.parametrize(("method", "rows"), COSTS)
def test_the_choice_is_close_to_the_best_fixed_number(method: str, rows: int) -> None:
    """Within 7 %, and without loss where drafts are hardly ever accepted."""
    likely = Simulation(method, rows, COSTS[method, rows], 0.8 if method == "draft" else 0.7)
    gain = likely.run()
    assert gain >= 0.93 * likely.allowed()
    rare = Simulation(method, rows, COSTS[method, rows], 0.02)
    assert rare.run() >= 0.95  # a few of so few plans measure


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_measuring_what_does_not_pay_costs_little(rate: float) -> None:
    """From the first plan on, for eight rows on a CPU, where verifying a draft of each costs almost a step."""
    cpu = Simulation("draft", 8, {0: 2.2, 1: 4.35, 7: 17.3}, rate)
    assert cpu.allowed() == 1.0 and cpu.run(0, 768 * 8) >= 0.975
