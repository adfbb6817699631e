"""Multithreaded upload of weights from their files to the GPU, with optional hash checks. See cuda_ways for the two
methods of copying.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from llmc_runtime.device.cuda.driver import Cuda
from llmc_runtime.device.cuda.upload_work import Work
from llmc_runtime.device.cuda.weight_copy import MappedWay, PinnedWay, Refused, Trip, Way
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import WeightFile

MAPPED, PINNED = "mapped", "pinned"


@dataclass(frozen=True)
class Upload:
    """Statistics of an upload: bytes, seconds, number of threads, and the method of copying.

    `way` is "mapped" (hashed in and copied from the page cache) or "pinned" (read into pinned memory and copied from
    there). If "mapped" was requested and not possible, `why` is the reason.
    """

    nbytes: int
    seconds: float
    threads: int
    way: str
    why: str = ""

    @property
    def rate(self) -> float:
        """Throughput in bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        """For example "weights 15.0 GB/s (16 threads, mapped)"."""
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
    """Copy every file to its device address; all copies have completed on return.

    `addresses` maps file names to device addresses, and `enter` makes the GPU's context current in the calling thread.
    If the driver refuses to register mapped memory, everything is copied through pinned memory, and the result gives
    the reason. Raises LlmcError E107 for the first block that differs from its hash (with `check`), E106 if a file
    cannot be read, and E114 or E203 for failures of the GPU. `Work` describes what happens if a file is truncated
    meanwhile.
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
    """Copy all blocks. Returns the driver's reason if it refused, else ""; raises the error of the first failing
    block.
    """
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
    """An upload thread with a stream of its own."""

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
                held.callback(cuda.cu.cuStreamSynchronize, stream)  # after an error, copies may still be running
                way.open()
                for found, block in work:
                    number = found
                    way.block(block)
                cuda.ok(cuda.cu.cuStreamSynchronize(stream))
        except BaseException as error:
            work.fail(number, error)
