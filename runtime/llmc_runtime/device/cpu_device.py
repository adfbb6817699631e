"""The CPU device. Kernels are shared objects, and a step is one C call that runs on a pool of threads."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from llmc_runtime.artifact import Artifact, Tensor
from llmc_runtime.device.device import Device, Member, Memory, Run, group_ended
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.program import Program
from llmc_runtime.heartbeat import SHARED_BYTES
from llmc_runtime.host_info import default_threads, free_memory, this_host

ABI = "cpu-1"
ALIGN = 64  # bytes; the alignment of weights that kernels expect
_HUGE = 4 << 20  # bytes from which memory is requested in huge pages
_ROOM = 4  # numbers that a step unit's llmc_room writes
_NORESERVE = 0x4000  # MAP_NORESERVE on Linux, which the mmap module does not define


class CpuDevice(Device):
    """The CPU cores available to this process.

    `threads` is the size of the thread pool, including the calling thread. The default is the number of physical cores.
    `member` is its place in a group of ranks.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None, member: Member | None = None) -> None:
        self.threads = threads or default_threads()
        self._member = member
        self._group: CpuGroup | None = None
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._units: dict[str, Unit] = {}  # the step units of the loaded artifacts, by hash
        self._pools: list[tuple[Unit, ctypes.c_void_p]] = []
        self._references: list[object] = []  # keeps alive what the kernels access by address

    def alloc(self, nbytes: int) -> Memory:
        """Allocate zeroed memory; raise LlmcError E203 if there is not enough. Large areas use huge pages."""
        size = max(1, nbytes)
        try:
            area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError, OverflowError):
            cause = f"cannot allocate {nbytes} bytes; {self.free_memory()} are free"
            raise LlmcError("E203", cause, "reduce --kv-cache-memory-bytes, or stop other programs") from None
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                area.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # no huge pages: the memory is usable, but slower
                pass
        host = np.frombuffer(area, np.uint8)[:nbytes]
        return Memory(host.ctypes.data, nbytes, host)

    def write(self, memory: Memory, begin: int, data: np.ndarray) -> None:
        """Copy the array's bytes to offset `begin`."""
        memory.host[begin : begin + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def zero(self, memory: Memory, begin: int, end: int) -> None:
        """Zero the bytes [begin, end)."""
        memory.host[begin:end] = 0

    def copy(self, target: Memory, at: int, source: Memory, begin: int, nbytes: int) -> None:
        """Copy bytes from one memory to another."""
        target.host[at : at + nbytes] = source.host[begin : begin + nbytes]

    def repeat(self, memory: Memory, tile: np.ndarray, at: int) -> None:
        """Fill the memory with repetitions of `tile`, starting at byte `at` of the tile."""
        out, done = memory.host, 0
        while done < len(out):
            piece = tile[at : at + len(out) - done]
            out[done : done + len(piece)] = piece
            done, at = done + len(piece), 0

    def fetch(self, memory: Memory, begin: int, end: int) -> np.ndarray:
        """Return a view of the bytes [begin, end), without a copy."""
        return memory.host[begin:end]

    def read(self, memory: Memory) -> np.ndarray:
        """Return a copy of the memory."""
        return memory.host.copy()

    def place(self, artifact: Artifact, names: Iterable[str]) -> Mapping[str, int]:
        """Return the addresses of weights. They stay in the mapped file's pages unless they are misaligned."""
        return {name: self._place(artifact.tensors[name]) for name in names}

    def _place(self, tensor: Tensor) -> int:
        """Return the tensor's address, copying it first if its file does not align it to `ALIGN` bytes."""
        data = tensor.data
        if data.ctypes.data % ALIGN:
            memory = self.alloc(data.nbytes)
            memory.host[:] = data
            data = memory.host
        self._references.append(data)
        return data.ctypes.data

    def load(self, artifact: Artifact) -> None:
        """Load the kernels' shared objects; raise LlmcError E112 if one has another ABI or cannot be loaded."""
        for kernel in artifact.manifest.kernels:
            if kernel.abi != ABI:
                cause = f"kernel {kernel.file} has the calling convention {kernel.abi!r}; this runtime supports {ABI!r}"
                raise LlmcError("E112", cause, "upgrade llmc-aot, or recompile the artifact")
            path = os.path.abspath(artifact.root / kernel.file)
            try:
                self._libraries[kernel.hash] = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
            except OSError as error:
                cause = f"kernel {kernel.file} cannot be loaded: {str(error)[:200]}"
                remedy = "recompile on this machine (--target cpu:native)"
                if os.path.exists(path) and os.statvfs(path).f_flag & os.ST_NOEXEC:
                    remedy = "copy the artifact to a file system that is not mounted noexec"
                raise LlmcError("E112", cause, remedy) from None
        for key in {p.step[0] for p in artifact.programs if p.step} - self._units.keys():
            self._units[key] = Unit(self._libraries[key])

    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        """Return a function that runs the program once. Raises LlmcError E113 if the program has no step function, or
        is for another number of ranks.

        The returned function raises LlmcError E114 if the step reports an error, and E119 if the group has ended.
        """
        if program.step is None:
            cause = f"program {program.name} has no step function, which the CPU needs"
            raise LlmcError("E113", cause, "recompile with --target cpu:native")
        if program.ranks != (1 if self._member is None else self._member.ranks):
            cause = f"program {program.name} is for a group of {program.ranks} ranks"
            raise LlmcError("E113", cause, "open it with LLM, llmc-run or llmc-serve")
        unit = self._units[program.step[0]]
        pool = self._pool(unit)
        run = self._symbol(unit.dll, program.step[1])
        run.restype = ctypes.c_int
        run.argtypes = [ctypes.c_void_p] * 4
        table = (ctypes.c_void_p * len(program.launches))(*[self._address(*k) for k in program.kernel_table])
        buffers = (ctypes.c_void_p * len(addresses))(*addresses)
        args = (pool, ctypes.c_void_p(ctypes.addressof(table)), ctypes.c_void_p(ctypes.addressof(buffers)))
        values = ctypes.c_void_p(symbols.ctypes.data)
        self._references += [table, buffers, symbols]

        def step() -> None:
            status = run(*args, values)
            if status:
                cause = f"program {program.name} failed: {os.strerror(status)}"
                raise LlmcError("E114", cause, "run llmc verify on the artifact")
            if self._group is not None:
                self._group.check()

        return step

    def _pool(self, unit: Unit) -> ctypes.c_void_p:
        """Return the thread pool of a step unit. Its programs, and those of other units with the same layout, share the
        pool: they never run concurrently.
        """
        for owner, pool in self._pools:
            if owner is unit or (unit.layout and owner.layout == unit.layout):
                return pool
        pool = self._open_pool(unit)
        self._pools.append((unit, pool))
        if self._member is not None:
            if self._group is not None:
                cause = "the ranks of artifacts that different versions of llmc compiled cannot run together"
                raise LlmcError("E112", cause, "compile the model and the draft model again")
            self._group = CpuGroup(unit.dll, pool, self.threads, self._member)
        return pool

    def _open_pool(self, unit: Unit) -> ctypes.c_void_p:
        """Return a new thread pool, with room for the steps of all loaded units of the same layout."""
        opened = self._symbol(unit.dll, "llmc_open_room" if unit.layout else "llmc_open")
        opened.restype = ctypes.c_void_p
        if unit.layout:
            rooms = zip(*(u.room for u in self._units.values() if u.layout == unit.layout))
            pool = opened(ctypes.c_int(self.threads), (ctypes.c_int64 * _ROOM)(*map(max, rooms)))
        else:
            pool = opened(ctypes.c_int(self.threads))
        if not pool:
            raise LlmcError("E203", f"a pool of {self.threads} threads cannot be started", "use fewer threads")
        return ctypes.c_void_p(pool)

    def _address(self, key: str, entry: str) -> int:
        return ctypes.cast(self._symbol(self._libraries[key], entry), ctypes.c_void_p).value or 0

    @staticmethod
    def _symbol(library: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
        try:
            return library[name]
        except AttributeError:
            cause = f"{os.path.basename(library._name)} has no function {name!r}"
            raise LlmcError("E112", cause, "recompile the artifact") from None

    def cancel(self) -> None:
        """End the group of ranks, if there is one."""
        if self._group is not None:
            self._group.cancel()

    def free_memory(self) -> int:
        """Return the number of bytes that can be allocated without swapping."""
        return free_memory()

    def close(self) -> None:
        """Stop the thread pools. The libraries stay mapped, because other artifacts may use them."""
        for unit, pool in self._pools:
            close = self._symbol(unit.dll, "llmc_close")
            close.restype, close.argtypes = None, [ctypes.c_void_p]
            close(pool)
        self._pools.clear()
        self._units.clear()
        self._group = None
        self._libraries.clear()
        self._references.clear()

    def describe(self) -> Mapping[str, object]:
        """Return the device name, CPU model, machine type and number of threads."""
        host = this_host()
        return {"name": self.name, "model": host.model, "machine": host.machine, "threads": self.threads}


class Unit:
    """The library of a step unit: what its steps need of a thread pool, as numbers, and the layout of its pools.

    Units of the same layout can share a pool. It is 0 for units of older compilers, which cannot.
    """

    def __init__(self, dll: ctypes.CDLL) -> None:
        self.dll, self.layout = dll, 0
        numbers = (ctypes.c_int64 * _ROOM)()
        with suppress(AttributeError, UnicodeDecodeError):  # the latter if the path is not UTF-8, too
            room = dll.llmc_room
            room.restype = ctypes.c_int64
            self.layout = int(room(numbers))
        self.room = tuple(numbers)


class CpuGroup:
    """Makes a thread pool of a step unit one rank of a group.

    Raises LlmcError E112 if the unit has no collectives, and E203 if there is too little memory.
    """

    def __init__(self, unit: ctypes.CDLL, pool: ctypes.c_void_p, threads: int, member: Member) -> None:
        self._member = member
        try:
            nbytes, group_size, join = unit.llmc_group_bytes, unit.llmc_group_size, unit.llmc_group_join
            self._error, self._fail = unit.llmc_group_error, unit.llmc_group_fail
        except AttributeError:
            raise LlmcError("E112", "the kernels cannot run as several ranks", "recompile the artifact") from None
        nbytes.restype = group_size.restype = ctypes.c_int64
        try:
            size = nbytes(member.ranks, threads)  # the same in all ranks
            os.ftruncate(member.memory, SHARED_BYTES + size)
            self._area = mmap.mmap(member.memory, size, offset=SHARED_BYTES)
        except OSError as error:
            cause = f"the memory of {member.ranks} ranks cannot be allocated: {error.strerror}"
            raise LlmcError("E203", cause, "stop other programs") from None
        self._address = ctypes.c_void_p(np.frombuffer(self._area, np.uint8).ctypes.data)
        self._group = ctypes.create_string_buffer(group_size())
        join.restype = None
        join.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 2 + [ctypes.c_int64]
        join(pool, self._group, self._address, member.rank, member.ranks, int(member.limit * 1e9))

    def check(self) -> None:
        """Raise LlmcError E119 if the group has ended."""
        error = self._error(self._address)
        if error == errno.ETIMEDOUT:
            raise group_ended(f"a rank did not finish its part of a step within {self._member.limit:g} s")
        if error:
            raise group_ended("a rank has ended")

    def cancel(self) -> None:
        """End the group; may be called from any thread."""
        self._fail(self._address, errno.ECANCELED)
