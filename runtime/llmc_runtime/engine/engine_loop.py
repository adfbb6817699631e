"""The engine process's loop without its sockets: messages become requests of the engine, steps become deltas to send.

A request that fails here fails alone: its parameters are checked, its grammar is compiled in another process, and
errors are sent to its client only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmc_runtime.engine.engine import Engine
from llmc_runtime.engine.messages import Add, Delta, fault_of, sampling_of, sent
from llmc_runtime.engine.request_table import one_of
from llmc_runtime.format.errors import LlmcError, as_told
from llmc_runtime.grammar import GrammarGuide, Grammars, Opening
from llmc_runtime.metrics import COMPILE_SECONDS, Sketch, Stat
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import MAX_N, SamplingParams

_MOST_GONE = 1 << 16  # aborts that came before their request


class _Compiling(NamedTuple):
    add: Add
    params: SamplingParams
    opening: Opening


class Loop:
    """Requests of one engine by number. `grammars` gives the grammars of its vocabulary, None where there are none; it
    is called when they are first needed."""

    def __init__(self, engine: Engine, grammars: Callable[[], Grammars | None]) -> None:
        self._engine, self._open_grammars = engine, grammars
        self._grammars: Grammars | None = None
        self._compiling: deque[_Compiling] = deque()
        self._told: list[Delta] = []  # refusals that were not sent yet
        self._gone: set[int] = set()  # aborted, not arrived
        self._last = -1  # the highest number that arrived
        self._compiled = Sketch(COMPILE_SECONDS)  # seconds that requests waited for their grammars
        self.nonsense = 0  # messages that cannot be meant

    @property
    def busy(self) -> bool:
        """step() is worth calling."""
        return bool(self._told) or self._engine.has_work()

    @property
    def waiting(self) -> bool:
        """Some grammar is being compiled: step() is worth calling now and then."""
        return bool(self._compiling)

    def prepare(self) -> str:
        """Build the vocabulary of grammars now; why that cannot be, else an empty text."""
        try:
            return self._need_grammars().prepare()
        except LlmcError as e:
            return e.cause

    def add(self, add: Add) -> None:
        """Queue a request; where it cannot run, the next step says why."""
        if not self._last < add.first < 1 << 62:
            self.nonsense += 1
            return
        n = add.params.get("n", 1)
        self._last = add.first + (n if type(n) is int and 1 <= n <= MAX_N else 1) - 1
        try:
            params = sampling_of(add.params)
            wanted = params.structured_outputs
            if wanted is None:
                self._start(add, params, ())
                return
            opening = self._need_grammars().open(wanted, add.tenant, params.n)
            self._compiling.append(_Compiling(add, params, opening))
        except Exception as e:
            self._refuse(add, e)

    def abort(self, ids: list[int]) -> None:
        """End these outputs; those that have not arrived will not start."""
        for number in ids:
            arrived = number <= self._last
            if arrived and self._engine.abort(str(number)):
                continue
            unborn = not arrived or any(0 <= number - one.add.first < one.params.n for one in self._compiling)
            if unborn and number >= 0 and len(self._gone) < _MOST_GONE:
                self._gone.add(number)

    def step(self) -> list[Delta]:
        """One step of the engine where it has work, and what has to be said."""
        if self._compiling:
            self._take_compiled()
        deltas, self._told = self._told, []
        if self._engine.has_work():
            deltas += [sent(delta) for delta in self._engine.step()]
        return deltas

    def stats(self) -> dict[str, Stat]:
        """Those of the engine, and of what waits here; asked from any thread."""
        stats: dict[str, Stat] = {**self._engine.counters.as_dict(), **self._engine.stats()}
        capacity, deferred = len(self._engine.scheduler.waiting), len(self._compiling)
        stats["num_requests_waiting"] = capacity + deferred
        stats["num_requests_waiting_by_reason"] = {"capacity": capacity, "deferred": deferred}
        stats["grammar_compilation_time_seconds"] = self._compiled.told()
        return stats

    @property
    def grammars_fd(self) -> int | None:
        """A descriptor that can be read when a grammar process has answered; None: there are none."""
        return None if self._grammars is None else self._grammars.fileno()

    def close(self) -> None:
        """End the grammar processes."""
        if self._grammars is not None:
            self._grammars.close()

    def _take_compiled(self) -> None:
        self._need_grammars().pump()
        now, later = time.monotonic(), deque[_Compiling]()
        for one in self._compiling:
            if not one.opening.done:
                later.append(one)
                continue
            self._compiled.add(now - one.opening.began)
            try:
                self._start(one.add, one.params, one.opening.guides())
            except Exception as e:
                self._refuse(one.add, e)
        self._compiling = later

    def _start(self, add: Add, params: SamplingParams, guides: Sequence[GrammarGuide]) -> None:
        """All outputs of a request, or none: LlmcError. Aborted ones are left out."""
        numbers = range(add.first, add.first + params.n)
        leader = None
        try:
            for i, number in enumerate(numbers):
                guide = guides[i] if guides else None
                if number in self._gone:
                    self._gone.discard(number)
                    if guide is not None:
                        guide.close()
                    continue
                request = Request(
                    str(number),
                    add.prompt,
                    one_of(params, i),
                    add.priority,
                    add.cache_salt,
                    add.bad_words,
                    guide,
                    leader,
                    add.tenant,
                )
                self._engine.add(request)
                leader = leader or request
        except BaseException:
            for number in numbers:
                self._engine.abort(str(number))
            for guide in guides:
                guide.close()
            raise

    def _need_grammars(self) -> Grammars:
        if self._grammars is None:
            self._grammars = self._open_grammars()
            if self._grammars is not None:
                self._engine.pump = self._grammars.pump
        if self._grammars is None:
            cause = "structured outputs need the tokenizer, which the artifact lacks"
            raise LlmcError("E620", cause, "use allowed_token_ids or logit_bias")
        return self._grammars

    def _refuse(self, add: Add, error: Exception) -> None:
        self._gone.difference_update(range(add.first, self._last + 1))
        fault = fault_of(as_told(error))
        self._told.append(Delta(add.first, [], "error", None, None, 0, fault, None, False))
