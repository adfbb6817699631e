"""The engine: plan, run, commit. It owns the failure of a whole step; no scheduling, no device, no text.

A request that cannot run is refused by `add` and touches nobody. An executor that fails ends the engine: every live
request is told once, and nothing is accepted any more.
"""

from __future__ import annotations

from typing import Protocol

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.metrics import Counters
from llmc_runtime.sched.request import Request, RequestDelta
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.step import Step, StepOutput


class Executor(Protocol):
    """Whatever runs steps: exec.executor on a real device, device.fake in tests."""

    def run(self, step: Step) -> StepOutput:
        """Apply the step's diffs, compute its rows, sample where asked."""


class Engine:
    """One scheduler over one executor, for one thread."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.error: LlmcError | None = None  # why the engine ended; None while it lives

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
        """Run one step; what it did for each request that got tokens or ended.

        An Exception of the executor becomes one "error" delta per live request, and ends the engine. An interrupt (a
        BaseException, such as Ctrl-C) while the executor runs passes through and costs only recomputation: the engine
        may be used on. At any other moment of a step it ends the engine.
        """
        running = False
        try:
            plan = self.scheduler.next()
            if not plan.work:
                if self.scheduler.has_work():
                    raise RuntimeError("requests are alive and none can run")
                self.scheduler.rollback()
                return []
            running = True
            output = self.executor.run(plan)
            running = False
            return self.scheduler.commit(output)
        except Exception as error:
            return self._end(error)
        except BaseException as interrupt:
            if running:
                self.scheduler.rollback()
            else:
                self._end(interrupt)
            raise

    def end(self, error: LlmcError) -> list[RequestDelta]:
        """End the engine and every live request with `error`: each is told once. The first reason stays."""
        self.error = self.error or error
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
