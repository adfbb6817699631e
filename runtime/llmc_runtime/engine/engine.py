"""The engine: plan, launch, wait, commit. It owns the failure of a whole step; no scheduling, no device, no text.

It keeps as many steps under way as the executor is deep: at depth 2 step N + 1 is planned and launched while step N
runs, at depth 1 nothing runs between two calls. A request that cannot run is refused by `add` and touches nobody. An
executor that fails ends the engine: every live request is told once, and nothing is accepted any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.request import Request, RequestDelta
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import RowMask, Step, StepOutput

_GRACE = 0.001  # seconds
_PATIENCE = 0.02  # seconds that a step waits for a mask where nothing else can run


class Executor(Protocol):
    """Whatever runs steps: exec.executor on a real device, a fake in tests.

    Steps take effect in launch order, and a row's next step finds on the device what the one before sampled.
    """

    depth: int  # most steps that are launched and not waited for; 1: what is launched may run as late as in `wait`

    def launch(self, step: Step) -> Any:
        """Have the step's diffs applied, its rows computed, and tokens sampled where asked; a ticket for the output."""

    def guide(self, ticket: Any, masks: Sequence[RowMask]) -> None:
        """Let an open step, the only one under way, sample under these masks too."""

    def wait(self, ticket: Any) -> StepOutput:
        """The output of a launched step. Tickets are waited for in launch order, each once."""

    def settle(self) -> None:
        """Wait for every step under way and forget what it gave, also of one whose launch or wait was interrupted."""


class Engine:
    """One scheduler over one executor, for one thread. `note` is told when a part of a step has ended (see trace).

    A step waits for masks of guided requests that are expected at once: `grace` seconds or a quarter of the last step,
    at most four times `grace`, and at most five times where nobody else runs.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, grace: float = _GRACE) -> None:
        self.scheduler, self.executor, self._grace = scheduler, executor, grace
        self.pump: Callable[[float], None] = _no_guides  # takes what guides answer, waiting so many seconds at most
        self._last = 0.0  # seconds of the last step
        self.error: LlmcError | None = None  # why the engine ended; None while it lives
        self.note: Callable[[str, Any], None] = _nobody
        self._tickets: deque[Any] = deque()  # of the steps under way, oldest first
        self._unsettled = False  # an interrupt left steps under way that nobody waits for
        scheduler.depth = executor.depth

    @property
    def counters(self) -> Counters:
        """What has happened so far."""
        return self.scheduler.counters

    def add(self, request: Request) -> None:
        """Queue a request. LlmcError E601 to E607 where it can never run, E608 where the engine has ended."""
        if self.error is not None:
            raise self.error
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; no delta follows. False where it does not live (any more)."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Some request has not ended: step() is worth calling."""
        return self.scheduler.has_work()

    def step(self) -> list[RequestDelta]:
        """Let the open step under way sample and launch what can be launched, then take the oldest step under way: what
        it did for each request that got tokens or ended.

        An Exception of the executor becomes one "error" delta per live request, and ends the engine. An interrupt (a
        BaseException, such as Ctrl-C) while the executor launches or waits passes through and costs only recomputation
        of the steps under way: the engine may be used on. At any other moment of a step it ends the engine.
        """
        scheduler, executor, tickets, note = self.scheduler, self.executor, self._tickets, self.note
        outside = False  # the executor has control
        try:
            note("begin", tickets)
            began = time.monotonic()
            if self._unsettled:
                outside = True
                executor.settle()
                outside = self._unsettled = False
            if scheduler.guided:
                self._await_masks()
            if (masks := scheduler.guide()) is not None:
                outside = True
                executor.guide(tickets[0], masks)
                outside = False
            while len(tickets) < executor.depth:
                plan = scheduler.next()
                note("plan", plan)
                if not plan.work:
                    break
                outside = True
                tickets.append(executor.launch(plan))
                outside = False
                note("launch", tickets)
            if not tickets:
                if scheduler.guided.left_out:
                    self.pump(_PATIENCE)
                elif scheduler.has_work():
                    raise RuntimeError("requests are alive and none can run")
                return scheduler.take_notices()
            outside = True
            output = executor.wait(tickets.popleft())
            outside = False
            note("wait", tickets)
            deltas = scheduler.commit(output)
            note("commit", scheduler.has_work())
            self._last = time.monotonic() - began
            return scheduler.take_notices() + deltas
        except Exception as error:
            return self._end(error)
        except BaseException as interrupt:
            if outside:
                tickets.clear()
                scheduler.rollback()
                self._unsettled = True
                note("forget", None)
            else:
                self._end(interrupt)
            raise

    def _await_masks(self) -> None:
        """Wait a little for the masks that are expected at once."""
        scheduler, guided = self.scheduler, self.scheduler.guided
        self.pump(0.0)
        if not guided.awaited():
            return
        alone = all(request.guide is not None for request in scheduler.running)
        grace = 5 * self._grace if alone else min(max(self._grace, self._last / 4), 4 * self._grace)
        end = time.monotonic() + grace
        while guided.awaited() and (left := end - time.monotonic()) > 0:
            self.pump(left)
        if guided.awaited():
            guided.stop_waiting()

    def end(self, error: LlmcError) -> list[RequestDelta]:
        """End the engine and every live request with `error`: each is told once. The first reason stays. Steps under
        way are not waited for: whoever closes the device does that."""
        self.error = self.error or error
        self._tickets.clear()
        return self.scheduler.end_all(self.error)

    def stats(self) -> dict[str, float]:
        """Gauges: live requests by state, share of the KV pool in use."""
        scheduler = self.scheduler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": scheduler.pool.num_used / scheduler.pool.num_pages,
        }

    def _end(self, cause: BaseException) -> list[RequestDelta]:
        if isinstance(cause, LlmcError):
            return self.end(cause)
        words = f"the engine ended: {type(cause).__name__}: {str(cause)[:200]}"
        error = LlmcError("E608", words, "start a new one; if it happens again, report it with the step's log")
        error.__cause__ = cause
        return self.end(error)


def _no_guides(seconds: float) -> None:
    return


def _nobody(part: str, what: Any) -> None:
    return
