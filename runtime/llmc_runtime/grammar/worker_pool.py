"""The life cycle of grammar workers in the engine: queued, forked, compiling, serving, ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from llmc_runtime.fair_queue import FairQueue, KeyCounts
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.grammar import failures, wire
from llmc_runtime.grammar.guide import GrammarGuide, Opening
from llmc_runtime.grammar.host_process import HostProcess
from llmc_runtime.grammar.limits import (
    COMPILE_SECONDS,
    FREE_BYTES,
    KEPT_BYTES,
    MAX_COMPILATIONS,
    MAX_KEPT,
    MAX_PROCESSES,
    MAX_TENANT_COMPILATIONS,
    MAX_TENANT_PROCESSES,
    MAX_UNSENT,
    OPERATION_SECONDS,
    TENANT_BYTES,
    VOCABULARY_SECONDS,
)
from llmc_runtime.text.tokenizer import Tokenizer


class Grammar:
    """A grammar of one tenant, with its workers and the openings that wait for one."""

    def __init__(self, tenant: str, digest: bytes, kind: str, definition: bytes) -> None:
        self.tenant, self.digest, self.kind, self.definition = tenant, digest, kind, definition
        self.workers: list[Worker] = []
        self.openings: deque[Opening] = deque()

    def fail(self, error: LlmcError) -> None:
        """Fail all openings."""
        while self.openings:
            self.openings.popleft().fail(error)


class Worker:
    """A process of one grammar: queued until it is forked, then compiling until `compiled` is set."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.queued, self.compiled, self.killed = True, False, False
        self.began = 0.0  # monotonic time of the fork
        self.link: socket.socket | None = None
        self.guides: dict[int, GrammarGuide] = {}
        self.unsent: deque[bytes] = deque()  # operations for which the link had no room
        self.private = 0  # bytes of private memory at its last report

    def flush(self) -> None:
        """Send the operations for which the link had no room, as far as it has now. Raises OSError if it is closed."""
        while self.unsent and self.link is not None:
            try:
                self.link.send(self.unsent[0])
            except BlockingIOError:
                return
            self.unsent.popleft()

    def fail(self, error: LlmcError) -> None:
        """Fail all outputs that the worker follows."""
        for guide in self.guides.values():
            guide.fail(error)
        self.guides.clear()


class WorkerPool:
    """All workers of one host.

    `changed(grammar, error)` is called when a worker has compiled its grammar (None) or has ended; in the latter case
    the grammar's remaining openings fail with `error`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Path,
        size: int,
        eos: Sequence[int],
        changed: Callable[[Grammar, LlmcError | None], None],
    ) -> None:
        self._source, self._changed = (tokenizer, size, eos), changed
        self._ends = frozenset(eos)
        self._host: HostProcess | None = None
        self._selector = selectors.EpollSelector()
        self._workers: dict[int, Worker] = {}  # forked workers by number
        self._by_link: dict[int, int] = {}  # worker numbers by descriptor
        self._idle: OrderedDict[int, Worker] = OrderedDict()  # workers without guides, longest idle first
        self._queue: FairQueue[Worker] = FairQueue(MAX_COMPILATIONS, MAX_TENANT_COMPILATIONS)
        self._numbers, self._guide_numbers = itertools.count(), itertools.count()
        self._started = self.ready_since = 0.0
        self.guides = 0  # number of open guides
        self.shards = max(1, (os.cpu_count() or 1) // 4)  # maximum workers per grammar
        self.broken: LlmcError | None = None  # the reason why the host has ended

    @property
    def ready(self) -> bool:
        """Whether the vocabulary is built."""
        return self._host is not None and self._host.ready

    def fileno(self) -> int:
        """Return a descriptor that is readable when `read` has messages to process."""
        return self._selector.fileno()

    def start(self) -> None:
        """Start the host, if it is not running. Raises LlmcError E100."""
        if self._host is None:
            self._host = HostProcess(*self._source)
            self._started = time.monotonic()
            self.broken = None
            self._selector.register(self._host.control, selectors.EVENT_READ)

    def add(self, grammar: Grammar) -> None:
        """Queue another worker for the grammar."""
        worker = Worker(grammar)
        grammar.workers.append(worker)
        self._queue.add(grammar.tenant, worker)

    def forget(self, grammar: Grammar) -> None:
        """Remove the grammar's workers that have not compiled it, and end those that have begun."""
        for worker in [worker for worker in grammar.workers if not worker.compiled]:
            grammar.workers.remove(worker)
            if worker.queued:
                self._queue.remove(grammar.tenant, worker)
                continue
            self._queue.end(grammar.tenant)
            if worker.link is not None and self._host is not None:
                self._host.kill(self._by_link[worker.link.fileno()])
                self._unlink(worker)

    def begin(self) -> None:
        """Fork queued workers, as far as slots are free. Workers that are idle give way, first those idle longest."""
        host = self._host
        if host is None or not host.ready or not self._queue:
            return
        busy = KeyCounts(worker.grammar.tenant for n, worker in self._workers.items() if n not in self._idle)
        while busy.total() < MAX_PROCESSES:
            job = self._queue.next(lambda tenant: busy[tenant] < MAX_TENANT_PROCESSES)
            if job is None:
                return
            tenant, worker = job
            if len(self._workers) >= MAX_PROCESSES:
                self._dismiss(next(iter(self._idle)))
            number = next(self._numbers)
            try:
                worker.link = host.spawn(number, worker.grammar.definition)
            except OSError as e:
                self._queue.end(tenant)
                worker.grammar.workers.remove(worker)
                cause = f"the system cannot create a process for the grammar: {e.strerror}"
                self._changed(worker.grammar, failures.unavailable(cause))
                continue
            busy.change(tenant, 1)
            worker.queued, worker.began = False, time.monotonic()
            self._workers[number] = worker
            self._by_link[worker.link.fileno()] = number
            self._selector.register(worker.link, selectors.EVENT_READ)

    def guide(self, worker: Worker) -> GrammarGuide:
        """Open a guide for an output that this worker follows."""
        number = next(self._guide_numbers)
        guide = GrammarGuide(
            partial(self._send, worker, number), partial(self._close_guide, worker, number), self._ends
        )
        worker.guides[number] = guide
        self.guides += 1
        if worker.link is not None:
            self._idle.pop(self._by_link[worker.link.fileno()], None)
        return guide

    def select(self, seconds: float) -> list[int]:
        """Wait up to `seconds` and return the readable descriptors."""
        return [key.fd for key, _ in self._selector.select(seconds)]

    def read(self, fd: int) -> None:
        """Process the messages on a descriptor from `select`."""
        if (number := self._by_link.get(fd)) is not None:
            self._read_link(number)
        elif self._host is not None and fd == self._host.control.fileno():
            self._read_host(self._host)

    def tidy(self, now: float) -> None:
        """Kill workers that exceed their time limits."""
        if self._host is None:
            return
        if not self._host.ready and now > self._started + VOCABULARY_SECONDS:
            self.broken = failures.unavailable(f"the vocabulary was not built within {VOCABULARY_SECONDS:g} s")
        for number, worker in self._workers.items():
            since = worker.began if not worker.compiled else _oldest(worker)
            limit = OPERATION_SECONDS if worker.compiled else COMPILE_SECONDS
            if since and now > since + limit and not worker.killed:
                worker.killed = True
                self._host.kill(number)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            self._unlink(worker)
        if self._host is not None:
            self._selector.unregister(self._host.control)
            self._host.close()
        self._host, self.guides, self.broken = None, 0, None
        self._workers.clear()
        self._idle.clear()
        self._queue.clear()

    def _send(
        self, worker: Worker, number: int, guide: GrammarGuide, kind: int, tokens: Sequence[int], serial: int
    ) -> None:
        """Send an operation of a guide to its worker, or queue it while the link has no room."""
        if len(worker.unsent) >= MAX_UNSENT:  # it does not read
            guide.fail(failures.gone())
            return
        worker.unsent.append(wire.OPERATION.pack(number, kind, serial) + wire.pack_tokens(tokens))
        with contextlib.suppress(OSError):  # it has ended; the guide fails when the host reports how
            worker.flush()

    def _close_guide(self, worker: Worker, number: int) -> None:
        """Close an output, and keep or end its worker if it has no others."""
        if worker.guides.pop(number, None) is None:
            return
        self.guides -= 1
        if worker.link is None:
            return
        worker.unsent.append(wire.OPERATION.pack(number, wire.CLOSE, 0))
        try:
            worker.flush()
        except OSError:  # it has ended, which `read` will notice
            return
        if not worker.guides:
            self._keep_idle(worker)

    def _keep_idle(self, worker: Worker) -> None:
        """Keep a worker without guides for later requests, if its memory is small."""
        assert worker.link is not None
        number = self._by_link[worker.link.fileno()]
        self._idle[number] = worker
        if worker.private > KEPT_BYTES:
            self._dismiss(number)
        elif len(self._idle) > MAX_KEPT:
            self._dismiss(next(iter(self._idle)))

    def _dismiss(self, number: int) -> None:
        """End an idle worker."""
        worker = self._idle.pop(number)
        self._unlink(worker)
        worker.grammar.workers.remove(worker)
        del self._workers[number]
        self._changed(worker.grammar, None)

    def _unlink(self, worker: Worker) -> None:
        if worker.link is not None:
            del self._by_link[worker.link.fileno()]
            self._selector.unregister(worker.link)
            worker.link.close()
            worker.link = None

    def _read_link(self, number: int) -> None:
        """Process the messages of a worker."""
        worker = self._workers[number]
        for data in _datagrams(worker.link):
            if not data:
                self._unlink(worker)  # the host reports how it ended
                return
            self._handle_result(worker, wire.RESULT.unpack_from(data), data[wire.RESULT.size :])
        with contextlib.suppress(OSError):  # the host reports how it ended
            worker.flush()

    def _handle_result(self, worker: Worker, result: tuple[int, int, int], payload: bytes) -> None:
        """Apply a worker's message, (number of the guide, kind, serial), to its grammar or to one of its guides."""
        number, kind, serial = result
        if kind == wire.COMPILED:
            self._compiled(worker, int(payload))
        elif kind == wire.GREW:
            self._grown(worker, int(payload))
        elif kind == wire.REFUSED:
            self._refuse(worker, failures.refused(worker.grammar.kind, payload.decode()))
        elif (guide := worker.guides.get(number)) is not None:
            if kind == wire.BROKEN:
                guide.fail(failures.failed(f"the grammar cannot continue: {payload.decode()}"))
            else:
                guide.receive(kind, serial, payload)

    def _compiled(self, worker: Worker, private_bytes: int) -> None:
        """Mark a worker's grammar as compiled, or refuse it if its tenant's grammars use too much memory."""
        if self._too_large(worker, private_bytes):
            self._refuse(worker, failures.too_much_memory())
            self._unlink(worker)  # this ends the worker
            return
        worker.compiled, worker.private = True, private_bytes
        self._queue.end(worker.grammar.tenant)
        self._changed(worker.grammar, None)
        if not worker.guides and worker.link is not None:
            self._keep_idle(worker)

    def _grown(self, worker: Worker, private_bytes: int) -> None:
        """Note the memory of a worker that has grown, and end it if its tenant's grammars use too much."""
        worker.private = private_bytes
        if self._too_large(worker, private_bytes):
            self._fail_outputs(worker, failures.too_much_memory())
            self._unlink(worker)  # this ends the worker
            self._remove(worker)
        elif not worker.guides:
            self._keep_idle(worker)

    def _too_large(self, worker: Worker, private: int) -> bool:
        """Return whether a worker with `private` bytes of memory exceeds the limit of its tenant.

        Idle workers of the tenant are ended first.
        """
        if private <= FREE_BYTES:
            return False
        tenant, others = worker.grammar.tenant, dict[int, int]()
        for number, other in self._workers.items():
            if other.grammar.tenant == tenant and other is not worker:
                others[number] = other.private
        excess = sum(others.values()) + private - TENANT_BYTES
        for number in [number for number in self._idle if number in others]:
            if excess <= 0:
                break
            excess -= others[number]
            self._dismiss(number)
        return excess > 0

    def _fail_outputs(self, worker: Worker, error: LlmcError) -> None:
        self.guides -= len(worker.guides)
        worker.fail(error)

    def _remove(self, worker: Worker) -> None:
        """Remove a compiled worker from its grammar, if it is not yet; its process has ended, or will."""
        if worker in worker.grammar.workers:
            worker.grammar.workers.remove(worker)
            self._changed(worker.grammar, None)

    def _refuse(self, worker: Worker, error: LlmcError) -> None:
        """Record a failed compilation and remove the worker from its grammar."""
        if worker in worker.grammar.workers:
            self._queue.end(worker.grammar.tenant)
            worker.grammar.workers.remove(worker)
            self._changed(worker.grammar, error)

    def _read_host(self, host: HostProcess) -> None:
        """Process the messages of the host: that it is ready, that a worker has ended, or that it fails."""
        for data in _datagrams(host.control):
            if data[:1] == wire.READY:
                host.ready, self.ready_since = True, time.monotonic()
            elif data[:1] == wire.ENDED:
                _, number, status = wire.END.unpack(data)
                self._ended(number, status)
            else:
                self.broken = self.broken or (failures.unusable(data[1:].decode()) if data else failures.gone())
                return

    def _ended(self, number: int, status: int) -> None:
        """Handle the end of a worker's process."""
        worker = self._workers.get(number)
        if worker is None:
            return
        self._read_link(number)  # its last messages
        self._unlink(worker)
        del self._workers[number]
        self._idle.pop(number, None)
        if not worker.compiled:
            self._refuse(worker, failures.compile_error(worker.grammar.kind, worker.killed, status))
            return
        self._fail_outputs(worker, failures.output_error(worker.killed, status))
        self._remove(worker)


def _datagrams(link: socket.socket | None) -> Iterator[bytes]:
    """Yield the datagrams that have arrived, and b"" at last if the other end or `link` is closed."""
    while link is not None:
        try:
            data = link.recv(wire.MAX_DATAGRAM_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        yield data
        if not data:
            return


def _oldest(worker: Worker) -> float:
    """Return the time of the worker's oldest unanswered request; 0 if there is none."""
    return min((guide.sent for guide in worker.guides.values() if guide.sent), default=0.0)
