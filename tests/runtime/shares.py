"""Measures the service of each tenant in a simulated world from plans and outputs, and checks its fairness."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import Step

WEIGHT = 2  # of a generated token; a prompt token has weight 1


class Shares:
    """Service by tenant. Two tenants that wait all the time get the same, up to `bound`."""

    def __init__(self) -> None:
        self.service: Counter[str] = Counter()
        self._many = self._prompt = self._output = 0
        self._begun: set[str] = set()
        self._apart: dict[tuple[str, str], tuple[int, int]] = {}  # least and largest difference while both wait
        self.met = 0  # checks of two tenants that waited together

    @property
    def bound(self) -> int:
        """The limit on the difference while both wait.

        It is twice what a tenant can get beyond its turn: a prompt, and everything that its started requests may
        generate.
        """
        return 2 * (self._prompt + WEIGHT * self._many * self._output)

    def submitted(self, prompt: int, longest: int) -> None:
        """Record a request with `prompt` tokens, and at most `longest` tokens including its output."""
        self._prompt, self._output = max(self._prompt, prompt), max(self._output, longest - prompt)

    def launched(self, step: Step, scheduler: Scheduler) -> None:
        """Charge requests that get a row for the first time for their uncached prompt tokens."""
        rows = {request.row: request for request in scheduler.running}
        for init in step.inits:
            request = rows[init.row]
            if request.id not in self._begun:
                self._begun.add(request.id)
                self.service[request.tenant] += init.num_prompt - init.computed

    def generated(self, tenant: str) -> None:
        """Count a generated token."""
        self.service[tenant] += WEIGHT

    def look(self, scheduler: Scheduler) -> None:
        """Raise AssertionError if two tenants that have both been waiting differ too much in service."""
        begun = Counter(request.tenant for request in scheduler.requests.values() if request.id in self._begun)
        self._many = max(self._many, *begun.values()) if begun else self._many
        waiting = sorted({request.tenant for request in scheduler.waiting})
        before, self._apart = self._apart, {}
        for pair in combinations(waiting, 2):
            apart = self.service[pair[0]] - self.service[pair[1]]
            low, high = before.get(pair, (apart, apart))
            low, high = self._apart[pair] = (min(low, apart), max(high, apart))
            self.met += pair in before
            assert high - low <= self.bound, f"tenants {pair}: {high - low} tokens apart, at most {self.bound}"
