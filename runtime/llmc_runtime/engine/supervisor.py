"""Supervisor: keeps one engine process running, and replaces it when it ends or hangs, up to a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from llmc_runtime.engine.client import EngineClient, EosSource
from llmc_runtime.engine.input_processor import EngineRequest
from llmc_runtime.engine.messages import ControlReply, Delta, Heartbeat, Open, Ready, add_message, delta_of
from llmc_runtime.engine.output_processor import OutputProcessor
from llmc_runtime.engine_args import EngineArgs
from llmc_runtime.format.errors import LlmcError, as_llmc_error
from llmc_runtime.heartbeat import TICK_SECONDS
from llmc_runtime.metrics import Stat, add_stats, initial_stats

STARTING, READY, DRAINING, DEAD = "starting", "ready", "draining", "dead"
_FAILURE_SECONDS = 3600.0  # seconds after which a failure no longer counts
_STOP_SECONDS = 3.0  # seconds for an engine process to exit
_FIRST_INTERVAL = 1.0  # seconds until the first attempt beyond `max_restarts`
_MAX_DOUBLINGS = 20  # maximum doublings of the interval between two attempts
_CALL_SECONDS = 30.0  # seconds for a control RPC, including the steps before it


class Supervisor:
    """Runs one engine process at a time. If it ends, every open request fails with the error.

    Belongs to one event loop, in which the task `_supervise` checks the process ten times a second.

    opening:       the first message to each process
    step_timeout:  maximum duration of a step, in seconds
    say:           called with log lines
    eos:           see EngineClient.open
    outputs:       the open requests
    error:         the last failure
    ready:         the limits in force
    restarts:      number of processes that were replaced
    startup:       durations of the last start, in seconds
    gave_up:       set when the engine has failed too often
    pause:         see EngineClient
    """

    def __init__(
        self,
        command: Sequence[str],
        opening: Open,
        args: EngineArgs,
        step_timeout: float,
        say: Callable[[str], None],
        eos: EosSource | None = None,
        outputs: Callable[[Callable[[list[str]], None]], OutputProcessor] = OutputProcessor,
    ) -> None:
        self._command, self._opening, self._args = command, opening, args
        self._step_timeout, self._say, self._eos = step_timeout, say, eos
        self.outputs = outputs(self._abort)
        self.pause: Callable[[], float] = lambda: 0.0
        self._state, self.restarts = STARTING, 0
        self.error: LlmcError | None = None
        self.ready: Ready | None = None
        self.startup: dict[str, float] = {}
        self._past = initial_stats()  # counters of the previous processes
        self.gave_up = asyncio.Event()
        self._failures: list[float] = []  # times of the failures within the window
        self._beyond = 0  # failures in a row beyond `max_restarts`
        self._next_attempt: float | None = None  # time of the next attempt beyond `max_restarts`
        self._client: EngineClient | None = None
        self._drain_until: float | None = None  # time when a restart that was requested stops waiting for requests
        self._first_start: asyncio.Task[Ready] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """STARTING (also between processes and during `restart`), READY, DRAINING (refuses new requests) or DEAD."""
        if self._state != READY:
            return self._state
        lost = self._client is None or not self._client.alive
        return STARTING if lost or self._drain_until is not None else READY

    @property
    def engines(self) -> tuple[Supervisor, ...]:
        """This engine; Instances has several."""
        return (self,)

    def route(self, request: EngineRequest) -> Supervisor:
        """Return the engine for a request: this one. Instances chooses among several."""
        return self

    @property
    def failures(self) -> int:
        """The number of times that the engine ended or failed to open in the hour before the last failure."""
        return len(self._failures)

    @property
    def retry_in(self) -> float | None:
        """Seconds until the next process is started, after more than `max_restarts` failures; else None."""
        return None if self._next_attempt is None else max(0.0, self._next_attempt - time.monotonic())

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The engine's last heartbeat."""
        return None if self._client is None else self._client.heartbeat

    def stats(self) -> dict[str, Stat]:
        """Return the gauges of this process, at most a heartbeat old, and the counters of all processes."""
        return add_stats(self._past, {} if self.heartbeat is None else self.heartbeat.stats)

    @property
    def pid(self) -> int | None:
        """The id of the engine process."""
        return None if self._client is None else self._client.process.pid

    async def start(self) -> Ready:
        """Open the engine and supervise it. Raises LlmcError if it does not open, E663 after `stop`."""
        if self._state != STARTING:
            raise _closing()
        opening = self._first_start = asyncio.create_task(self._open())
        try:
            ready = await opening
        except BaseException as e:
            stopped, self._state = self._state != STARTING, DEAD
            self.error = e if isinstance(e, LlmcError) else None
            if stopped and isinstance(e, asyncio.CancelledError) and opening.cancelled() and not _task_cancelled():
                raise _closing() from None
            raise
        self._watch = asyncio.create_task(self._supervise())
        return ready

    def require(self) -> None:
        """Raise LlmcError if new requests are refused: E660 for now, E663 and E664 for good."""
        if self.state == STARTING:
            why = "is starting" if self.error is None else f"is being restarted: {self.error.cause}"
            raise LlmcError("E660", f"the engine {why}", "send the request again in a moment")
        if self.state == DRAINING:
            raise _closing()
        if self.state == DEAD:
            raise self.error or _closing()

    def add(self, request: EngineRequest) -> None:
        """Submit a request. Raises LlmcError as `require` does, and E601 if it cannot be sent."""
        self.require()
        if self._client is not None:
            self._client.add(add_message(request))

    async def call(self, method: str, seconds: float = 0.0) -> ControlReply:
        """Call a control RPC (see ControlRequest). Raises LlmcError as `require` does, E661, E662."""
        self.require()
        assert self._client is not None  # since the engine is ready
        return await self._client.call(method, seconds, _CALL_SECONDS)

    async def restart(self, drain: float) -> None:
        """Replace the process by a new one: refuse new requests (E660), wait up to `drain` seconds for open ones, fail
        the rest. Raises LlmcError as `require` does if the engine is not ready, or does not open again at once.
        """
        self.require()
        self._drain_until = time.monotonic() + drain
        while self._drain_until is not None and self._watch is not None:
            await asyncio.sleep(TICK_SECONDS)
        self.require()

    async def stop(self, drain: float) -> None:
        """Refuse new requests, wait up to `drain` seconds for open ones, fail the rest, end the process."""
        if self._state == DEAD and self._watch is None:
            return
        was_ready = self._state == READY
        self._state = DRAINING
        deadline = time.monotonic() + drain
        while was_ready and len(self.outputs) and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for task in (self._first_start, self._watch):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._watch = None
        self.outputs.fail_all(_closing())
        client, self._client = self._client, None
        if client is not None:
            client.fail_calls(_closing())
            await client.stop(_STOP_SECONDS)
        self._state = DEAD
        self.error = self.error or _closing()

    def _abort(self, ids: list[str]) -> None:
        if self._client is not None:
            self._client.abort([*map(int, ids)])

    def _take(self, deltas: list[Delta]) -> None:
        self.outputs.process(map(delta_of, deltas))

    async def _open(self) -> Ready:
        heartbeat = min(0.2, self._args.heartbeat_timeout / 5)
        began = time.monotonic()
        client = EngineClient(self._command, heartbeat, self._take, self._say, lambda: self.pause())
        try:
            self.ready = await client.open(self._opening, self._args.start_timeout, self._eos)
        except BaseException:
            await asyncio.shield(client.kill())
            raise
        self._client, self._state = client, READY
        self.error = self._next_attempt = None
        total, stages = time.monotonic() - began, self.ready.stages
        self.startup = {"total": total, "process": max(0.0, total - sum(stages.values())), **stages}
        return self.ready

    async def _supervise(self) -> None:
        last = time.monotonic()
        while self._client is not None:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            error = self._client.check(now - last, self._args.heartbeat_timeout, self._step_timeout)
            last = now
            if error is None and not self._drained(now):
                continue
            try:
                await (self._renew() if error is None else self._replace(error))
            finally:
                self._drain_until = None
            last = time.monotonic()

    def _drained(self, now: float) -> bool:
        """Whether a restart was requested, and open requests have ended or had their time."""
        return self._drain_until is not None and (not len(self.outputs) or now > self._drain_until)

    async def _renew(self) -> None:
        """Replace a process that works, as `restart` requests."""
        self._past = self.stats()
        client, self._client = self._client, None
        assert client is not None
        error = LlmcError("E660", "the engine is restarted", "send the request again in a moment")
        self.outputs.fail_all(error)
        client.fail_calls(error)
        await asyncio.shield(client.stop(_STOP_SECONDS))
        try:
            await self._open()
            self._say("the engine process was restarted as requested")
        except Exception as e:
            self._state, self.error = STARTING, as_llmc_error(e)
            self._say(f"the engine did not open again: {self.error.cause}")
            await self._reopen()

    async def _replace(self, error: LlmcError) -> None:
        """Fail all requests, kill the process, and start another one unless it has failed too often."""
        closing = self._state == DRAINING
        before, self._past = self._past, self.stats()
        client, self._client = self._client, None
        self._state, self.error = (DRAINING if closing else STARTING), error
        if client is not None:
            await asyncio.shield(client.kill())
            if client.heartbeat is not None:
                self._past = add_stats(before, client.heartbeat.stats)  # a newer one may have arrived meanwhile
            client.fail_calls(error)
        failed = self.outputs.fail_all(error)
        self._say(f"{error.cause}; failed requests: {failed}")
        if not closing:
            await self._reopen()

    async def _reopen(self) -> None:
        """Start a new process, after a delay, until one opens or the engine has failed too often."""
        while True:
            delay = self._delay()
            if delay is None:
                self._give_up()
                return
            if self._next_attempt is not None:
                self._say(f"the engine ended {self.failures} times within an hour; the next try is in {delay:g} s")
            await asyncio.sleep(delay)
            self.restarts += 1
            try:
                await self._open()
                self._say(f"the engine process was replaced ({self.restarts} so far)")
                return
            except Exception as e:
                self.error = as_llmc_error(e)
                self._say(f"the engine did not open again: {self.error.cause}")

    def _delay(self) -> float | None:
        """Return the seconds until the next attempt; None if there is none."""
        now, args = time.monotonic(), self._args
        self._failures = [*(t for t in self._failures if now - t < _FAILURE_SECONDS), now]
        self._beyond = self._beyond + 1 if len(self._failures) > args.max_restarts else 0
        if not self._beyond:
            return args.restart_delay * 2.0 ** (len(self._failures) - 1)
        if args.max_restart_delay is None:
            return None
        delay = min(_FIRST_INTERVAL * 2.0 ** min(self._beyond - 1, _MAX_DOUBLINGS), args.max_restart_delay)
        self._next_attempt = now + delay
        return delay

    def _give_up(self) -> None:
        cause = "" if self.error is None else self.error.cause
        text = f"the engine ended {self.failures} times within an hour; the last error: {cause}"
        self.error = LlmcError("E664", text, "find the cause in the engine's messages on stderr, then start again")
        self._state = DEAD
        self._say(text)
        self.gave_up.set()


def _task_cancelled() -> bool:
    """Whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _closing() -> LlmcError:
    return LlmcError("E663", "the engine is shutting down", "send the request to another server, or later")
