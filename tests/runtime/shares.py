"""What each tenant of a simulated world gets, counted from plans and answers alone, and how far two may be apart."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import Step

WEIGHT = 2  # of a generated token; one of the prompt weighs 1


class Shares:
    """Service by tenant. Two that wait all the time get the same, but for what has begun: `bound`."""

    def __init__(self) -> None:
        self.service: Counter[str] = Counter()
        self._many = self._prompt = self._output = 0
        self._begun: set[str] = set()
        self._apart: dict[tuple[str, str], tuple[int, int]] = {}  # least and most difference while both wait
        self.met = 0  # looks at two that waited together

    @property
    def bound(self) -> int:
        """Of the difference while both wait: twice what one can get behind its turn, which is a prompt and all that its
        requests that have begun may still generate."""
        return 2 * (self._prompt + WEIGHT * self._many * self._output)

    def submitted(self, prompt: int, longest: int) -> None:
        """A request of so many tokens, and at most that many with its output."""
        self._prompt, self._output = max(self._prompt, prompt), max(self._output, longest - prompt)

    def launched(self, step: Step, scheduler: Scheduler) -> None:
        """Who gets a row for the first time is charged for the prompt tokens that are not cached."""
        rows = {request.row: request for request in scheduler.running}
        for init in step.inits:
            request = rows[init.row]
            if request.id not in self._begun:
                self._begun.add(request.id)
                self.service[request.tenant] += init.num_prompt - init.computed

    def generated(self, tenant: str) -> None:
        """One token."""
        self.service[tenant] += WEIGHT

    def look(self, scheduler: Scheduler) -> None:
        """Who waits now; AssertionError where two that did since an earlier look got too different shares."""
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
