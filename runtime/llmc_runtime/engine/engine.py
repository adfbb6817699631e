"""The engine: plans a step, launches it, waits for the oldest step in flight, commits its output.

It keeps up to `executor.depth` steps in flight: at depth 2, step N + 1 is planned and launched while step N runs; at
depth 1 nothing runs between two calls. `add` refuses a request that can never run, without effect on others. A failure
of the executor ends the engine: every live request gets one error, and new requests are refused.
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
from llmc_runtime.sched.step import RowMasks, Step, StepOutput

_MASK_WAIT_SECONDS = 0.001  # seconds that a step waits for the masks of guided requests
_IDLE_WAIT_SECONDS = 0.02  # seconds that `step` waits for a mask if nothing else can run


class Executor(Protocol):
    """Runs steps: exec.executor.Executor on a device.

    Steps take effect in launch order: a row's next step reads from the device what the step before it sampled.
    """

    depth: int  # maximum number of launched steps that are not waited for; at 1 a step may run as late as in `wait`

    def launch(self, step: Step) -> Any:
        """Start a step: apply its changes, compute its rows, sample tokens. Return a ticket for the output."""

    def guide(self, ticket: Any, masks: Sequence[RowMasks]) -> None:
        """Let an open step, the only one in flight, sample with these additional masks."""

    def wait(self, ticket: Any) -> StepOutput:
        """Return the output of a launched step. Called once for each ticket, in launch order."""

    def settle(self) -> None:
        """Wait for every step in flight and drop its output, also if its launch or wait was interrupted."""


class Engine:
    """A scheduler and an executor. Not thread-safe: it belongs to the main thread of an engine process, or to the
    thread that holds the lock of an LLM.

    note:   called at the end of each part of a step (see trace.Recorder.note)
    pump:   processes answers of the guides' processes, waiting up to the given seconds for the first one
    error:  why the engine has ended; None while it runs
    grace:  a step waits this many seconds for masks that are expected soon, or a quarter of the last step, up to four
            times `grace`; five times `grace` if all running requests are guided
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, grace: float = _MASK_WAIT_SECONDS) -> None:
        self.scheduler, self.executor, self._grace = scheduler, executor, grace
        self.pump: Callable[[float], None] = lambda seconds: None
        self._last = 0.0  # duration of the last step in seconds
        self.error: LlmcError | None = None
        self.note: Callable[[str, Any], None] = lambda part, subject: None
        self._tickets: deque[Any] = deque()  # one per step in flight, oldest first
        self._in_executor = False  # the executor runs, and an interrupt leaves the scheduler consistent
        self._unsettled = False  # an interrupt left steps in flight that are not waited for
        scheduler.depth = executor.depth

    @property
    def counters(self) -> Counters:
        """The counters since the engine was made."""
        return self.scheduler.counters

    def add(self, request: Request) -> None:
        """Queue a request. Raises LlmcError E601 to E607 if it can never run, E608 if the engine has ended."""
        if self.error is not None:
            raise self.error
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; no delta follows. Return False if it is not live."""
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether some request has not ended."""
        return self.scheduler.has_work()

    def spare_seconds(self) -> float:
        """Return for how long the next call of `step` may be delayed, so that requests which arrive meanwhile run in
        the step that it plans, and the executor still has it before the one that runs ends; 0 or less: not at all.
        """
        if len(self._tickets) != 1 or self.executor.depth < 2:
            return 0.0
        return self.scheduler.spare_seconds(self.scheduler.clock())

    def step(self) -> list[RequestDelta]:
        """Let an open step sample, launch the steps that can be launched, wait for the oldest step in flight. Return a
        delta for each request that got tokens or ended.

        An Exception of the executor ends the engine: each live request gets a delta with the finish reason "error". An
        interrupt (another BaseException, such as Ctrl-C) is raised. If it comes while the executor launches or waits,
        the engine remains usable and recomputes the steps in flight; otherwise it ends the engine.
        """
        try:
            self.note("begin", self._tickets)
            began = time.monotonic()
            self._settle()
            self._sample_open_step()
            self._launch()
            if not self._tickets:
                return self._idle()
            deltas = self._commit()
            self._last = time.monotonic() - began
            return self.scheduler.take_notices() + deltas
        except Exception as error:
            return self._end(error)
        except BaseException as interrupt:
            self._interrupted(interrupt)
            raise

    def _settle(self) -> None:
        """Wait for the steps that an interrupt left in flight."""
        self._in_executor = self._unsettled
        if self._unsettled:
            self.executor.settle()
            self._in_executor = self._unsettled = False

    def _sample_open_step(self) -> None:
        """Let the oldest step in flight sample, if it is open."""
        if self.scheduler.guided:
            self.scheduler.look()
            self._await_masks()
        if (masks := self.scheduler.guide()) is not None:
            self._in_executor = True
            self.executor.guide(self._tickets[0], masks)
            self._in_executor = False

    def _launch(self) -> None:
        """Plan and launch steps until `depth` are in flight, or no request can run."""
        while len(self._tickets) < self.executor.depth:
            plan = self.scheduler.next()
            self.note("plan", plan)
            if not plan.work:
                break
            self._in_executor = True
            self._tickets.append(self.executor.launch(plan))
            self._in_executor = False
            self.note("launch", self._tickets)

    def _commit(self) -> list[RequestDelta]:
        """Wait for the oldest step in flight, and return the deltas of its requests."""
        self._in_executor = True
        output = self.executor.wait(self._tickets.popleft())
        self._in_executor = False
        self.note("wait", self._tickets)
        deltas = self.scheduler.commit(output)
        self.note("commit", self.scheduler.has_work())
        return deltas

    def _idle(self) -> list[RequestDelta]:
        """Wait for masks if requests need them to run. Return the deltas of requests that ended without a step."""
        if self.scheduler.guided.left_out:
            self.pump(_IDLE_WAIT_SECONDS)
        elif self.scheduler.has_work():
            raise RuntimeError("requests are alive and none can run")
        return self.scheduler.take_notices()

    def _interrupted(self, interrupt: BaseException) -> None:
        """Drop the steps in flight if the executor was interrupted. Otherwise end the engine: the scheduler may be
        inconsistent.
        """
        if self._in_executor:
            self._tickets.clear()
            self.scheduler.rollback()
            self._unsettled = True
            self.note("forget", None)
        else:
            self._end(interrupt)

    def _await_masks(self) -> None:
        """Wait a short time for the masks that are expected soon."""
        scheduler, guided = self.scheduler, self.scheduler.guided
        self.pump(0.0)
        if not guided.awaited():
            return
        all_guided = all(request.guide is not None for request in scheduler.running)
        grace = 5 * self._grace if all_guided else min(max(self._grace, self._last / 4), 4 * self._grace)
        end = time.monotonic() + grace
        while guided.awaited() and (remaining := end - time.monotonic()) > 0:
            self.pump(remaining)
        if guided.awaited():
            guided.stop_waiting()

    def end(self, error: LlmcError) -> list[RequestDelta]:
        """End the engine and every live request with `error`, or the error of an earlier call. Return their deltas.

        Steps in flight are not waited for: closing the device does that.
        """
        self.error = self.error or error
        self._tickets.clear()
        return self.scheduler.end_all(self.error)

    def stats(self) -> dict[str, float]:
        """Return gauges: the running and waiting requests, the share of the KV cache in use (0 to 1), the maximum
        number of tokens of a step in which some requests decode and others compute their prompts, and the snapshots of
        states of recurrent layers.
        """
        scheduler, budget = self.scheduler, self.scheduler.step_budget
        snapshots = scheduler.snapshots
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": scheduler.page_usage,
            "step_token_budget": budget.latest if budget else scheduler.config.max_num_batched_tokens,
            "num_state_snapshots": snapshots.pool.num_used if snapshots else 0,
        }

    def _end(self, cause: BaseException) -> list[RequestDelta]:
        if isinstance(cause, LlmcError):
            return self.end(cause)
        text = f"the engine ended: {type(cause).__name__}: {str(cause)[:200]}"
        error = LlmcError("E608", text, "start a new one; if it happens again, report it with the step's log")
        error.__cause__ = cause
        return self.end(error)
