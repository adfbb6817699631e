"""Multithreaded upload of weights from their files to the GPU, with optional hash checks.

There are two methods of copying a block of weights: from the mapped file, or through pinned memory. Each upload thread
has one instance. Both methods can check hashes while copying.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from llmc_runtime.device.gpu.device_memory import Pinned
from llmc_runtime.device.gpu.driver import GpuDriver
from llmc_runtime.device.gpu.upload_work import Block, BlockQueue, Span
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import WeightFile

MAPPED, PINNED = "mapped", "pinned"
PIECE = 2 << 20  # bytes per copy with hashing; a piece stays in the core's cache until it is copied
PLAIN_PIECE = 4 << 20  # bytes per copy without hashing
_PIECES_IN_FLIGHT = 2  # in flight per thread


class Refused(Exception):
    """The driver refused to register memory of this kind. The message is its reason."""


@dataclass(frozen=True)
class UploadJob:
    """The state that all threads share: the queue, each file's device address, and whether hashes are checked."""

    driver: GpuDriver
    queue: BlockQueue
    addresses: Mapping[str, int]
    check: bool


class CopyMethod(ABC):
    """One thread's method of copying. Call `close` once the stream is idle, even if `open` failed."""

    def __init__(self, job: UploadJob, stream: Any) -> None:
        self._job, self._driver, self._stream = job, job.driver, stream

    @abstractmethod
    def open(self) -> None:
        """Acquire resources; raises LlmcError E114 or E203."""

    @abstractmethod
    def block(self, block: Block) -> None:
        """Check a block's hash and schedule its copy; raises LlmcError E106, E107 or E114."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, ignoring errors."""

    def _copy(self, block: Block | Span, at: int, source: int, nbytes: int, event: Any) -> None:
        target = self._job.addresses[block.file.file] + at
        self._driver.copy_in(target, source, nbytes, self._stream)
        self._driver.record(event, self._stream)


class MappedCopy(CopyMethod):
    """Hashes blocks in the page cache, and copies a span from there once all its blocks have been checked.

    Invariant: a span is registered while it is copied, and a thread has at most one such span.
    """

    def __init__(self, job: UploadJob, stream: Any) -> None:
        super().__init__(job, stream)
        self._event: Any = None
        self._sent: Span | None = None

    def open(self) -> None:
        """Create the event that marks the end of a copy."""
        self._event = self._driver.event()

    def block(self, block: Block) -> None:
        """Check the block, and copy its span if this was the span's last block."""
        queue = self._job.queue
        data = queue.load(block)
        if self._job.check and hashlib.sha256(data.data).hexdigest() != block.file.blocks[block.index]:
            raise queue.folder.wrong_block(block.file, block.index)
        self._finish_copy()
        span = queue.complete(block)
        if span is not None:
            self._send(span)

    def _send(self, span: Span) -> None:
        """Register a span of verified blocks with the driver, and start to copy it. Raises Refused."""
        address, nbytes = self._job.queue.location(span)
        reason = self._driver.register(address, nbytes)
        if reason:
            raise Refused(reason)
        self._sent = span
        self._copy(span, span.begin, address, span.end - span.begin, self._event)

    def _finish_copy(self) -> None:
        """Wait for the previous span's copy, which ran while a block was hashed, and release the span."""
        if self._sent is not None:
            self._driver.wait(self._event)
            self._driver.ok(self._driver.unregister(self._job.queue.location(self._sent)[0]))
            self._job.queue.drop(self._sent)
            self._sent = None

    def close(self) -> None:
        """Release the span and the event, ignoring errors."""
        if self._sent is not None:
            self._driver.unregister(self._job.queue.location(self._sent)[0])
        if self._event is not None:
            self._driver.destroy_event(self._event)


class PinnedCopy(CopyMethod):
    """Reads blocks into pinned memory piece by piece, hashes and copies them. A wrong hash is reported after the copies
    have been submitted.
    """

    def __init__(self, job: UploadJob, stream: Any) -> None:
        super().__init__(job, stream)
        self._events: list[Any] = []
        self._pinned: Pinned | None = None
        self._pending = [False] * _PIECES_IN_FLIGHT
        self._slot = 0
        self._piece = PIECE if job.check else PLAIN_PIECE

    def open(self) -> None:
        """Create the events and the pinned buffer."""
        for _ in range(_PIECES_IN_FLIGHT):
            self._events.append(self._driver.event())
        self._pinned = Pinned(self._driver, _PIECES_IN_FLIGHT * self._piece)

    def block(self, block: Block) -> None:
        """Read, hash and copy the block piece by piece."""
        digest = hashlib.sha256() if self._job.check else None
        assert self._pinned is not None
        for at in range(block.begin, block.end, self._piece):
            slot = self._slot
            if self._pending[slot]:
                self._driver.wait(self._events[slot])
            begin, size = slot * self._piece, min(self._piece, block.end - at)
            piece = self._pinned.array[begin : begin + size]
            self._job.queue.read(block.file, piece, at)
            if digest is not None:
                digest.update(piece.data)
            self._pending[slot] = True
            self._copy(block, at, self._pinned.address + begin, size, self._events[slot])
            self._slot = (slot + 1) % _PIECES_IN_FLIGHT
        if digest is not None and digest.hexdigest() != block.file.blocks[block.index]:
            raise self._job.queue.folder.wrong_block(block.file, block.index)

    def close(self) -> None:
        """Free the buffer and the events."""
        if self._pinned is not None:
            self._pinned.free()
        for event in self._events:
            self._driver.destroy_event(event)


@dataclass(frozen=True)
class Upload:
    """Statistics of an upload: bytes, seconds, number of threads, and the method of copying.

    `method` is "mapped" (hashed in and copied from the page cache) or "pinned" (read into pinned memory and copied from
    there). If "mapped" was requested and not possible, `fallback_reason` is the driver's reason.
    """

    nbytes: int
    seconds: float
    threads: int
    method: str
    fallback_reason: str = ""

    @property
    def rate(self) -> float:
        """Throughput in bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)

    def __add__(self, other: Upload) -> Upload:
        """Return the statistics of this upload and of a later one by the same device."""
        return replace(other, nbytes=self.nbytes + other.nbytes, seconds=self.seconds + other.seconds)

    def __str__(self) -> str:
        """For example "weights 15.0 GB/s (16 threads, mapped)"."""
        fallback_reason = f": {self.fallback_reason}" if self.fallback_reason else ""
        return f"weights {self.rate / 1e9:.1f} GB/s ({self.threads} threads, {self.method}{fallback_reason})"


def upload(
    driver: GpuDriver,
    enter: Callable[[], None],
    folder: Folder,
    files: Sequence[WeightFile],
    addresses: Mapping[str, int],
    *,
    check: bool,
    threads: int,
    method: str = MAPPED,
) -> Upload:
    """Copy every file to its device address; all copies have completed on return.

    `addresses` maps file names to device addresses, and `enter` makes the GPU current in the calling thread.
    If the driver refuses to register mapped memory, everything is copied through pinned memory, and the result gives
    the reason. Raises LlmcError E107 for the first block that differs from its hash (with `check`), E106 if a file
    cannot be read, and E114 or E203 for failures of the GPU. `BlockQueue` describes what happens if a file is truncated
    meanwhile.
    """
    start = time.perf_counter()
    fallback_reason = ""
    if method == MAPPED:
        queue = BlockQueue(folder, files, mapped=True)
        fallback_reason = _run(UploadJob(driver, queue, addresses, check), enter, MappedCopy, threads)
        method = PINNED if fallback_reason else MAPPED
    if method == PINNED:
        queue = BlockQueue(folder, files, mapped=False)
        _run(UploadJob(driver, queue, addresses, check), enter, PinnedCopy, threads)
    seconds = time.perf_counter() - start
    return Upload(sum(f.bytes for f in files), seconds, _count(queue, threads), method, fallback_reason)


def _count(queue: BlockQueue, threads: int) -> int:
    return max(1, min(threads, len(queue.blocks)))


def _run(job: UploadJob, enter: Callable[[], None], method: type[CopyMethod], threads: int) -> str:
    """Copy all blocks. Returns why the driver refused, or ""; raises the error of the first failing block."""
    queue = job.queue
    workers = [_Worker(job, enter, method) for _ in range(_count(queue, threads))]
    try:
        for worker in workers:
            worker.start()
    except BaseException as error:
        queue.fail(-1, error)
    for worker in workers:
        queue.join(worker)
    queue.close()
    errors = sorted(queue.errors, key=lambda e: (isinstance(e[1], Refused), e[0]))
    if errors and not isinstance(errors[0][1], Refused):
        raise errors[0][1]
    return str(errors[0][1]) if errors else ""


class _Worker(threading.Thread):
    """An upload thread with its own stream."""

    def __init__(self, job: UploadJob, enter: Callable[[], None], method: type[CopyMethod]) -> None:
        super().__init__(name="upload", daemon=True)
        self._job, self._enter, self._method = job, enter, method

    def run(self) -> None:
        driver, queue = self._job.driver, self._job.queue
        number = 0
        try:
            with ExitStack() as resources:
                self._enter()
                stream = driver.stream()
                resources.callback(driver.destroy_stream, stream)
                copier = self._method(self._job, stream)
                resources.callback(copier.close)
                resources.callback(driver.synchronize, stream)  # after an error, copies may still be running
                copier.open()
                for index, block in queue:
                    number = index
                    copier.block(block)
                driver.ok(driver.synchronize(stream))
        except BaseException as error:
            queue.fail(number, error)
