"""Instances: several engine processes of one artifact, each with its Supervisor, behind the Supervisor's interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from llmc_runtime.engine.client import EosSource
from llmc_runtime.engine.control_rpc import RESET
from llmc_runtime.engine.input_processor import EngineRequest
from llmc_runtime.engine.messages import ControlReply, Open, Ready
from llmc_runtime.engine.output_processor import OutputProcessor
from llmc_runtime.engine.router import Load, Router
from llmc_runtime.engine.supervisor import DEAD, DRAINING, READY, STARTING, Supervisor
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.metrics import Stat, total_stats
from llmc_runtime.outputs import RequestState
from llmc_runtime.sched.request import RequestDelta


class MeteredOutputs(OutputProcessor):
    """The open requests of one of several engines, with their `load`."""

    def __init__(self, abort: Callable[[list[str]], object]) -> None:
        super().__init__(abort)
        self.load = Load()
        self._queued: dict[str, int] = {}  # prompt tokens of requests without a first token, by their first output

    def add(self, request: EngineRequest, state: RequestState) -> None:
        """Open a request (see OutputProcessor.add)."""
        super().add(request, state)
        self._queued[state.ids[0]] = request.uncached
        self.load.queued_tokens += request.uncached
        self.load.sequences += len(state.ids)

    def process(self, deltas: Iterable[RequestDelta]) -> None:
        """Add the deltas of a step to their requests."""
        arrived = tuple(deltas)
        for delta in arrived if self._queued else ():
            self._begin(delta.id)
        super().process(arrived)

    def drop(self, state: RequestState) -> None:
        """Close a request."""
        if state in self._states:
            self._begin(state.ids[0])
            self.load.sequences -= len(state.ids)
        super().drop(state)

    def _begin(self, output: str) -> None:
        self.load.queued_tokens -= self._queued.pop(output, 0)


class AllOutputs:
    """The open requests of all engines."""

    def __init__(self, outputs: Sequence[OutputProcessor]) -> None:
        self._outputs = outputs

    def __len__(self) -> int:
        return sum(map(len, self._outputs))

    def describe(self) -> list[dict[str, Any]]:
        """Return the open requests in order of arrival, each with the number of its `engine`."""
        rows = [{**row, "engine": i} for i, outputs in enumerate(self._outputs) for row in outputs.describe()]
        return sorted(rows, key=lambda row: -float(row["age"]))

    def abort(self, request_id: str) -> int:
        """Close the requests with this id. Return their number."""
        return sum(outputs.abort(request_id) for outputs in self._outputs)


class Instances:
    """Runs `args.data_parallel_size` engine processes. The arguments, attributes and owner are those of Supervisor.

    Requests are accepted while at least one engine is ready. If one ends, its requests fail, and it is restarted.
    """

    def __init__(
        self,
        command: Sequence[str],
        opening: Open,
        args: EngineArgs,
        step_timeout: float,
        say: Callable[[str], None],
        eos: EosSource | None = None,
    ) -> None:
        self.engines = tuple(
            Supervisor(
                command, msgspec.structs.replace(opening, engine=i), args, step_timeout,
                partial(_say_of, say, i), eos, MeteredOutputs,
            )
            for i in range(args.data_parallel_size)
        )  # fmt: skip
        self.outputs = AllOutputs([engine.outputs for engine in self.engines])
        self.gave_up = asyncio.Event()
        self._router: Router | None = None
        # Process ids of the engines whose caches the router estimates.
        self._pids: list[int | None] = [None] * len(self.engines)
        self._watch: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """READY while an engine is ready; DEAD once all are."""
        states = {engine.state for engine in self.engines}
        return next((state for state in (READY, DRAINING, STARTING) if state in states), DEAD)

    @property
    def error(self) -> LlmcError | None:
        """The last failure of an engine that is not ready."""
        return next((engine.error for engine in self.engines if engine.error is not None), None)

    @property
    def ready(self) -> Ready | None:
        """The limits in force: those of the engine with the smallest KV cache."""
        known = [engine.ready for engine in self.engines if engine.ready is not None]
        return min(known, key=lambda ready: ready.num_pages, default=None)

    @property
    def restarts(self) -> int:
        """The number of processes that were replaced."""
        return sum(engine.restarts for engine in self.engines)

    @property
    def failures(self) -> int:
        """The largest number of failures of an engine in the hour before its last one."""
        return max(engine.failures for engine in self.engines)

    @property
    def retry_in(self) -> float | None:
        """Seconds until the next process is started; None unless every engine waits for its next attempt."""
        waits = [engine.retry_in for engine in self.engines if not engine.gave_up.is_set()]
        return min((wait for wait in waits if wait is not None), default=None) if None not in waits else None

    @property
    def startup(self) -> dict[str, float]:
        """The durations of the start that took longest, in seconds."""
        return max((engine.startup for engine in self.engines), key=lambda startup: startup.get("total", 0.0))

    @property
    def pid(self) -> int | None:
        """The id of the first engine process that runs."""
        return next((engine.pid for engine in self.engines if engine.pid is not None), None)

    def stats(self) -> dict[str, Stat]:
        """Return the sums over all engines; kv_cache_usage_perc is the mean."""
        return total_stats([engine.stats() for engine in self.engines])

    async def start(self) -> Ready:
        """Open all engines at the same time. Raises the first error, and then none is left running."""
        tasks = [asyncio.create_task(engine.start()) for engine in self.engines]
        try:
            readies = await asyncio.gather(*tasks)
        except BaseException:
            await asyncio.shield(self.stop(0.0))
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        self._watch = asyncio.create_task(self._wait_given_up())
        small = min(readies, key=lambda ready: ready.num_pages)
        pages = small.num_pages if small.prefix_caching else 0
        self._router = Router(len(self.engines), small.page_size, pages, small.max_num_seqs)
        tokens, threads = sum(r.num_pages * r.page_size for r in readies), sum(r.threads for r in readies)
        parts = [f"KV caches of {tokens} tokens in all"]
        if threads:
            parts += [f"{threads} threads in all", "one mapping of the weights"]
        summary = f"{len(readies)} engines: {', '.join(parts)}; each: {small.summary}"
        return msgspec.structs.replace(small, summary=summary)

    async def _wait_given_up(self) -> None:
        for engine in self.engines:
            await engine.gave_up.wait()
        self.gave_up.set()

    def require(self) -> None:
        """Raise LlmcError, as Supervisor.require does, if no engine accepts requests."""
        if self.state != READY:
            state = self.state
            next(engine for engine in self.engines if engine.state == state).require()

    def route(self, request: EngineRequest) -> Supervisor:
        """Return the engine for a request, and set `request.uncached`. Raises LlmcError as `require` does."""
        self.require()
        assert self._router is not None  # since an engine is ready
        loads: dict[int, Load] = {}
        for i, engine in enumerate(self.engines):
            if engine.pid != self._pids[i]:
                self._router.forget(i)
                self._pids[i] = engine.pid
            if engine.state == READY and isinstance(engine.outputs, MeteredOutputs):
                loads[i] = engine.outputs.load
        reuses = request.params.prompt_logprobs is None
        ids, salt, tenant = request.prompt.ids, request.cache_salt, request.tenant
        chosen, request.uncached = self._router.choose(ids, salt, tenant, loads, reuses)
        return self.engines[chosen]

    async def call(self, method: str, seconds: float = 0.0) -> ControlReply:
        """Call a control RPC of the ready engines: a reset of all, done if all have done it; a recording of the first.

        Raises LlmcError as Supervisor.call does.
        """
        self.require()
        ready = [(i, engine) for i, engine in enumerate(self.engines) if engine.state == READY]
        if method != RESET:
            return await ready[0][1].call(method, seconds)
        replies = await asyncio.gather(*(engine.call(method, seconds) for _, engine in ready))
        for (i, _), reply in zip(ready, replies, strict=True):
            if reply.done and self._router is not None:
                self._router.forget(i)
        return next((reply for reply in replies if not reply.done), replies[0])

    async def restart(self, drain: float) -> None:
        """Restart one engine after another (see Supervisor.restart) while the others serve. Stop at the first error."""
        for engine in self.engines:
            await engine.restart(drain)

    async def stop(self, drain: float) -> None:
        """Stop all engines at the same time (see Supervisor.stop)."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(engine.stop(drain) for engine in self.engines))


def _say_of(say: Callable[[str], None], engine: int, line: str) -> None:
    say(f"engine {engine}: {line}")
