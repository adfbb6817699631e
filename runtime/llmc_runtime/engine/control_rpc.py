"""Questions to a running engine beside its requests: who waits for an answer, how the engine finds it. No sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.messages import Ask, Reply
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.trace import Recorder, overhear

RECORD, RESET = "record", "reset_prefix_cache"
MOST_ROWS = 1 << 16  # of a recording: about 13,000 steps, 5 MB
LONGEST = 60.0  # seconds of a recording


class Asks:
    """The front's side: questions that wait for their answers."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next = 0

    async def ask(self, send: Callable[[Ask], None], what: str, seconds: float, patience: float) -> Reply:
        """The answer, which takes `seconds` and at most `patience` more. LlmcError E662, or why the engine ended."""
        number, self._next = self._next, self._next + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            send(Ask(number, what, seconds))
            async with asyncio.timeout(seconds + patience):
                return await future
        except TimeoutError:
            cause = f"the engine did not answer within {seconds + patience:g} s"
            raise LlmcError("E662", cause, "ask again when its step has ended") from None
        finally:
            del self._waiting[number]

    def take(self, reply: Reply) -> None:
        """An answer has come."""
        future = self._waiting.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: LlmcError) -> None:
        """There will be no answers."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


class Answers:
    """The engine's side, called between two steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recording: tuple[Ask, float, Recorder, Callable[[], None]] | None = None

    def take(self, ask: Ask) -> Reply | None:
        """The answer, or None where it is found later. One recording at a time."""
        if ask.what == RECORD and self._recording is None:
            seconds = min(max(ask.seconds, 0.0), LONGEST)
            self._recording = (ask, time.monotonic() + seconds, *overhear(self._engine, MOST_ROWS))
            return None
        return Reply(ask.number, ask.what == RESET and self._engine.scheduler.reset_prefix_cache(), [])

    def due(self) -> Reply | None:
        """An answer whose time has come."""
        if self._recording is None or time.monotonic() < self._recording[1]:
            return None
        (ask, _, recorder, stop), self._recording = self._recording, None
        stop()
        return Reply(ask.number, True, recorder.rows())

    @property
    def patience(self) -> int | None:
        """Milliseconds until something is due; None: nothing is."""
        return None if self._recording is None else max(1, int((self._recording[1] - time.monotonic()) * 1000) + 1)
