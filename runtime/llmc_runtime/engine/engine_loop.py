"""The engine process's loop without its sockets: Add messages become engine requests, steps become deltas to send.

The main thread of the engine process calls everything here; the heartbeat thread calls `EngineLoop.stats`.

A failure here affects only its own request: parameters are checked, the grammar is compiled in another process, and the
error is sent only to the request's client.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmc_runtime.engine.core import EngineCore
from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.input_processor import EngineRequest
from llmc_runtime.engine.messages import Add, Delta, delta_message, request_of
from llmc_runtime.format.errors import as_llmc_error
from llmc_runtime.grammar import GrammarGuide, Grammars, Opening
from llmc_runtime.metrics import CAPACITY, COMPILE_SECONDS, DEFERRED, Histogram, Stat
from llmc_runtime.sched.request import RequestDelta
from llmc_runtime.sched.sampling_params import MAX_N

_MAX_EARLY_ABORTS = 1 << 16


class _Compiling(NamedTuple):
    request: EngineRequest
    opening: Opening


class EngineLoop:
    """The requests of one engine, by number, which `core` runs. For `grammars` see EngineCore."""

    def __init__(self, engine: Engine, grammars: Callable[[], Grammars | None]) -> None:
        self._engine, self.core = engine, EngineCore(engine, grammars)
        self._compiling: deque[_Compiling] = deque()
        self._compiling_outputs: set[int] = set()  # numbers of the outputs of these requests
        self._refusals: list[Delta] = []  # refusals that have not been sent yet
        self._aborted: set[int] = set()  # outputs that were aborted before they arrived or while their grammar compiles
        self._last = -1  # the highest number that arrived
        self._compile_seconds = Histogram(COMPILE_SECONDS)
        self.invalid_messages = 0

    @property
    def busy(self) -> bool:
        """Whether step() has something to do."""
        return bool(self._refusals) or self._engine.has_work()

    @property
    def compiling(self) -> bool:
        """Whether grammars are being compiled, so that step() must be called from time to time."""
        return bool(self._compiling)

    def add(self, add: Add) -> None:
        """Queue a request. If it cannot run, the next step returns its error."""
        if not self._last < add.first < 1 << 62:
            self.invalid_messages += 1
            return
        n = add.params.get("n", 1)
        self._last = add.first + (n if type(n) is int and 1 <= n <= MAX_N else 1) - 1
        try:
            request = request_of(add)
            opening = self.core.open_grammar(request.params, request.tenant)
            if opening is None:
                self._submit(request, ())
            else:
                self._compiling.append(_Compiling(request, opening))
                self._compiling_outputs.update(request.numbers)
        except Exception as e:
            self._refuse(range(add.first, self._last + 1), e)

    def abort(self, ids: list[int]) -> None:
        """End these outputs. Those that have not arrived, or whose grammar is being compiled, will not start."""
        for number in map(int, self.core.abort(map(str, ids))):
            unstarted = number > self._last or number in self._compiling_outputs
            if unstarted and number >= 0 and len(self._aborted) < _MAX_EARLY_ABORTS:
                self._aborted.add(number)

    def step(self) -> list[Delta]:
        """Run a step of the engine if it has work. Return its deltas and the errors of refused requests."""
        if self._compiling:
            self._take_compiled()
        deltas, self._refusals = self._refusals, []
        if self._engine.has_work():
            deltas += [delta_message(delta) for delta in self._engine.step()]
        return deltas

    def stats(self) -> dict[str, Stat]:
        """Return counters and gauges of the engine and of the requests that wait here. Thread-safe."""
        stats: dict[str, Stat] = {**self._engine.counters.as_dict(), **self._engine.stats()}
        capacity, deferred = len(self._engine.scheduler.waiting), len(self._compiling)
        stats["num_requests_waiting"] = capacity + deferred
        stats["num_requests_waiting_by_reason"] = {CAPACITY: capacity, DEFERRED: deferred}
        stats["grammar_compilation_time_seconds"] = self._compile_seconds.as_list()
        return stats

    def _take_compiled(self) -> None:
        grammars = self.core.grammars()
        grammars.pump()
        now, later = time.monotonic(), deque[_Compiling]()
        for waiting in self._compiling:
            ended = bool(self._aborted) and self._aborted.issuperset(waiting.request.numbers)
            if not waiting.opening.done and not ended:
                later.append(waiting)
                continue
            self._compiling_outputs.difference_update(waiting.request.numbers)
            if ended:
                grammars.cancel(waiting.opening)
                self._aborted.difference_update(waiting.request.numbers)
                continue
            self._compile_seconds.add(now - waiting.opening.began)
            try:
                self._submit(waiting.request, waiting.opening.guides())
            except Exception as e:
                self._refuse(waiting.request.numbers, e)
        self._compiling = later

    def _submit(self, request: EngineRequest, guides: Sequence[GrammarGuide]) -> None:
        self.core.submit(request, guides, self._aborted)
        self._aborted.difference_update(request.numbers)

    def _refuse(self, numbers: range, error: Exception) -> None:
        self._aborted.difference_update(numbers)
        self._refusals.append(delta_message(RequestDelta(str(numbers[0]), [], "error", error=as_llmc_error(error))))
