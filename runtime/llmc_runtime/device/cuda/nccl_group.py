"""A rank's place in a group of GPUs that need not be linked: NCCL exchanges the results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmc_runtime.device.cuda.nccl import Nccl
from llmc_runtime.device.device import Member, group_ended
from llmc_runtime.device.gpu.device_group import DeviceGroup, LibraryCall
from llmc_runtime.format.errors import LlmcError, as_llmc_error
from llmc_runtime.format.nccl_call import ABI, ALL_REDUCE, DTYPES, NcclCall

INIT_SECONDS = 60.0  # seconds in which all ranks connect
_POLL_SECONDS = 0.02  # seconds between two looks at the group while NCCL connects
_CALL_SECONDS = 1.0  # seconds that a call may take once the group has ended
_ABORT_SECONDS = 10.0  # seconds that `close` waits for NCCL


class NcclGroup(DeviceGroup):
    """A group whose collectives are calls of NCCL. `handle` is the group's id on rank 0, empty on others.

    Raises LlmcError E143 if the library cannot be used.
    """

    needs_access = False
    abi = ABI

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self._nccl = Nccl()
        self._comm = 0  # 0: not connected
        self._ended = False  # whether the communicator must not be used any more
        self._state = threading.Lock()  # protects the two
        self._calling = threading.Lock()  # held during calls with the communicator
        self._aborting: threading.Thread | None = None
        self._limit = min(INIT_SECONDS, member.limit)

    def start(self, enter: Callable[[], None]) -> None:
        """Make the group's id on rank 0."""
        self._enter = enter
        if self.member.rank == 0:
            self.handle = self._nccl.unique_id()

    def load_call(self, description: bytes, where: str) -> LibraryCall:
        """Return the call that a kernel file describes."""
        return _Call(self, NcclCall.load(description, where))

    def connect(self, handles: Sequence[bytes]) -> None:
        """Connect all ranks. Raises LlmcError E119 if the group ends meanwhile, E143 if NCCL fails or is too slow."""
        failures: list[LlmcError] = []

        def init() -> None:
            try:
                self._enter()
                self._set(self._nccl.init(self.member.ranks, handles[0], self.member.rank))
            except Exception as error:
                failures.append(as_llmc_error(error))

        # NCCL waits for the other ranks without a limit.
        thread = threading.Thread(target=init, name="llmc-nccl-init", daemon=True)
        thread.start()
        until = time.monotonic() + self._limit
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if self._ended:
                raise group_ended("a rank has ended")
            if time.monotonic() > until:
                cause = f"rank {self.member.rank} could not connect to the others by NCCL within {self._limit:g} s"
                raise LlmcError("E143", cause, "set NCCL_DEBUG=INFO to see what it waits for")
        if failures:
            raise failures[0]

    def _set(self, comm: int) -> None:
        """Keep the communicator, or abort it if the group has ended."""
        with self._state:
            if not self._ended:
                self._comm = comm
                return
        self._nccl.abort(comm)

    def call(self, call: NcclCall, operand: int, result: int, count: int, stream: Any) -> None:
        """Submit a collective to the stream. Raises LlmcError E119 or E143 if that fails."""
        function = self._nccl.all_reduce if call.function == ALL_REDUCE else self._nccl.all_gather
        with self._calling:
            self._check_ended()
            function(self._comm, operand, result, count, DTYPES[call.dtype], stream)

    def check(self) -> None:
        """Raise LlmcError E119 if the group has ended, and E143 if NCCL has failed in the background."""
        with self._calling:
            self._check_ended()
            if self._comm:
                self._nccl.check(self._comm)

    def _check_ended(self) -> None:
        if self._ended:
            raise group_ended("a rank has ended")

    def cancel(self) -> None:
        """End the group. Another thread aborts the communicator, which takes until the graphs are destroyed."""
        with self._state:
            if self._ended:
                return
            self._ended = True
            if self._comm:
                self._aborting = threading.Thread(target=self._abort, name="llmc-nccl-abort", daemon=True)
                self._aborting.start()

    def _abort(self) -> None:
        """Abort the communicator after the call under way, unless that waits for other ranks."""
        idle = self._calling.acquire(timeout=_CALL_SECONDS)
        if idle:
            self._calling.release()  # later calls see that the group has ended
        self._nccl.abort(self._comm)

    def close(self) -> None:
        """Abort the communicator, after the graphs were destroyed. Healthy groups end in the same way, because NCCL
        destroys a communicator only together with the other ranks.
        """
        self.cancel()
        if self._aborting is not None:
            self._aborting.join(_ABORT_SECONDS)


class _Call(LibraryCall):
    """A collective of the group."""

    def __init__(self, group: NcclGroup, call: NcclCall) -> None:
        self._group, self._call = group, call

    def __call__(self, cells: np.ndarray, stream: Any) -> tuple[int]:
        operand, result, count = cells.tolist()
        self._group.call(self._call, operand, result, count, stream)
        return (0,)
