"""NCCL through its C interface: loading the library, and its calls."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmc_runtime.device.device import group_ended
from llmc_runtime.format.errors import LlmcError

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
