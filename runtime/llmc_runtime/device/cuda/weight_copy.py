"""Two methods of copying a block of weights to the GPU: from the mapped file, or through pinned memory.

Each upload thread has one instance. Both methods can check hashes on the way; `cuda_upload` chooses between them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc_runtime.device.cuda.device_memory import Pinned
from llmc_runtime.device.cuda.driver import Cuda
from llmc_runtime.device.cuda.upload_work import Block, Span, Work

# Bytes that are read, hashed if required, and copied at a time. A hashed piece stays in the core's cache in between.
PIECE, PLAIN_PIECE = 2 << 20, 4 << 20
_PIECES = 2  # in flight per thread


class Refused(Exception):
    """The driver does not register memory of this kind; the message is its reason."""


@dataclass(frozen=True)
class Trip:
    """The state shared by all threads: the work, each file's device address, and whether hashes are checked."""

    cuda: Cuda
    work: Work
    addresses: Mapping[str, int]
    check: bool


class Way(ABC):
    """One thread's method of copying. `open` may fail half way; call `close` once the stream is idle."""

    def __init__(self, trip: Trip, stream: Any) -> None:
        self._trip, self._cuda, self._stream = trip, trip.cuda, stream

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
        target = self._trip.addresses[block.file.file] + at
        self._cuda.ok(self._cuda.cu.cuMemcpyHtoDAsync(target, source, nbytes, self._stream))
        self._cuda.ok(self._cuda.cu.cuEventRecord(event, self._stream))


class MappedWay(Way):
    """Hashes blocks in the page cache, and copies a span from there once all its blocks have been checked.

    Invariant: a span is registered while it is copied, and a thread has at most one such span.
    """

    def __init__(self, trip: Trip, stream: Any) -> None:
        super().__init__(trip, stream)
        self._event: Any = None
        self._sent: Span | None = None

    def open(self) -> None:
        """Create the event that marks the end of a copy."""
        self._event = self._cuda.event()

    def block(self, block: Block) -> None:
        """Check the block, and copy its span if this was the span's last block."""
        work = self._trip.work
        found = work.bring(block)
        if self._trip.check and hashlib.sha256(found.data).hexdigest() != block.file.blocks[block.index]:
            raise work.folder.wrong_block(block.file, block.index)
        self._settle()
        span = work.ended(block)
        if span is not None:
            self._send(span)

    def _send(self, span: Span) -> None:
        address, nbytes = self._trip.work.place(span)
        why = self._cuda.register(address, nbytes)
        if why:
            raise Refused(why)
        self._sent = span
        self._copy(span, span.begin, address, span.end - span.begin, self._event)

    def _settle(self) -> None:
        """Wait for the previous span's copy, which ran while a block was hashed, and release the span."""
        if self._sent is not None:
            self._cuda.ok(self._cuda.cu.cuEventSynchronize(self._event))
            self._cuda.ok(self._cuda.cu.cuMemHostUnregister(self._trip.work.place(self._sent)[0]))
            self._trip.work.drop(self._sent)
            self._sent = None

    def close(self) -> None:
        """Release the span and the event, ignoring errors."""
        if self._sent is not None:
            self._cuda.cu.cuMemHostUnregister(self._trip.work.place(self._sent)[0])
        if self._event is not None:
            self._cuda.cu.cuEventDestroy(self._event)


class PinnedWay(Way):
    """Reads blocks into pinned memory piece by piece, hashes and copies them. A wrong hash is reported after the copies
    have been submitted.
    """

    def __init__(self, trip: Trip, stream: Any) -> None:
        super().__init__(trip, stream)
        self._events: list[Any] = []
        self._pinned: Pinned | None = None
        self._pending = [False] * _PIECES
        self._turn = 0
        self._piece = PIECE if trip.check else PLAIN_PIECE

    def open(self) -> None:
        """Create the events and the pinned buffer."""
        for _ in range(_PIECES):
            self._events.append(self._cuda.event())
        self._pinned = Pinned(self._cuda, _PIECES * self._piece)

    def block(self, block: Block) -> None:
        """Read, hash and copy the block piece by piece."""
        digest = hashlib.sha256() if self._trip.check else None
        assert self._pinned is not None
        for at in range(block.begin, block.end, self._piece):
            turn = self._turn
            if self._pending[turn]:
                self._cuda.ok(self._cuda.cu.cuEventSynchronize(self._events[turn]))
            begin, size = turn * self._piece, min(self._piece, block.end - at)
            piece = self._pinned.array[begin : begin + size]
            self._trip.work.read(block.file, piece, at)
            if digest is not None:
                digest.update(piece.data)
            self._pending[turn] = True
            self._copy(block, at, self._pinned.address + begin, size, self._events[turn])
            self._turn = (turn + 1) % _PIECES
        if digest is not None and digest.hexdigest() != block.file.blocks[block.index]:
            raise self._trip.work.folder.wrong_block(block.file, block.index)

    def close(self) -> None:
        """Free the buffer and the events."""
        if self._pinned is not None:
            self._pinned.free()
        for event in self._events:
            self._cuda.cu.cuEventDestroy(event)
