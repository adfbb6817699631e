"""The CPU as a device: kernels are shared objects, a step is one C call on a pool of threads; no Python per launch."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from llmc_runtime.artifact import Artifact, Tensor
from llmc_runtime.device.device import Device, Memory, Run
from llmc_runtime.device.host import default_threads, free_memory, this_host
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.program import Program

ABI = "cpu-1"
ALIGN = 64
_HUGE = 4 << 20
_NORESERVE = 0x4000  # of Linux; Python does not name it


class CpuDevice(Device):
    """The cores of this process. `threads`: of the pool, the caller's included (default: physical cores)."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or default_threads()
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._pools: dict[str, tuple[ctypes.CDLL, ctypes.c_void_p]] = {}
        self._kept: list[object] = []

    def alloc(self, nbytes: int) -> Memory:
        size = max(1, nbytes)
        try:
            area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, ValueError, OverflowError):
            cause = f"cannot allocate {nbytes} bytes; {self.free_memory()} are free"
            raise LlmcError("E203", cause, "give the KV cache less memory, or stop other programs") from None
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                area.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without huge pages: the memory is as good, only slower
                pass
        host = np.frombuffer(area, np.uint8)[:nbytes]
        return Memory(host.ctypes.data, nbytes, host)

    def write(self, memory: Memory, begin: int, data: np.ndarray) -> None:
        memory.host[begin : begin + data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def zero(self, memory: Memory, begin: int, end: int) -> None:
        memory.host[begin:end] = 0

    def repeat(self, memory: Memory, tile: np.ndarray, at: int) -> None:
        out, done = memory.host, 0
        while done < len(out):
            piece = tile[at : at + len(out) - done]
            out[done : done + len(piece)] = piece
            done, at = done + len(piece), 0

    def fetch(self, memory: Memory, begin: int, end: int) -> np.ndarray:
        return memory.host[begin:end]

    def read(self, memory: Memory) -> np.ndarray:
        return memory.host.copy()

    def place(self, artifact: Artifact, names: Iterable[str]) -> Mapping[str, int]:
        """The mapped files' own pages."""
        return {name: self._place(artifact.tensors[name]) for name in names}

    def _place(self, tensor: Tensor) -> int:
        """A tensor that a foreign writer left unaligned is copied."""
        data = tensor.data
        if data.ctypes.data % ALIGN:
            memory = self.alloc(data.nbytes)
            memory.host[:] = data
            data = memory.host
        self._kept.append(data)
        return data.ctypes.data

    def load(self, artifact: Artifact) -> None:
        for kernel in artifact.manifest.kernels:
            if kernel.abi != ABI:
                cause = f"kernel {kernel.file} has the calling convention {kernel.abi!r}; this runtime knows {ABI!r}"
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

    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        if program.step is None:
            cause = f"program {program.name} has no step function, which the CPU needs"
            raise LlmcError("E113", cause, "recompile with --target cpu:native")
        unit, pool = self._pool(program.step[0])
        run = self._symbol(unit, program.step[1])
        run.restype = ctypes.c_int
        run.argtypes = [ctypes.c_void_p] * 4
        table = (ctypes.c_void_p * len(program.launches))(*[self._address(*k) for k in program.kernel_table])
        buffers = (ctypes.c_void_p * len(addresses))(*addresses)
        args = (pool, ctypes.c_void_p(ctypes.addressof(table)), ctypes.c_void_p(ctypes.addressof(buffers)))
        values = ctypes.c_void_p(symbols.ctypes.data)
        self._kept += [table, buffers, symbols]

        def step() -> None:
            status = run(*args, values)
            if status:
                cause = f"program {program.name} failed: {os.strerror(status)}"
                raise LlmcError("E114", cause, "run llmc verify on the artifact")

        return step

    def _pool(self, key: str) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
        """The threads of one step unit, shared by its programs: they never run at the same time."""
        if key not in self._pools:
            unit = self._libraries[key]
            opened = self._symbol(unit, "llmc_open")
            opened.restype, opened.argtypes = ctypes.c_void_p, [ctypes.c_int]
            pool = opened(self.threads)
            if not pool:
                cause = f"a pool of {self.threads} threads cannot be started"
                raise LlmcError("E203", cause, "use fewer threads")
            self._pools[key] = unit, ctypes.c_void_p(pool)
        return self._pools[key]

    def _address(self, key: str, entry: str) -> int:
        return ctypes.cast(self._symbol(self._libraries[key], entry), ctypes.c_void_p).value or 0

    @staticmethod
    def _symbol(library: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
        try:
            return library[name]
        except AttributeError:
            cause = f"{os.path.basename(library._name)} has no function {name!r}"
            raise LlmcError("E112", cause, "recompile the artifact") from None

    def free_memory(self) -> int:
        return free_memory()

    def close(self) -> None:
        """Ends the pools' threads; the libraries stay mapped, as other artifacts may share them."""
        for unit, pool in self._pools.values():
            close = self._symbol(unit, "llmc_close")
            close.restype, close.argtypes = None, [ctypes.c_void_p]
            close(pool)
        self._pools.clear()
        self._libraries.clear()
        self._kept.clear()

    def describe(self) -> Mapping[str, object]:
        host = this_host()
        return {"name": self.name, "model": host.model, "machine": host.machine, "threads": self.threads}
