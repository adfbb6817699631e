"""An engine with a scheduler, the fake device and the oracle, for tests that execute single steps."""

from __future__ import annotations

from typing import Any

from llmc_runtime.engine.engine import Engine
from llmc_runtime.sched.request import Request, RequestDelta
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.sched.scheduler import Scheduler
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.sched.step import Step, StepOutput

from tests.runtime.audit import audit
from tests.runtime.oracle import Expected
from tests.runtime.simulator import make_device

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


class OneByOne:
    """An executor of depth 1, implemented by a method `run`."""

    depth = 1

    def launch(self, step: Any) -> Any:
        """Return the step as its ticket, without running it."""
        return step

    def wait(self, ticket: Any) -> Any:
        """Run the step."""
        return self.run(ticket)

    def settle(self) -> None:
        """Do nothing, as no step is ever in flight."""

    def run(self, step: Any) -> Any:
        """Return the step's output."""
        raise NotImplementedError


class Rig:
    """An engine whose plans are recorded and whose tokens are checked. It is the executor in front of the fake
    device.
    """

    def __init__(self, depth: int = 1, **sizes: Any) -> None:
        defaults: dict[str, Any] = {
            "num_pages": 64,
            "page_size": 4,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "vocab_size": 1000,
            "watermark": 0.0,
        }
        self.config = SchedulerConfig(**{**defaults, **sizes})
        self.depth, self.device = depth, make_device(self.config, depth)
        self.scheduler = Scheduler(self.config, lambda: 7)
        self.engine = Engine(self.scheduler, self)
        self.expected: dict[str, Expected] = {}
        self.plans: list[Step] = []

    def launch(self, step: Step) -> Any:
        """Record the plan and pass it on."""
        self.plans.append(step)
        return self.device.launch(step)

    def guide(self, ticket: Any, masks: Any) -> None:
        """Pass the masks on."""
        self.device.guide(ticket, masks)

    def wait(self, ticket: Any) -> StepOutput:
        """Pass the call on."""
        return self.device.wait(ticket)

    def settle(self) -> None:
        """Pass the call on."""
        self.device.settle()

    def add(self, name: str, prompt: int | list[int], priority: int = 0, salt: str = "", **params: Any) -> Request:
        """Queue a request. An integer `prompt` is the length of a unique prompt."""
        if isinstance(prompt, int):
            start = 100 * len(name) + sum(map(ord, name))
            prompt = [(start + 3 * i) % self.config.vocab_size for i in range(prompt)]
        request = Request(name, prompt, SamplingParams(**{**GREEDY, **params}), priority, salt)
        self.engine.add(request)
        self.expected[name] = Expected(request, self.config)
        return request

    def abort(self, name: str) -> None:
        """Abort a live request."""
        assert self.engine.abort(name)
        del self.expected[name]

    def step(self) -> dict[str, RequestDelta]:
        """Run a step, check it against the oracle, and audit the state. Returns the deltas by request."""
        deltas = {delta.id: delta for delta in self.engine.step()}
        assert self.engine.error is None, str(self.engine.error)
        for name, delta in deltas.items():
            token, finish, stop = self.expected[name].next()
            assert (delta.new_token_ids, delta.finish_reason, delta.stop_reason) == ([token], finish, stop)
            if finish:
                del self.expected[name]
        audit(self.scheduler, self.device, self.expected)
        return deltas

    def drain(self) -> list[str]:
        """Run steps until idle. Returns the requests in the order in which they ended."""
        ended = []
        while self.engine.has_work():
            ended += [name for name, delta in self.step().items() if delta.finish_reason]
        assert self.scheduler.pool.num_used == 0 and len(self.scheduler.free_rows) == self.config.max_num_seqs
        return ended

    def counts(self) -> dict[str, int]:
        """Return the number of tokens that the last plan assigned to each request that still runs."""
        rows = {request.row: request.id for request in self.scheduler.running}
        return {rows[work.row]: work.num_tokens for work in self.plans[-1].work if work.row in rows}

    def running(self) -> list[str]:
        """Return the names of the running requests, in order."""
        return [request.id for request in self.scheduler.running]

    def waiting(self) -> list[str]:
        """Return the names of the waiting requests, in order."""
        return [request.id for request in self.scheduler.waiting]
