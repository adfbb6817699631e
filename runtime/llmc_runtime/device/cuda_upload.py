"""Weights from their files to the GPU: read into pinned memory, hashed and copied by several threads; nothing else."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc_runtime.device.cuda_memory import Pinned
from llmc_runtime.device.cuda_names import Cuda
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.fields import REMEDY
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import WeightFile

PIECE = 2 << 20  # bytes that are read, hashed and copied at a time: they stay in a core's cache in between
_PIECES = 2  # that a thread has under way


@dataclass(frozen=True)
class Upload:
    """What was copied, how long it took, and with how many threads."""

    nbytes: int
    seconds: float
    threads: int

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9)


def upload(
    cuda: Cuda,
    enter: Callable[[], None],
    folder: Folder,
    files: Sequence[WeightFile],
    addresses: Mapping[str, int],
    *,
    check: bool,
    threads: int,
) -> Upload:
    """Copy every file to its address, all of it there when this returns; `enter` makes a thread use the GPU's context.

    LlmcError E107 where `check` finds a block that differs from its hash (the first such), E106 where a file cannot be
    read, E114 and E203 from the GPU.
    """
    began = time.perf_counter()
    work = _Work(folder, files)
    count = max(1, min(threads, len(work.blocks)))
    workers = [_Worker(cuda, enter, work, addresses, check) for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
    except BaseException as error:
        work.fail(-1, error)
    for worker in workers:
        work.await_end(worker)
    work.close()
    if work.errors:
        raise min(work.errors, key=lambda e: e[0])[1]
    return Upload(sum(f.bytes for f in files), time.perf_counter() - began, count)


class _Work:
    """The blocks of all files, handed out in order; after an error no more are."""

    def __init__(self, folder: Folder, files: Sequence[WeightFile]) -> None:
        self.folder = folder
        self.errors: list[tuple[int, BaseException]] = []
        self.fds: dict[str, int] = {}
        self.blocks = [(f, i) for f in files for i in range(len(f.blocks))]
        self._next = iter(enumerate(self.blocks))
        self._lock = threading.Lock()
        try:
            for f in files:
                self.fds[f.file] = folder.open(f.file)[0]
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[int, tuple[WeightFile, int]]]:
        while True:
            with self._lock:
                found = None if self.errors else next(self._next, None)
            if found is None:
                return
            yield found

    def fail(self, number: int, error: BaseException) -> None:
        with self._lock:
            self.errors.append((number, error))

    def await_end(self, worker: threading.Thread) -> None:
        """Wait for a thread; an interrupt stops the work, and is raised when all threads have ended."""
        while worker.is_alive():
            try:
                worker.join()
            except BaseException as error:
                self.fail(-1, error)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


class _Worker(threading.Thread):
    """One thread with its own stream and pinned memory for two pieces."""

    def __init__(
        self, cuda: Cuda, enter: Callable[[], None], work: _Work, addresses: Mapping[str, int], check: bool
    ) -> None:
        super().__init__(name="upload", daemon=True)
        self._cuda, self._enter, self._work = cuda, enter, work
        self._addresses, self._check = addresses, check
        self._events: list[Any] = []
        self._pending = [False] * _PIECES
        self._turn = 0

    def run(self) -> None:
        number = 0
        cu = self._cuda.cu
        stream, pinned = None, None
        try:
            self._enter()
            stream = self._cuda.stream()
            self._events = [self._cuda.event() for _ in range(_PIECES)]
            pinned = Pinned(self._cuda, _PIECES * PIECE)
            for block, (file, index) in self._work:
                number = block
                self._block(stream, pinned, file, index)
            self._cuda.ok(cu.cuStreamSynchronize(stream))
        except BaseException as error:
            self._work.fail(number, error)
        finally:  # copies may be under way after an error, too: pinned memory is freed behind them
            if stream is not None:
                cu.cuStreamSynchronize(stream)
                cu.cuStreamDestroy(stream)
            if pinned is not None:
                pinned.free()
            for event in self._events:
                cu.cuEventDestroy(event)

    def _block(self, stream: Any, pinned: Pinned, file: WeightFile, index: int) -> None:
        begin = index * file.block
        end = min(begin + file.block, file.bytes)
        digest = hashlib.sha256() if self._check else None
        for at in range(begin, end, PIECE):
            size = min(PIECE, end - at)
            turn = self._turn
            if self._pending[turn]:
                self._cuda.ok(self._cuda.cu.cuEventSynchronize(self._events[turn]))
            piece = pinned.array[turn * PIECE : turn * PIECE + size]
            self._read(file, piece, at)
            if digest is not None:
                digest.update(piece.data)
            source, target = pinned.address + turn * PIECE, self._addresses[file.file] + at
            self._cuda.ok(self._cuda.cu.cuMemcpyHtoDAsync(target, source, size, stream))
            self._cuda.ok(self._cuda.cu.cuEventRecord(self._events[turn], stream))
            self._pending[turn] = True
            self._turn = (turn + 1) % _PIECES
        if digest is not None and digest.hexdigest() != file.blocks[index]:
            raise self._work.folder.wrong_block(file, index)

    def _read(self, file: WeightFile, piece: np.ndarray, at: int) -> None:
        view, done = piece.data, 0
        while done < len(view):
            try:
                got = os.preadv(self._work.fds[file.file], [view[done:]], at + done)
            except OSError as error:
                why = os.strerror(error.errno or 0)
                raise LlmcError("E106", f"{file.file} cannot be read: {why}", "copy the artifact again") from None
            if not got:
                raise LlmcError("E106", f"{file.file} became shorter while it was read", REMEDY)
            done += got
