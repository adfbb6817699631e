"""The CUDA device: one NVIDIA GPU, driven through the driver API (cuda-bindings) on a single stream."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.cuda.device_array import CudaMemory
from llmc_runtime.device.cuda.device_memory import Ring, Slot
from llmc_runtime.device.cuda.driver import Cuda
from llmc_runtime.device.cuda.kernel_launch import CudaRun
from llmc_runtime.device.cuda.weight_upload import MAPPED, PINNED, Upload, upload
from llmc_runtime.device.device import Device, Event, Memory, Run
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import KernelFile, TargetInfo
from llmc_runtime.format.program import Program
from llmc_runtime.host_info import default_threads

ABI = "cuda-1"
ALIGN = 64  # bytes; the alignment of weights within their files
_UPLOADERS, _PLAIN_UPLOADERS = 16, 8  # maximum threads with and without hashing; more are not faster
_PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without opting in


class CudaDevice(Device):
    """A GPU, by default the first one visible to this process; `index` is its number among them.

    `threads` read, hash and upload weights (default: the number of physical cores, at most 16). With `careful`, graphs
    are disabled and every launch is synchronized, so that an error names the kernel that failed.

    Raises LlmcError E115 if there is no driver or no such GPU, E116 if the driver is too old, and E117 if the GPU
    cannot run binaries for `target`.
    """

    depth = 2
    share = 0.9
    separate = True
    replays = True
    number = 0

    def __init__(
        self, target: TargetInfo, threads: int | None = None, *, careful: bool = False, index: int = 0
    ) -> None:
        self._cuda = Cuda()
        self._careful = careful
        self.threads = min(threads or default_threads(), _UPLOADERS)
        self._local = threading.local()
        self._context: Any = None
        self._stream: Any = None
        self._ring: Ring | None = None
        self._memories: list[int] = []
        self._modules: list[Any] = []
        self._functions: dict[tuple[str, str], Any] = {}
        self._tiles: list[tuple[np.ndarray, Memory]] = []
        self._runs: list[CudaRun] = []
        self._upload: Upload | None = None
        cuda_, cu = self._cuda, self._cuda.cu
        if index and index >= (visible := int(cuda_.ok(cu.cuDeviceGetCount()))):
            cause = f"engine {index} needs a GPU of its own, and {visible} are visible: each engine uses one"
            raise LlmcError("E115", cause, f"use --data-parallel-size {visible}, or check CUDA_VISIBLE_DEVICES")
        self.number = index
        self._device = cuda_.ok(cu.cuDeviceGet(index))
        major, minor = (cuda_.attribute(self._device, f"COMPUTE_CAPABILITY_{x}") for x in ("MAJOR", "MINOR"))
        self.name = cuda_.ok(cu.cuDeviceGetName(128, self._device)).split(b"\0")[0].decode()
        self.arch = f"sm_{major}{minor}"
        check_arch(target, self.arch, self.name)
        self.driver = cuda_.check_driver(target.arch)
        self._shared = cuda_.attribute(self._device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._method = MAPPED if cuda_.attribute(self._device, "READ_ONLY_HOST_REGISTER_SUPPORTED") else PINNED
        self._context = cuda_.ok(cu.cuDevicePrimaryCtxRetain(self._device))
        try:
            self._enter()
            self._stream = cuda_.stream()
            self._ring = Ring(cuda_, self._stream, self.depth + 1)
        except BaseException:
            self.close()
            raise

    def alloc(self, nbytes: int) -> CudaMemory:
        """Allocate zeroed device memory; raise LlmcError E203 if there is not enough."""
        memory = self._alloc(nbytes)
        self.zero(memory, 0, nbytes)
        return memory

    def _alloc(self, nbytes: int) -> CudaMemory:
        self._enter()
        status, address = self._cuda.cu.cuMemAlloc(max(1, nbytes))
        if status:
            error = self._cuda.error(int(status))
            if error.code == "E203":
                free = self.free_memory()
                error = LlmcError("E203", f"cannot allocate {nbytes} bytes on the GPU; {free} are free", error.remedy)
            raise error
        self._memories.append(int(address))
        return CudaMemory(int(address), nbytes, np.empty(0, np.uint8), self)

    def write(self, memory: Memory, begin: int, data: np.ndarray) -> None:
        """Copy the array's bytes to offset `begin`, through pinned memory."""
        self._enter()
        self._slots.send(memory.address + begin, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def zero(self, memory: Memory, begin: int, end: int) -> None:
        """Zero the bytes [begin, end)."""
        self._enter()
        if end > begin:
            cuda = self._cuda
            cuda.ok(cuda.cu.cuMemsetD8Async(memory.address + begin, 0, end - begin, self._stream))

    def repeat(self, memory: Memory, tile: np.ndarray, at: int) -> None:
        """Fill the memory with repetitions of `tile`, starting at byte `at` of the tile.

        The tile is uploaded once and cached. The filled beginning of the memory is then doubled until the memory is
        full.
        """
        if at == 0 and len(tile) >= memory.nbytes:
            self.write(memory, 0, tile[: memory.nbytes])
            return
        source = next((m for t, m in self._tiles if t is tile), None)
        if source is None:
            source = self._alloc(len(tile))
            self.write(source, 0, tile)
            self._tiles.append((tile, source))
        first = len(tile) - at
        self._copy(memory.address, source.address + at, min(first, memory.nbytes))
        self._copy(memory.address + first, source.address, min(at, memory.nbytes - first))
        done = len(tile)
        while done < memory.nbytes:
            self._copy(memory.address + done, memory.address, min(done, memory.nbytes - done))
            done *= 2

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes > 0:
            self._cuda.ok(self._cuda.cu.cuMemcpyDtoDAsync(target, source, nbytes, self._stream))

    def fetch(self, memory: Memory, begin: int, end: int) -> np.ndarray:
        """Start copying the bytes [begin, end) to the host; see `Device.fetch`."""
        self._enter()
        return self._slots.fetch(memory.address + begin, end - begin)

    def read(self, memory: Memory) -> np.ndarray:
        """Return a copy of the memory after synchronizing the stream."""
        self._enter()
        out = np.empty(memory.nbytes, np.uint8)
        self._cuda.ok(self._cuda.cu.cuStreamSynchronize(self._stream))
        if memory.nbytes:
            self._cuda.ok(self._cuda.cu.cuMemcpyDtoH(out.ctypes.data, memory.address, memory.nbytes))
        return out

    @property
    def stream_handle(self) -> int:
        """The CUstream as an integer; raises BufferError after `close`."""
        if self._stream is None:
            raise BufferError("the device is closed and its memory freed")
        return int(self._stream)

    def follow(self, stream: int) -> None:
        """Make later work in `stream` wait for everything submitted to this device so far."""
        self._enter()
        self._cuda.follow(stream, self.stream_handle)

    def mark(self) -> Event:
        """End the step and return an event for it."""
        self._enter()
        return self._slots.mark()

    def wait(self, event: Event) -> None:
        """Block until the event has completed."""
        assert isinstance(event, Slot)
        self._enter()
        self._slots.wait(event)

    def done(self, event: Event) -> bool:
        """Return whether the event has completed, without blocking."""
        assert isinstance(event, Slot)
        self._enter()
        return self._slots.done(event)

    def place(self, artifact: Artifact, names: Iterable[str]) -> Mapping[str, int]:
        """Upload the weights and return their addresses.

        Each file gets one allocation, and tensors keep their offsets in it; tensors that are not aligned to `ALIGN`
        bytes are copied to allocations of their own. Hashes are checked on the way if `artifact.unchecked` is set.
        """
        files = artifact.manifest.weights.files
        bases = {f.file: self._alloc(f.bytes).address for f in files}
        args = (self._cuda, self._enter, artifact.folder, files, bases)
        if artifact.unchecked:
            self._upload = upload(*args, check=True, threads=self.threads, method=self._method)
        else:
            self._upload = upload(*args, check=False, threads=min(self.threads, _PLAIN_UPLOADERS), method=PINNED)
        out = {}
        for name in names:
            tensor = artifact.tensors[name]
            out[name] = bases[tensor.file] + tensor.begin
            if tensor.begin % ALIGN:
                memory = self._alloc(tensor.data.nbytes)
                self._copy(memory.address, out[name], memory.nbytes)
                out[name] = memory.address
        return out

    def load(self, artifact: Artifact) -> None:
        """Load the kernels' binaries; raise LlmcError E112 if this GPU or this runtime cannot run one."""
        self._enter()
        for kernel in artifact.manifest.kernels:
            if kernel.abi != ABI:
                cause = f"kernel {kernel.file} has the calling convention {kernel.abi!r}; this runtime supports {ABI!r}"
                raise LlmcError("E112", cause, "upgrade llmc-aot, or recompile the artifact")
            if kernel.shared > self._shared:
                cause = f"kernel {kernel.file} needs {kernel.shared} bytes of shared memory per block; {self.name} has"
                raise LlmcError("E112", f"{cause} {self._shared}", f"recompile with --target cuda:{self.arch}")
            self._load(kernel, artifact.folder.read(kernel.file, artifact.manifest.files[kernel.file].bytes))

    def _load(self, kernel: KernelFile, binary: bytes) -> None:
        cuda, cu = self._cuda, self._cuda.cu
        try:
            module = cuda.ok(cu.cuModuleLoadData(binary))
            self._modules.append(module)
            function = cuda.ok(cu.cuModuleGetFunction(module, kernel.entry.encode()))
            if kernel.shared > _PLAIN_SHARED:
                cuda.allow_shared(function, kernel.shared)
        except LlmcError as error:
            if error.code == "E203" or cuda.lost:
                raise
            cause = f"kernel {kernel.file} cannot be loaded: {error.cause.removeprefix('the GPU failed: ')}"
            remedy = f"recompile with --target cuda:{self.arch}, or upgrade the NVIDIA driver (CUDA {self.driver})"
            raise LlmcError("E112", cause, remedy) from None
        self._functions[kernel.hash, kernel.entry] = function

    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        """Return a run of the program; raise LlmcError E113 if it launches a kernel that is not loaded."""
        functions = []
        for launch in program.launches:
            function = self._functions.get((launch.kernel, launch.entry))
            if function is None or not launch.threads:
                cause = f"program {program.name} launches {launch.entry} of {launch.kernel[:16]}, which is not loaded"
                raise LlmcError("E113", cause, "recompile the artifact")
            functions.append(function)
        run = CudaRun(self._cuda, self._enter, self._stream, program, functions, addresses, symbols, self._careful)
        self._runs.append(run)
        return run

    def prepare(self, run: Run) -> None:
        """Capture and upload the graph for the current symbol values, if the run uses graphs."""
        assert isinstance(run, CudaRun)
        run.prepare()

    def free_memory(self) -> int:
        """Return the bytes of device memory that are free."""
        self._enter()
        free, _ = self._cuda.ok(self._cuda.cu.cuMemGetInfo())
        return int(free)

    def close(self) -> None:
        """Free all resources. Statuses are ignored: after a failure every call reports it, and the context is released
        anyway.
        """
        if self._context is None:
            return
        cu = self._cuda.cu
        cu.cuCtxSetCurrent(self._context)
        if self._stream is not None:
            cu.cuStreamSynchronize(self._stream)
        for run in self._runs:
            run.free()
        if self._ring is not None:
            self._ring.free()
        for module in self._modules:
            cu.cuModuleUnload(module)
        for address in self._memories:
            cu.cuMemFree(address)
        if self._stream is not None:
            cu.cuStreamDestroy(self._stream)
        cu.cuCtxSetCurrent(None)
        cu.cuDevicePrimaryCtxRelease(self._device)
        self._context = self._ring = self._stream = None
        for resources in (self._runs, self._modules, self._memories, self._tiles):
            resources.clear()
        self._functions.clear()

    def describe(self) -> Mapping[str, object]:
        """Return the GPU's name, architecture and driver, and the throughput of the last upload in 1e9 bytes per
        second.
        """
        facts: dict[str, object] = {"name": self.name, "arch": self.arch, "driver": f"CUDA {self.driver}"}
        if self._upload is not None:
            facts["upload_gb_s"] = round(self._upload.rate / 1e9, 1)
            facts["upload_threads"] = self._upload.threads
            facts["upload_way"] = self._upload.method
        return facts

    @property
    def upload_summary(self) -> str:
        """How the weights were uploaded, for example "weights 15.0 GB/s (16 threads, mapped)"; empty before `place`."""
        return str(self._upload) if self._upload else ""

    @property
    def _slots(self) -> Ring:
        if self._ring is None:
            raise RuntimeError("the device is closed")
        return self._ring

    def _enter(self) -> None:
        """Make the GPU's context current in the calling thread, if it is not; every thread needs this once."""
        if getattr(self._local, "context", None) is not self._context:
            self._cuda.ok(self._cuda.cu.cuCtxSetCurrent(self._context))
            self._local.context = self._context


def check_arch(target: TargetInfo, arch: str, gpu: str) -> None:
    """Raise LlmcError E117 if a GPU of architecture `arch`, such as "sm_90", cannot run binaries for the target.

    From sm_90 on, kernels use instructions of exactly one architecture. Before that, binaries also run on later
    architectures of the same major version.
    """
    wanted, actual = (re.fullmatch(r"sm_(\d+)(\d)[af]?", x) for x in (target.arch, arch))
    if wanted and actual and wanted[1] == actual[1]:
        if wanted[2] == actual[2] or (int(wanted[1]) < 9 and int(wanted[2]) < int(actual[2])):
            return
    suitable = "sm_80" if actual and actual[1] == "8" else arch
    cause = f"the artifact is for {target.name} ({target.arch}); this GPU is {arch} ({gpu})"
    raise LlmcError("E117", cause, f"recompile for it: llmc compile MODEL --target cuda:{suitable}")
