"""The engine's side of the grammar processes: schedules compilations and connects guides to workers."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from llmc_runtime.format.errors import LlmcError, llm_closed
from llmc_runtime.format.install_command import install_command
from llmc_runtime.grammar.definition import Definition
from llmc_runtime.grammar.guide import GrammarGuide, Opening
from llmc_runtime.grammar.limits import MAX_EAGER_GUIDES, MAX_GUIDES, MAX_REFUSALS, QUEUE_SECONDS, VOCABULARY_SECONDS
from llmc_runtime.grammar.worker_pool import Grammar, Worker, WorkerPool
from llmc_runtime.sched.structured_outputs import StructuredOutputsParams
from llmc_runtime.text.tokenizer import Tokenizer

_TIDY_SECONDS = 0.05  # seconds between checks for timeouts


class Grammars:
    """The grammars of one vocabulary. Thread-safe.

    `tokenizer` is a Tokenizer or the path of a tokenizer's folder, and `eos` are the end-of-sequence tokens. The host
    process starts with the first grammar. A grammar is compiled once per tenant, and kept while it is in use and for
    some time after.
    """

    def __init__(self, tokenizer: Tokenizer | Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._lock = threading.RLock()
        self._workers = WorkerPool(tokenizer, vocab_size, eos, self._worker_changed)
        self._grammars: dict[tuple[str, bytes], Grammar] = {}
        self._refused: OrderedDict[tuple[str, bytes], LlmcError] = OrderedDict()
        self._tidied, self._closed = 0.0, False

    def prepare(self) -> str:
        """Start the host and wait until it has built the vocabulary, which takes seconds if the vocabulary is large.

        Returns "" on success, else the reason of the failure.
        """
        try:
            _check_library()
            with self._lock:
                self._workers.start()
            end = time.monotonic() + VOCABULARY_SECONDS
            while not self._workers.ready and time.monotonic() < end:
                self.pump(_TIDY_SECONDS)
                if self._workers.broken is not None:
                    return self._workers.broken.cause
        except LlmcError as e:
            return e.cause
        return "" if self._workers.ready else f"the vocabulary was not built within {VOCABULARY_SECONDS:g} s"

    def open(self, outputs: StructuredOutputsParams, tenant: str = "", count: int = 1) -> Opening:
        """Request `count` guides of a grammar, compiling it if necessary.

        Raises LlmcError E608 after `close`, E650 if llguidance is not installed, E651 if the grammar was rejected
        before, and E100 if the host process cannot be started.
        """
        _check_library()
        definition = Definition.of(outputs).encode()
        key = (tenant, hashlib.sha256(definition).digest())
        with self._lock:
            if self._closed:
                raise llm_closed()
            if (refusal := self._refused.get(key)) is not None:
                self._refused.move_to_end(key)
                raise refusal
            self._workers.start()
            grammar = self._grammars.get(key)
            if grammar is None:
                grammar = self._grammars[key] = Grammar(tenant, key[1], outputs.kind, definition)
            opening = Opening(count, key)
            grammar.openings.append(opening)
            self._serve(grammar)
            self._workers.begin()
        return opening

    def wait(self, opening: Opening) -> list[GrammarGuide]:
        """Block until the guides are ready and return them. Raises the errors of `Opening.guides`.

        An interrupt cancels the opening.
        """
        try:
            while not opening.done:
                self.pump(_TIDY_SECONDS)
        except BaseException:
            self.cancel(opening)
            raise
        with self._lock:
            return opening.guides()

    def cancel(self, opening: Opening) -> None:
        """Release an opening whose request has ended. Its grammar is compiled only for others that wait for it."""
        with self._lock:
            opening.close()
            grammar = self._grammars.get(opening.key)
            if grammar is None or opening not in grammar.openings:
                return
            grammar.openings.remove(opening)
            if not grammar.openings:
                self._workers.forget(grammar)
                self._serve(grammar)

    def pump(self, seconds: float = 0.0) -> None:
        """Process the messages of the grammar processes, waiting up to `seconds` for the first one."""
        events = self._workers.select(seconds)
        with self._lock:
            for fd in events:
                self._workers.read(fd)
            now = time.monotonic()
            if now >= self._tidied + _TIDY_SECONDS:
                self._tidied = now
                self._tidy(now)
            self._workers.begin()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `pump` has messages to process."""
        return self._workers.fileno()

    def close(self) -> None:
        """End all processes. Pending openings fail with E608."""
        with self._lock:
            self._closed = True
            self._end_all(llm_closed())
            self._workers.close()

    def _worker_changed(self, grammar: Grammar, error: LlmcError | None) -> None:
        """Handle that a worker of the grammar has compiled it (`error` is None) or has ended (see WorkerPool)."""
        if error is not None:
            if error.code == "E651":
                self._refused[grammar.tenant, grammar.digest] = error
                while len(self._refused) > MAX_REFUSALS:
                    self._refused.popitem(last=False)
            grammar.fail(error)
        self._serve(grammar)

    def _serve(self, grammar: Grammar) -> None:
        """Assign guides to the grammar's openings, or queue a worker for it. A grammar with neither is forgotten."""
        ready = [worker for worker in grammar.workers if worker.compiled]
        while ready and grammar.openings:
            opening = grammar.openings.popleft()
            eager = self._workers.guides < MAX_EAGER_GUIDES
            guides = [self._workers.guide(min(ready, key=_load)) for _ in range(opening.count)]
            if eager:
                for guide in guides:
                    guide.start()
            opening.add(guides)
        if self._needs_worker(grammar, ready):
            self._workers.add(grammar)
        if not grammar.workers and not grammar.openings:
            self._grammars.pop((grammar.tenant, grammar.digest), None)

    def _needs_worker(self, grammar: Grammar, ready: Sequence[Worker]) -> bool:
        """Whether to start a worker: openings have none, or all workers are `ready` and follow MAX_GUIDES outputs."""
        if not grammar.workers:
            return bool(grammar.openings)
        if len(ready) < len(grammar.workers) or len(grammar.workers) >= self._workers.shards:
            return False
        return min(map(_load, ready)) >= MAX_GUIDES

    def _tidy(self, now: float) -> None:
        """Fail openings that have waited too long, and clean up after a host that has ended."""
        if (broken := self._workers.broken) is not None:
            self._end_all(broken)
            self._workers.close()
            return
        self._workers.tidy(now)
        if not self._workers.ready:
            return
        for grammar in list(self._grammars.values()):
            if grammar.openings and all(worker.queued for worker in grammar.workers):
                self._expire(grammar, now)

    def _expire(self, grammar: Grammar, now: float) -> None:
        """Fail the openings that have waited too long for the compilation to start."""
        since = max(grammar.openings[0].began, self._workers.ready_since)
        while grammar.openings and now > since + QUEUE_SECONDS:
            cause = f"the grammar waited {QUEUE_SECONDS:g} s for others to be compiled"
            grammar.openings.popleft().fail(LlmcError("E653", cause, "send the request again in a moment"))
            since = grammar.openings[0].began if grammar.openings else now
        if not grammar.openings:
            self._workers.forget(grammar)
            self._serve(grammar)

    def _end_all(self, error: LlmcError) -> None:
        for grammar in list(self._grammars.values()):
            grammar.fail(error)
            for worker in grammar.workers:
                worker.fail(error)
        self._grammars.clear()


def _load(worker: Worker) -> int:
    return len(worker.guides)


def _check_library() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise LlmcError("E650", "structured outputs need the package llguidance", install_command("grammar"))
