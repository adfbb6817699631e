"""Weights from their files to the GPU by several threads, hashed on the way; what a thread does is in cuda_ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from llmc_runtime.device.cuda_names import Cuda
from llmc_runtime.device.cuda_ways import MappedWay, PinnedWay, Refused, Trip, Way
from llmc_runtime.device.cuda_work import Work
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import WeightFile

MAPPED, PINNED = "mapped", "pinned"


@dataclass(frozen=True)
class Upload:
    """What was copied, how long it took, with how many threads, and which way.

    `way`: "mapped" (hashed in the page cache, copied from there) or "pinned" (read into pinned memory, copied from
    there); `why` it was "pinned", where "mapped" was asked for.
    """

    nbytes: int
    seconds: float
    threads: int
    way: str
    why: str = ""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        """Such as "weights 15.0 GB/s (16 threads, mapped)"."""
        why = f": {self.why}" if self.why else ""
        return f"weights {self.rate / 1e9:.1f} GB/s ({self.threads} threads, {self.way}{why})"


def upload(
    cuda: Cuda,
    enter: Callable[[], None],
    folder: Folder,
    files: Sequence[WeightFile],
    addresses: Mapping[str, int],
    *,
    check: bool,
    threads: int,
    way: str = MAPPED,
) -> Upload:
    """Copy every file to its address, all of it there when this returns; `enter` makes a thread use the GPU's context.

    Where the driver refuses to register mapped memory, everything goes the other way, and the answer says why.
    LlmcError E107 where `check` finds a block that differs from its hash (the first such), E106 where a file cannot be
    read, E114 and E203 from the GPU. See `Work` for files that are cut short meanwhile.
    """
    began = time.perf_counter()
    why = ""
    if way == MAPPED:
        work = Work(folder, files, mapped=True)
        why = _run(Trip(cuda, work, addresses, check), enter, MappedWay, threads)
        way = PINNED if why else MAPPED
    if way == PINNED:
        work = Work(folder, files, mapped=False)
        _run(Trip(cuda, work, addresses, check), enter, PinnedWay, threads)
    seconds = time.perf_counter() - began
    return Upload(sum(f.bytes for f in files), seconds, _count(work, threads), way, why)


def _count(work: Work, threads: int) -> int:
    return max(1, min(threads, len(work.blocks)))


def _run(trip: Trip, enter: Callable[[], None], way: type[Way], threads: int) -> str:
    """Do all the work; the driver's reason where it refused. Raises the error of the first block that has one."""
    work = trip.work
    workers = [_Worker(trip, enter, way) for _ in range(_count(work, threads))]
    try:
        for worker in workers:
            worker.start()
    except BaseException as error:
        work.fail(-1, error)
    for worker in workers:
        work.await_end(worker)
    work.close()
    told = sorted(work.errors, key=lambda e: (isinstance(e[1], Refused), e[0]))
    if told and not isinstance(told[0][1], Refused):
        raise told[0][1]
    return str(told[0][1]) if told else ""


class _Worker(threading.Thread):
    """One thread with its own stream."""

    def __init__(self, trip: Trip, enter: Callable[[], None], way: type[Way]) -> None:
        super().__init__(name="upload", daemon=True)
        self._trip, self._enter, self._way = trip, enter, way

    def run(self) -> None:
        cuda, work = self._trip.cuda, self._trip.work
        number = 0
        try:
            with ExitStack() as held:
                self._enter()
                stream = cuda.stream()
                held.callback(cuda.cu.cuStreamDestroy, stream)
                way = self._way(self._trip, stream)
                held.callback(way.close)
                held.callback(cuda.cu.cuStreamSynchronize, stream)  # copies may be under way after an error, too
                way.open()
                for found, block in work:
                    number = found
                    way.block(block)
                cuda.ok(cuda.cu.cuStreamSynchronize(stream))
        except BaseException as error:
            work.fail(number, error)
