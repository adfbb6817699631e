"""What an upload has to do: the blocks of open, mapped weight files, handed out to threads; it copies nothing."""

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
from llmc_runtime.format.fields import REMEDY
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import WeightFile

SPAN = 64 << 20  # bytes of a mapped file that are registered with the driver, and copied, in one call
_POPULATE_READ, _DONT_NEED = 22, 4  # of madvise; the first since Linux 5.14
_AHEAD = 1 << 20  # bytes that the kernel is asked to read at a time: of more it takes only the beginning


@dataclass(eq=False)
class Span:
    """The bytes [begin, end) of a mapped file, `begin` on a page's bound; `left`: its blocks that are not done yet."""

    file: WeightFile
    begin: int
    end: int
    left: int = 0


@dataclass(frozen=True)
class Block:
    """The bytes [begin, end) of a file that have one hash, and the span that they are in."""

    file: WeightFile
    index: int
    begin: int
    end: int
    span: Span


class Work:
    """The blocks of all files, handed out in order; after an error no more are.

    With `mapped` the files are mapped as well. A file that is cut short while it is mapped takes its pages away: to
    touch one of them then ends the process (SIGBUS). `bring` looks at the size and has the kernel bring the pages, both
    of which tell so as an error; what remains is a file that is cut in the moment between that and the end of the
    block's hash, or where Linux is older than 5.14 and a page cannot be read. `open` and `read` meet no such thing.
    """

    def __init__(self, folder: Folder, files: Sequence[WeightFile], *, mapped: bool) -> None:
        """LlmcError E104 and E106 as `Folder.open`; E106 where a file is too short or cannot be mapped."""
        self.folder = folder
        self.errors: list[tuple[int, BaseException]] = []
        self.blocks = [block for f in files for block in _blocks(f)]
        self._next = iter(enumerate(self.blocks))
        self._lock = threading.Lock()
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise  # Python's own holds the interpreter meanwhile
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
                found = None if self.errors else next(self._next, None)
            if found is None:
                return
            yield found

    def fail(self, number: int, error: BaseException) -> None:
        """Something went wrong in block `number` (-1: before all others)."""
        with self._lock:
            self.errors.append((number, error))

    def ended(self, block: Block) -> Span | None:
        """Count a block as done; its span where this was the last one of it."""
        with self._lock:
            block.span.left -= 1
            return None if block.span.left else block.span

    def await_end(self, worker: threading.Thread) -> None:
        """Wait for a thread; an interrupt stops the work, and is raised when all threads have ended."""
        while worker.is_alive():
            try:
                worker.join()
            except BaseException as error:
                self.fail(-1, error)

    def close(self) -> None:
        """Close the files; the mappings end with the last view of them."""
        self._arrays.clear()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def read(self, file: WeightFile, piece: np.ndarray, at: int) -> None:
        """Fill u8[n] with the file's bytes from `at` on; LlmcError E106 where there are fewer."""
        view, done = piece.data, 0
        while done < len(view):
            try:
                got = os.preadv(self._fds[file.file], [view[done:]], at + done)
            except OSError as error:
                raise _unreadable(file, error.errno) from None
            if not got:
                raise _shorter(file)
            done += got

    def bring(self, block: Block) -> np.ndarray:
        """The block as it lies in memory, u8[n], its pages there; LlmcError E106 where they cannot be had."""
        fd = self._fds[block.file.file]
        self._check_size(block.file, block.end)
        for at in range(block.begin, block.end, _AHEAD):
            os.posix_fadvise(fd, at, min(_AHEAD, block.end - at), os.POSIX_FADV_WILLNEED)
        status = self._advise(block.file, block.begin, block.end, _POPULATE_READ)
        if status not in (0, errno.EINVAL):  # EINVAL: a kernel that does not know it; the pages come when touched
            self._check_size(block.file, block.end)
            raise _unreadable(block.file, errno.EIO if status == errno.EFAULT else status)
        return self._arrays[block.file.file][block.begin : block.end]

    def place(self, span: Span) -> tuple[int, int]:
        """The address of a mapped span, and its size up to the end of its last page."""
        return self._arrays[span.file.file].ctypes.data + span.begin, _pages(span.end - span.begin)

    def drop(self, span: Span) -> None:
        """Take a span's pages out of this process; they stay in the page cache. All at the end would cost time."""
        self._advise(span.file, span.begin, span.end, _DONT_NEED)

    def _advise(self, file: WeightFile, begin: int, end: int, what: int) -> int:
        begin -= begin % mmap.PAGESIZE
        failed = self._madvise(self._arrays[file.file].ctypes.data + begin, end - begin, what)
        return ctypes.get_errno() if failed else 0

    def _map(self, file: WeightFile) -> np.ndarray:
        self._check_size(file, file.bytes)
        try:
            return np.frombuffer(mmap.mmap(self._fds[file.file], file.bytes, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise _unreadable(file, error.errno) from None

    def _check_size(self, file: WeightFile, end: int) -> None:
        if os.fstat(self._fds[file.file]).st_size < end:
            raise _shorter(file)


def _blocks(file: WeightFile) -> Iterator[Block]:
    """Blocks and spans of one file: a span is whole blocks and begins with a page."""
    unit = math.lcm(file.block, mmap.PAGESIZE)
    size = max(1, SPAN // unit) * unit
    span = Span(file, 0, 0)
    for index, begin in enumerate(range(0, file.bytes, file.block)):
        if begin % size == 0:
            span = Span(file, begin, min(begin + size, file.bytes))
        span.left += 1
        yield Block(file, index, begin, min(begin + file.block, file.bytes), span)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _shorter(file: WeightFile) -> LlmcError:
    return LlmcError("E106", f"{file.file} became shorter while it was read", REMEDY)


def _unreadable(file: WeightFile, number: int | None) -> LlmcError:
    return LlmcError("E106", f"{file.file} cannot be read: {os.strerror(number or 0)}", "copy the artifact again")
