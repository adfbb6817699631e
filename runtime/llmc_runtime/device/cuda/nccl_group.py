"""A rank's place in a group of GPUs that need not be linked: NCCL exchanges the results.

NCCL is called through its C interface.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmc_runtime.device.device import Member, group_ended
from llmc_runtime.device.gpu.device_group import DeviceGroup, LibraryCall
from llmc_runtime.format.errors import LlmcError, as_llmc_error
from llmc_runtime.format.nccl_call import ABI, ALL_REDUCE, DTYPES, NcclCall

INIT_SECONDS = 60.0  # seconds in which all ranks connect
_POLL_SECONDS = 0.02  # seconds between two looks at the group while NCCL connects
_CALL_SECONDS = 1.0  # seconds that a call may take once the group has ended
_ABORT_SECONDS = 10.0  # seconds that `close` waits for NCCL
LIBRARY = "libnccl.so.2"
MIN_VERSION = 21800  # 10000 * major + 100 * minor + patch
_ID_BYTES = 128
_REMOTE, _IN_PROGRESS = 6, 7  # ncclResult_t
_SUM = 0  # ncclRedOp_t
_INSTALL = "pip install nvidia-nccl-cu13 (nvidia-nccl-cu12, if the driver supports CUDA 12 only)"
_CHECK = "set NCCL_DEBUG=WARN for its reasons, which may be a small /dev/shm or a network interface"


class _UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


class Nccl:
    """The library. Raises LlmcError E143 if it cannot be loaded, or is too old."""

    def __init__(self) -> None:
        self._lib = lib = _load()
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        lib.ncclCommInitRank.argtypes = [pointer, number, _UniqueId, number]
        lib.ncclCommAbort.argtypes = [pointer]
        lib.ncclCommGetAsyncError.argtypes = [pointer, pointer]
        lib.ncclAllReduce.argtypes = [pointer, pointer, count, number, number, pointer, pointer]
        lib.ncclAllGather.argtypes = [pointer, pointer, count, number, pointer, pointer]
        lib.ncclGetErrorString.argtypes, lib.ncclGetErrorString.restype = [number], ctypes.c_char_p
        lib.ncclGetLastError.argtypes, lib.ncclGetLastError.restype = [pointer], ctypes.c_char_p

    def unique_id(self) -> bytes:
        """Return the id of a new group, by which its ranks find each other."""
        group = _UniqueId()
        self._ok("ncclGetUniqueId", self._lib.ncclGetUniqueId(ctypes.byref(group)))
        return bytes(group)

    def init(self, ranks: int, group: bytes, rank: int) -> int:
        """Return the communicator of a rank once all ranks of the group have called this function.

        The GPU must be current. Raises LlmcError E143 if the id is not one of NCCL, and as `all_reduce` does.
        """
        if len(group) != _ID_BYTES:
            raise LlmcError("E143", f"rank 0 sent an NCCL id of {len(group)} bytes", "use one version of llmc-aot")
        comm = ctypes.c_void_p()
        group_id = _UniqueId.from_buffer_copy(group)
        self._ok("ncclCommInitRank", self._lib.ncclCommInitRank(ctypes.byref(comm), ranks, group_id, rank))
        return comm.value or 0

    def all_reduce(self, comm: int, operand: int, result: int, count: int, dtype: int, stream: Any) -> None:
        """Sum `count` elements over the ranks, in the stream.

        Raises LlmcError E119 if another rank is the cause of a failure, E143 for others.
        """
        status = self._lib.ncclAllReduce(operand, result, count, dtype, _SUM, comm, int(stream))
        self._ok("ncclAllReduce", status, comm)

    def all_gather(self, comm: int, operand: int, result: int, count: int, dtype: int, stream: Any) -> None:
        """Concatenate `count` elements of every rank, in the stream. Raises LlmcErrors as `all_reduce` does."""
        status = self._lib.ncclAllGather(operand, result, count, dtype, comm, int(stream))
        self._ok("ncclAllGather", status, comm)

    def check(self, comm: int) -> None:
        """Raise an LlmcError as `all_reduce` does if work in the background has failed."""
        error = ctypes.c_int()
        status = self._lib.ncclCommGetAsyncError(comm, ctypes.byref(error)) or error.value
        if status != _IN_PROGRESS:
            self._ok("a collective", status, comm)

    def abort(self, comm: int) -> None:
        """Let kernels that wait for other ranks give up, and destroy the communicator, ignoring errors.

        Returns after graphs with its collectives have been destroyed.
        """
        self._lib.ncclCommAbort(comm)

    def _ok(self, call: str, status: int, comm: int | None = None) -> None:
        if not status:
            return
        texts = (self._lib.ncclGetErrorString(status), self._lib.ncclGetLastError(comm))
        cause = ": ".join([f"NCCL: {call} failed", *(t.decode(errors="replace").strip() for t in texts if t)])
        raise group_ended(cause) if status == _REMOTE else LlmcError("E143", cause, _CHECK)


def _load() -> ctypes.CDLL:
    """Load the first NCCL library that can be loaded. Raises LlmcError E143 if there is none, or if it is too old."""
    failures = []
    for path in _paths():
        try:
            lib = ctypes.CDLL(path)
            version = ctypes.c_int()
            lib.ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError) as error:
            failures.append(str(error))
            continue
        if version.value < MIN_VERSION:
            cause = f"{path} is NCCL {_dotted(version.value)}; ranks need {_dotted(MIN_VERSION)} or newer"
            raise LlmcError("E143", cause, _INSTALL)
        return lib
    cause = f"the artifact's ranks use NCCL, which cannot be loaded: {'; '.join(failures)}"
    raise LlmcError("E143", cause, f"{_INSTALL}, or add the folder of {LIBRARY} to LD_LIBRARY_PATH")


def _paths() -> Iterator[str]:
    """Yield the library of an installed package nvidia-nccl-cu13 or -cu12, and its name on the library path."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, "lib", LIBRARY)).is_file():
            yield str(path)
    yield LIBRARY


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


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
