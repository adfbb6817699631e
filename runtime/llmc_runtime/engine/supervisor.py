"""Keeps one engine process running: opens it, looks after it, replaces it when it ends or hangs, up to a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from llmc_runtime.engine.client import TICK, Channel
from llmc_runtime.engine.client_requests import Requests
from llmc_runtime.engine.control_rpc import Asks
from llmc_runtime.engine.messages import Add, Open, Pulse, Ready, Reply
from llmc_runtime.engine_options import EngineArgs
from llmc_runtime.format.errors import LlmcError, as_told
from llmc_runtime.metrics import Stat, added, nothing

STARTING, READY, DRAINING, DEAD = "starting", "ready", "draining", "dead"
_FORGIVEN = 3600.0  # seconds after which a failure no longer counts
_STOP = 3.0  # seconds that an engine process has for its end
_MOST_DOUBLINGS = 20  # of the interval between two tries
_PATIENCE = 30.0  # seconds that an answer may take, steps in front of it included


class Supervisor:
    """One engine process at a time, of one event loop. Whatever it loses, every open request is told.

    `state`: "starting" (also between two processes), "ready", "draining" (nothing new is taken), "dead"; `error`: the
    last failure; `restarts`: processes that were replaced; `gave_up` is set after the last of them has failed.
    """

    def __init__(
        self, command: Sequence[str], wanted: Open, args: EngineArgs, step_timeout: float, say: Callable[[str], None]
    ) -> None:
        self._command, self._wanted, self._args = command, wanted, args
        self._step_timeout, self._say = step_timeout, say
        self.requests = Requests(self._abort)
        self._asks = Asks()
        self._state, self.restarts = STARTING, 0
        self.error: LlmcError | None = None
        self.ready: Ready | None = None
        self.startup: dict[str, float] = {}  # seconds of each part of the last start
        self._past = nothing()  # what the engines before this one counted
        self.gave_up = asyncio.Event()
        self._failures: list[float] = []
        self._beyond = 0  # failures in a row beyond `max_restarts`
        self._next_try: float | None = None  # when, while the supervisor waits beyond `max_restarts`
        self._channel: Channel | None = None
        self._opening: asyncio.Task[Ready] | None = None  # the first
        self._watch: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """How it is now."""
        lost = self._state == READY and (self._channel is None or not self._channel.alive)
        return STARTING if lost else self._state

    @property
    def failures(self) -> int:
        """Times that the engine has ended, or not opened, within the hour before the last of them."""
        return len(self._failures)

    @property
    def retry_in(self) -> float | None:
        """Seconds until the next process is started, once more than `max_restarts` have failed; else None."""
        return None if self._next_try is None else max(0.0, self._next_try - time.monotonic())

    @property
    def pulse(self) -> Pulse | None:
        """The engine's last sign of life."""
        return None if self._channel is None else self._channel.pulse

    def stats(self) -> dict[str, Stat]:
        """The figures of this engine, a heartbeat old at most, its counters with those of the engines before it."""
        return added(self._past, {} if self.pulse is None else self.pulse.stats)

    @property
    def pid(self) -> int | None:
        """The engine process."""
        return None if self._channel is None else self._channel.process.pid

    async def start(self) -> Ready:
        """Open the engine and look after it from now on. LlmcError where it does not open, E663 once it was stopped."""
        if self._state != STARTING:
            raise _closing()
        opening = self._opening = asyncio.create_task(self._open())
        try:
            ready = await opening
        except BaseException as e:
            stopped, self._state = self._state != STARTING, DEAD
            self.error = e if isinstance(e, LlmcError) else None
            if stopped and isinstance(e, asyncio.CancelledError) and opening.cancelled() and not _cancelled():
                raise _closing() from None
            raise
        self._watch = asyncio.create_task(self._look_after())
        return ready

    def require(self) -> None:
        """LlmcError where nothing new is taken: E660 for now, E663 and E664 for good."""
        if self.state == STARTING:
            why = "is starting" if self.error is None else f"is starting again: {self.error.cause}"
            raise LlmcError("E660", f"the engine {why}", "send the request again in a moment")
        if self.state == DRAINING:
            raise _closing()
        if self.state == DEAD:
            raise self.error or _closing()

    def add(self, add: Add) -> None:
        """Send a request. LlmcError as `require`, and E601 where it cannot be sent."""
        self.require()
        if self._channel is not None:
            self._channel.add(add)

    async def ask(self, what: str, seconds: float = 0.0) -> Reply:
        """Ask the engine something beside all requests (see `Ask`). LlmcError as `require`, E661, E662."""
        self.require()
        assert self._channel is not None  # of an engine that is ready
        return await self._asks.ask(self._channel.ask, what, seconds, _PATIENCE)

    async def stop(self, drain: float) -> None:
        """Take nothing new, let open requests go on for `drain` seconds, tell the others, end the process."""
        if self._state == DEAD and self._watch is None:
            return
        was_ready = self._state == READY
        self._state = DRAINING
        deadline = time.monotonic() + drain
        while was_ready and len(self.requests) and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for task in (self._opening, self._watch):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._watch = None
        self.requests.fail_all(_closing())
        self._asks.fail_all(_closing())
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.stop(_STOP)
        self._state = DEAD
        self.error = self.error or _closing()

    def _abort(self, ids: list[int]) -> None:
        if self._channel is not None:
            self._channel.abort(ids)

    async def _open(self) -> Ready:
        heartbeat = min(0.2, self._args.heartbeat_timeout / 5)
        began = time.monotonic()
        channel = Channel(self._command, heartbeat, self.requests.take, self._asks.take, self._say)
        try:
            self.ready = await channel.open(self._wanted, self._args.start_timeout)
        except BaseException:
            await asyncio.shield(channel.kill())
            raise
        self._channel, self._state, self.error, self._next_try = channel, READY, None, None
        total, stages = time.monotonic() - began, self.ready.stages
        self.startup = {"total": total, "process": max(0.0, total - sum(stages.values())), **stages}
        return self.ready

    async def _look_after(self) -> None:
        last = time.monotonic()
        while self._channel is not None:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            error = self._channel.check(now - last, self._args.heartbeat_timeout, self._step_timeout)
            last = now
            if error is not None:
                await self._replace(error)
                last = time.monotonic()

    async def _replace(self, error: LlmcError) -> None:
        """Tell everybody, end what is left of the process, and start another one unless that was too often."""
        closing = self._state == DRAINING
        before, self._past = self._past, self.stats()
        channel, self._channel = self._channel, None
        self._state, self.error = (DRAINING if closing else STARTING), error
        if channel is not None:
            await asyncio.shield(channel.kill())
            if channel.pulse is not None:
                self._past = added(before, channel.pulse.stats)  # its last words may have been newer
        told = self.requests.fail_all(error)
        self._asks.fail_all(error)
        self._say(f"{error.cause}; requests that were told: {told}")
        while not closing:
            delay = self._delay()
            if delay is None:
                self._give_up()
                return
            if self._next_try is not None:
                self._say(f"the engine ended {self.failures} times within an hour; the next try is in {delay:g} s")
            await asyncio.sleep(delay)
            self.restarts += 1
            try:
                await self._open()
                self._say(f"the engine process was replaced ({self.restarts} so far)")
                return
            except Exception as e:
                self.error = as_told(e)
                self._say(f"the engine did not open again: {self.error.cause}")

    def _delay(self) -> float | None:
        """Seconds until the next try; None: there is none."""
        now, args = time.monotonic(), self._args
        self._failures = [*(t for t in self._failures if now - t < _FORGIVEN), now]
        self._beyond = self._beyond + 1 if len(self._failures) > args.max_restarts else 0
        if not self._beyond:
            return args.restart_delay * 2.0 ** (len(self._failures) - 1)
        if args.max_restart_delay is None:
            return None
        delay = min(2.0 ** min(self._beyond - 1, _MOST_DOUBLINGS), args.max_restart_delay)
        self._next_try = now + delay
        return delay

    def _give_up(self) -> None:
        cause = "" if self.error is None else self.error.cause
        words = f"the engine ended {self.failures} times within an hour, the last time so: {cause}"
        self.error = LlmcError("E664", words, "start again when the cause is found; its messages are on stderr")
        self._state = DEAD
        self._say(words)
        self.gave_up.set()


def _cancelled() -> bool:
    """Whether who waits here was told to stop waiting."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _closing() -> LlmcError:
    return LlmcError("E663", "the engine is shutting down", "send the request to another server, or later")
