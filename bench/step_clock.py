"""A clock that a table of costs drives: it advances with an engine's steps, by what the table says that they take.

The policy of speculative decoding depends on how long steps take. With this clock it can be compared on a machine whose
steps vary: the same requests give the same figures. The unit is a step of one token.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmc_runtime import LLM
from llmc_runtime.engine.engine import Engine, Executor
from llmc_runtime.sched.step import RowMasks, Step, StepOutput, Work

STEP = 0.001  # seconds of a step of one token, by the clock
LEAST, MOST = 0.95, 1.1  # factors between which the duration of a step varies at random
GRACE = 60.0  # real seconds that a step waits for the masks of grammars, so that none is late


@dataclass(frozen=True)
class StepCosts:
    """What steps take, in steps of one token. Of a prompt's tokens, the last one counts.

    tokens: a step that computes 1, 2, 3 and so on tokens: one per row, and the drafts that are verified. The last two
    costs are continued for more tokens. one_pass: a pass of the draft model or head for one row; for several it grows
    as that of steps. cold: how much longer the first step that verifies or drafts takes after one that does not, since
    what it reads has left the caches. entries: how much longer a step without drafts takes if it is not plain, so that
    a head computes its entries.
    """

    tokens: tuple[float, ...]
    one_pass: float
    cold: float = 0.0
    entries: float = 0.0

    def __post_init__(self) -> None:
        least = min(*self.tokens, self.one_pass, self.cold, self.entries)
        if len(self.tokens) < 2 or self.tokens[0] != 1.0 or least < 0:
            raise SystemExit("step costs: two numbers or more, of which the first is 1 and none is negative")

    def steps(self, rows: int, drafts: int, passes: int) -> float:
        """Return the seconds of a step of `rows` rows that verifies `drafts` drafts in all and drafts in `passes`."""
        return self._of(rows + drafts) + passes * self.one_pass * self._of(rows)

    def _of(self, tokens: int) -> float:
        more = max(0, tokens - len(self.tokens))
        return self.tokens[tokens - more - 1] + more * (self.tokens[-1] - self.tokens[-2])


class StepClock:
    """The clock of one engine, in seconds. `seed` sets the random part of durations."""

    def __init__(self, costs: StepCosts, seed: str) -> None:
        self._costs, self._random = costs, random.Random(seed)
        self._now, self._warm = 0.0, True

    def __call__(self) -> float:
        """Return the time."""
        return self._now

    def ran(self, work: Sequence[Work], output: StepOutput, plain: bool = True) -> None:
        """Advance by the duration of a step."""
        drafts, passes = sum(item.drafts for item in work), passes_of(work, output)
        steps = self._costs.steps(len(work), drafts, passes)
        if drafts or passes:
            steps += 0.0 if self._warm else self._costs.cold
        elif not plain:
            steps += self._costs.entries
        self._warm = bool(drafts or passes)
        self._now += STEP * steps * self._random.uniform(LEAST, MOST)


def passes_of(work: Sequence[Work], output: StepOutput) -> int:
    """Return how many passes of the draft model or head followed a step: all rows draft together."""
    if output.likely:  # drafting may have ended before all were made
        drafted = [len(output.likely.get(i, ())) for i in range(len(work))]
    else:
        drafted = [0 if item.lookup and output.proposed[i] else item.propose for i, item in enumerate(work)]
    return max(drafted, default=0) + any(item.fill for item in work)


class Clocked:
    """An executor whose steps advance a clock."""

    def __init__(self, inner: Executor, clock: StepClock) -> None:
        self._inner, self._clock, self.depth = inner, clock, inner.depth
        self._work: deque[tuple[list[Work], bool]] = deque()  # of the steps in flight, and whether they are plain

    def launch(self, step: Step) -> Any:
        """Start a step."""
        self._work.append((step.work, step.plain))
        return self._inner.launch(step)

    def guide(self, ticket: Any, masks: Sequence[RowMasks]) -> None:
        """Let an open step sample."""
        self._inner.guide(ticket, masks)

    def wait(self, ticket: Any) -> StepOutput:
        """Wait for a step, and let the clock advance."""
        output = self._inner.wait(ticket)
        work, plain = self._work.popleft()
        self._clock.ran(work, output, plain)
        return output

    def settle(self) -> None:
        """Wait for all steps in flight and drop their output."""
        self._work.clear()
        self._inner.settle()


def clocked(llm: LLM, clock: StepClock) -> LLM:
    """Return an LLM over the engine of `llm` whose scheduler goes by the clock. `llm` must be kept, and not be used."""
    scheduler = llm.engine.scheduler
    scheduler.clock = clock
    return LLM.over(Engine(scheduler, Clocked(llm.engine.executor, clock), GRACE), llm.tokenizer)
