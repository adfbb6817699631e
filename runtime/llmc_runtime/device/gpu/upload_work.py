"""The work list of an upload: the blocks of the open weight files, distributed to threads in order."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.json_fields import REMEDY
from llmc_runtime.format.manifest import WeightFile

SPAN_BYTES = 64 << 20  # bytes of a mapped file that are registered with the driver, and copied, in one call
_POPULATE_READ, _DONT_NEED = 22, 4  # MADV_POPULATE_READ (since Linux 5.14) and MADV_DONTNEED
_READAHEAD_BYTES = 1 << 20  # bytes per readahead request; the kernel honors only the beginning of a larger one


@dataclass(eq=False)
class Span:
    """The bytes [begin, end) of a mapped file; `begin` is page-aligned. `pending` counts the unfinished blocks."""

    file: WeightFile
    begin: int
    end: int
    pending: int = 0


@dataclass(frozen=True)
class Block:
    """The bytes [begin, end) of a file that share one hash, and the span that contains them."""

    file: WeightFile
    index: int
    begin: int
    end: int
    span: Span


class BlockQueue:
    """Iterates over the blocks of all files, from any number of threads; it stops after the first error.

    With `mapped`, the files are also mapped. If a mapped file is truncated, touching a lost page kills the process
    (SIGBUS). To avoid that, `load` checks the file's size and asks the kernel to load the pages, both of which fail
    with an error instead. Two cases remain: a file truncated between this check and the end of the block's hash, and an
    unreadable page on Linux older than 5.14. `read` is not affected.
    """

    def __init__(self, folder: Folder, files: Sequence[WeightFile], *, mapped: bool) -> None:
        """Raises LlmcError E104 or E106 as `Folder.open` does, and E106 if a file is too short or cannot be mapped."""
        self.folder = folder
        self.errors: list[tuple[int, BaseException]] = []
        self.blocks = [block for f in files for block in _blocks(f)]
        self._next = iter(enumerate(self.blocks))
        self._lock = threading.Lock()
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise  # Python's own madvise does not release the GIL
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._fds: dict[str, int] = {}
        self._arrays: dict[str, np.ndarray] = {}
        try:
            for f in files:
                self._fds[f.file] = folder.open(f.file)[0]
                if mapped and f.bytes:
                    self._arrays[f.file] = self._map(f)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[tuple[int, Block]]:
        while True:
            with self._lock:
                item = None if self.errors else next(self._next, None)
            if item is None:
                return
            yield item

    def fail(self, number: int, error: BaseException) -> None:
        """Record the error of block `number` and stop the work; -1 precedes all blocks."""
        with self._lock:
            self.errors.append((number, error))

    def complete(self, block: Block) -> Span | None:
        """Count a block as complete. Returns its span if this was the span's last block, else None."""
        with self._lock:
            block.span.pending -= 1
            return None if block.span.pending else block.span

    def join(self, worker: threading.Thread) -> None:
        """Join a thread. An interrupt stops the work, and is raised once all threads have ended."""
        while worker.is_alive():
            try:
                worker.join()
            except BaseException as error:
                self.fail(-1, error)

    def close(self) -> None:
        """Close the files. A mapping is released with the last view of it."""
        self._arrays.clear()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def read(self, file: WeightFile, piece: np.ndarray, at: int) -> None:
        """Fill u8[n] with the file's bytes from `at` on; raise LlmcError E106 if the file is too short."""
        view, done = piece.data, 0
        while done < len(view):
            try:
                count = os.preadv(self._fds[file.file], [view[done:]], at + done)
            except OSError as error:
                raise _unreadable(file, error.errno) from None
            if not count:
                raise _truncated(file)
            done += count

    def load(self, block: Block) -> np.ndarray:
        """Load the block's pages and return the block, u8[n]; raise LlmcError E106 if they cannot be read."""
        fd = self._fds[block.file.file]
        self._check_size(block.file, block.end)
        for at in range(block.begin, block.end, _READAHEAD_BYTES):
            os.posix_fadvise(fd, at, min(_READAHEAD_BYTES, block.end - at), os.POSIX_FADV_WILLNEED)
        status = self._advise(block.file, block.begin, block.end, _POPULATE_READ)
        if status not in (0, errno.EINVAL):  # EINVAL: an older kernel; the pages are loaded on access
            self._check_size(block.file, block.end)
            raise _unreadable(block.file, errno.EIO if status == errno.EFAULT else status)
        return self._arrays[block.file.file][block.begin : block.end]

    def location(self, span: Span) -> tuple[int, int]:
        """Return the address of a mapped span, and its size rounded up to whole pages."""
        return self._arrays[span.file.file].ctypes.data + span.begin, _pages(span.end - span.begin)

    def drop(self, span: Span) -> None:
        """Unmap a span's pages from this process; they stay in the page cache. Unmapping everything at the end takes
        longer.
        """
        self._advise(span.file, span.begin, span.end, _DONT_NEED)

    def _advise(self, file: WeightFile, begin: int, end: int, advice: int) -> int:
        """Call madvise(2) on the mapped bytes [begin, end). Returns 0 or the errno."""
        begin -= begin % mmap.PAGESIZE
        failed = self._madvise(self._arrays[file.file].ctypes.data + begin, end - begin, advice)
        return ctypes.get_errno() if failed else 0

    def _map(self, file: WeightFile) -> np.ndarray:
        self._check_size(file, file.bytes)
        try:
            return np.frombuffer(mmap.mmap(self._fds[file.file], file.bytes, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise _unreadable(file, error.errno) from None

    def _check_size(self, file: WeightFile, end: int) -> None:
        if os.fstat(self._fds[file.file]).st_size < end:
            raise _truncated(file)


def _blocks(file: WeightFile) -> Iterator[Block]:
    """Yield the blocks of one file. A span consists of whole blocks and starts at a page boundary."""
    unit = math.lcm(file.block, mmap.PAGESIZE)
    size = max(1, SPAN_BYTES // unit) * unit
    span = Span(file, 0, 0)
    for index, begin in enumerate(range(0, file.bytes, file.block)):
        if begin % size == 0:
            span = Span(file, begin, min(begin + size, file.bytes))
        span.pending += 1
        yield Block(file, index, begin, min(begin + file.block, file.bytes), span)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _truncated(file: WeightFile) -> LlmcError:
    return LlmcError("E106", f"{file.file} was truncated while it was read", REMEDY)


def _unreadable(file: WeightFile, number: int | None) -> LlmcError:
    return LlmcError("E106", f"{file.file} cannot be read: {os.strerror(number or 0)}", "copy the artifact again")
