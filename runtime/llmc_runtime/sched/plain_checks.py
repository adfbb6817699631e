"""Occasional steps without drafts, which show what drafts gain.

Whether drafts pay depends on the duration of a step without them. While every step drafts, that is not measured. If it
was measured while other programs slowed the machine down, drafts would seem to pay from then on. So from time to time a
few plans draft nothing.
"""

from __future__ import annotations

from statistics import median

from llmc_runtime.sched.draft_costs import StepCosts

CHECK_PLANS = 5  # plans of a check; the first one may still verify drafts
_FEWEST = 3  # the fewest steps whose median counts
_FIRST_WAIT, _LAST_WAIT = 64, 512  # plans with drafts before the first check; doubles up to the last
_PAUSE = 16  # plans for which nothing was to be decided, after which the wait begins anew: the last ones are measured


class PlainChecks:
    """Chooses the plans of a draft model or head that draft nothing, and keeps the durations of their steps."""

    def __init__(self) -> None:
        self.active = False  # this plan drafts nothing
        self._until = 0  # the plan after the check
        self._plan = 0  # the last plan that was begun
        self._drafting, self._wait = 0, _FIRST_WAIT  # plans with drafts since steps without were measured; see above
        self._rows, self._seconds = 0, list[float]()

    def begin(self, plan: int, rows: int, drafts: bool) -> None:
        """Begin a plan of `rows` rows, for which the number of drafts is to be decided.

        drafts: it makes drafts, unless it is one of a check.
        """
        if rows != self._rows:
            self._rows = rows
            self._seconds.clear()
        if plan - self._plan > _PAUSE:
            self._drafting, self._wait = 0, _FIRST_WAIT
        self._plan = plan
        self._drafting += drafts
        if self._drafting > self._wait:
            self._until, self._drafting = plan + CHECK_PLANS, 0
            self._wait = min(2 * self._wait, _LAST_WAIT)
            self._seconds.clear()
        self.active = plan < self._until

    def add(self, seconds: float) -> None:
        """Add a step without drafts and prompts that was planned during a check."""
        self._seconds.append(seconds)

    def end(self, plan: int, costs: StepCosts) -> bool:
        """If a check has ended before this plan, correct the costs by it, and return True."""
        if plan < self._until or len(self._seconds) < _FEWEST:
            return False
        costs.correct_plain(self._rows, median(self._seconds))
        self._seconds.clear()
        return True
