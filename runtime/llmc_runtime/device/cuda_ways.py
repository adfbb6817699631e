"""Two ways of a block of weights to the GPU, for one thread each: out of the mapped file, or through pinned memory.

Both hash what they copy where they are asked to. They own no thread, and do not choose between each other.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc_runtime.device.cuda_memory import Pinned
from llmc_runtime.device.cuda_names import Cuda
from llmc_runtime.device.cuda_work import Block, Span, Work

# Bytes that are read, perhaps hashed, and copied at a time: what is hashed stays in a core's cache in between.
PIECE, PLAIN_PIECE = 2 << 20, 4 << 20
_PIECES = 2  # that a thread has under way


class Refused(Exception):
    """The driver does not register memory of this kind; the text is its reason."""


@dataclass(frozen=True)
class Trip:
    """What all threads share: the work, where each file goes, and whether hashes are compared."""

    cuda: Cuda
    work: Work
    addresses: Mapping[str, int]
    check: bool


class Way(ABC):
    """One thread's part. `open` may fail half way; `close` gives everything back when the stream is done."""

    def __init__(self, trip: Trip, stream: Any) -> None:
        self._trip, self._cuda, self._stream = trip, trip.cuda, stream

    @abstractmethod
    def open(self) -> None:
        """Get what the way needs; LlmcError E114, E203."""

    @abstractmethod
    def block(self, block: Block) -> None:
        """Hash it and have it copied, perhaps later; LlmcError E106, E107, E114."""

    @abstractmethod
    def close(self) -> None:
        """Errors are not told."""

    def _copy(self, block: Block | Span, at: int, source: int, nbytes: int, event: Any) -> None:
        target = self._trip.addresses[block.file.file] + at
        self._cuda.ok(self._cuda.cu.cuMemcpyHtoDAsync(target, source, nbytes, self._stream))
        self._cuda.ok(self._cuda.cu.cuEventRecord(event, self._stream))


class MappedWay(Way):
    """Blocks are hashed where the page cache has them; a span is copied from there when all its blocks are right.

    Invariant: a span is registered while it is copied, and a thread has one such span at most.
    """

    def __init__(self, trip: Trip, stream: Any) -> None:
        super().__init__(trip, stream)
        self._event: Any = None
        self._sent: Span | None = None

    def open(self) -> None:
        self._event = self._cuda.event()

    def block(self, block: Block) -> None:
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
        """Let go of what was sent: its copy had the time of a block."""
        if self._sent is not None:
            self._cuda.ok(self._cuda.cu.cuEventSynchronize(self._event))
            self._cuda.ok(self._cuda.cu.cuMemHostUnregister(self._trip.work.place(self._sent)[0]))
            self._trip.work.drop(self._sent)
            self._sent = None

    def close(self) -> None:
        if self._sent is not None:
            self._cuda.cu.cuMemHostUnregister(self._trip.work.place(self._sent)[0])
        if self._event is not None:
            self._cuda.cu.cuEventDestroy(self._event)


class PinnedWay(Way):
    """Blocks are read into pinned memory piece by piece, hashed and copied; a wrong hash is told behind the copies."""

    def __init__(self, trip: Trip, stream: Any) -> None:
        super().__init__(trip, stream)
        self._events: list[Any] = []
        self._pinned: Pinned | None = None
        self._pending = [False] * _PIECES
        self._turn = 0
        self._piece = PIECE if trip.check else PLAIN_PIECE

    def open(self) -> None:
        for _ in range(_PIECES):
            self._events.append(self._cuda.event())
        self._pinned = Pinned(self._cuda, _PIECES * self._piece)

    def block(self, block: Block) -> None:
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
        if self._pinned is not None:
            self._pinned.free()
        for event in self._events:
            self._cuda.cu.cuEventDestroy(event)
