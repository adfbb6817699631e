"""Multithreaded upload of weights from their files to the GPU, with optional hash checks. `weight_copy` implements the
two methods of copying.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from llmc_runtime.device.gpu.driver import GpuDriver
from llmc_runtime.device.gpu.upload_work import Work
from llmc_runtime.device.gpu.weight_copy import CopyMethod, MappedCopy, PinnedCopy, Refused, UploadJob
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import WeightFile

MAPPED, PINNED = "mapped", "pinned"


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
    cannot be read, and E114 or E203 for failures of the GPU. `Work` describes what happens if a file is truncated
    meanwhile.
    """
    start = time.perf_counter()
    fallback_reason = ""
    if method == MAPPED:
        work = Work(folder, files, mapped=True)
        fallback_reason = _run(UploadJob(driver, work, addresses, check), enter, MappedCopy, threads)
        method = PINNED if fallback_reason else MAPPED
    if method == PINNED:
        work = Work(folder, files, mapped=False)
        _run(UploadJob(driver, work, addresses, check), enter, PinnedCopy, threads)
    seconds = time.perf_counter() - start
    return Upload(sum(f.bytes for f in files), seconds, _count(work, threads), method, fallback_reason)


def _count(work: Work, threads: int) -> int:
    return max(1, min(threads, len(work.blocks)))


def _run(job: UploadJob, enter: Callable[[], None], method: type[CopyMethod], threads: int) -> str:
    """Copy all blocks. Returns why the driver refused, or ""; raises the error of the first failing block."""
    work = job.work
    workers = [_Worker(job, enter, method) for _ in range(_count(work, threads))]
    try:
        for worker in workers:
            worker.start()
    except BaseException as error:
        work.fail(-1, error)
    for worker in workers:
        work.join(worker)
    work.close()
    errors = sorted(work.errors, key=lambda e: (isinstance(e[1], Refused), e[0]))
    if errors and not isinstance(errors[0][1], Refused):
        raise errors[0][1]
    return str(errors[0][1]) if errors else ""


class _Worker(threading.Thread):
    """An upload thread with its own stream."""

    def __init__(self, job: UploadJob, enter: Callable[[], None], method: type[CopyMethod]) -> None:
        super().__init__(name="upload", daemon=True)
        self._job, self._enter, self._method = job, enter, method

    def run(self) -> None:
        driver, work = self._job.driver, self._job.work
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
                for index, block in work:
                    number = index
                    copier.block(block)
                driver.ok(driver.synchronize(stream))
        except BaseException as error:
            work.fail(number, error)
