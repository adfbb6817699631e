"""A rank's place in a group of linked GPUs: the memory that the others write to, and theirs, to which it writes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

import numpy as np

from llmc_runtime.device.device import Member, group_ended
from llmc_runtime.device.gpu.device_group import USE_NCCL, DeviceGroup
from llmc_runtime.device.gpu.device_memory import Pinned
from llmc_runtime.device.gpu.driver import GpuDriver
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.group_memory import DATA, LIMIT_WORD, MAX_PEERS, PEERS_WORD, RANK_WORD, STATUS_WORD

LIMIT_SECONDS = 30.0  # seconds that a kernel waits for another rank at most
_STATUS_BYTES = 64


class GpuGroup(DeviceGroup):
    """A group whose kernels write to the memory of the other ranks.

    The status of the group is an i32 in pinned host memory, which kernels read while they wait: 0, or an errno once the
    group has ended. `address` is that of this rank's memory, 0 until `share`.
    """

    needs_access = True
    abi = ""

    def __init__(self, driver: GpuDriver, member: Member) -> None:
        """Raises LlmcError E112 if there are more ranks than kernels support."""
        if member.ranks > MAX_PEERS:
            cause = f"the artifact has {member.ranks} ranks; a group on GPUs has at most {MAX_PEERS}"
            raise LlmcError("E112", cause, "compile with a smaller --tensor-parallel-size")
        super().__init__(member)
        self.address = 0
        self._driver = driver
        self._limit = min(LIMIT_SECONDS, member.limit)
        self._peers: list[int] = []
        self._lock = threading.Lock()
        self._pinned: Pinned | None = None

    def start(self, enter: Callable[[], None]) -> None:
        """Allocate the status."""
        enter()
        self._pinned = Pinned(self._driver, _STATUS_BYTES)
        self._pinned.array[:] = 0

    def share(self, address: int) -> None:
        """Make the memory at this address, a whole allocation, available to the other ranks by its `handle`."""
        self.address, self.handle = address, self._driver.share(address)

    def connect(self, handles: Sequence[bytes]) -> np.ndarray | None:
        """Open the memories of the other ranks and return the header of this rank's own, u8[DATA]; None if no program
        uses it. Raises LlmcError E115 if the driver refuses.
        """
        if not self.handle:
            return None
        assert self._pinned is not None
        header = np.zeros(DATA // 8, np.int64)
        header[RANK_WORD], header[LIMIT_WORD] = self.member.rank, int(self._limit * 1e9)
        header[STATUS_WORD] = self._pinned.address
        for rank, handle in enumerate(handles):
            header[PEERS_WORD + rank] = self.address if rank == self.member.rank else self._open(rank, handle)
        return header.view(np.uint8)

    def _open(self, rank: int, handle: bytes) -> int:
        """Map the memory of another rank, and return its address."""
        status, *values = self._driver.open_shared(handle)
        if status:
            cause = f"the memory of rank {rank} cannot be opened: {self._driver.name(int(status))}"
            raise LlmcError("E115", cause, f"run all ranks in one container, with --ipc=host; or {USE_NCCL}")
        self._peers.append(int(values[0]))
        return self._peers[-1]

    def check(self) -> None:
        """Raise LlmcError E119 if the group has ended."""
        status = 0 if self._pinned is None else int(self._pinned.array[:4].view(np.int32)[0])
        if status == errno.ETIMEDOUT:
            raise group_ended(f"rank {self.member.rank} waited longer than {self._limit:g} s for another rank")
        if status:
            raise group_ended("a rank has ended")

    def cancel(self) -> None:
        """End the group: kernels that wait give up within milliseconds."""
        with self._lock:
            if self._pinned is not None and not self._pinned.array[:4].any():
                self._pinned.array[:4].view(np.int32)[0] = errno.ECANCELED

    def close(self) -> None:
        """Close the memories of the other ranks and free the status, ignoring errors."""
        for address in self._peers:
            self._driver.close_shared(address)
        self._peers.clear()
        with self._lock:
            if self._pinned is not None:
                self._pinned.free()
                self._pinned = None
