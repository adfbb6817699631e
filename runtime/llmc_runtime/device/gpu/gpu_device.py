"""The base class of GPU devices: one GPU, driven through a `GpuDriver` on a single stream."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device, Event, Memory, Run
from llmc_runtime.device.gpu.device_group import GRAIN_BYTES, USE_NCCL, DeviceGroup, LibraryCall
from llmc_runtime.device.gpu.device_memory import Ring, Slot
from llmc_runtime.device.gpu.driver import GpuDriver
from llmc_runtime.device.gpu.gpu_run import GpuRun
from llmc_runtime.device.gpu.weight_upload import PINNED, Upload, upload
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.group_memory import DATA, EMPTY
from llmc_runtime.format.manifest import KernelFile
from llmc_runtime.format.program import Program
from llmc_runtime.host_info import default_threads

WEIGHT_ALIGNMENT = 64  # bytes; the alignment of weights within their files
_CURRENT = threading.local()  # `device`: the identity of the device that made its GPU current in this thread last
_UPLOADERS, _PLAIN_UPLOADERS = 16, 8  # maximum threads with and without hashing; more are not faster


class GpuDevice(Device):
    """A GPU. A subclass identifies it, sets the attributes below, and calls `_start`.

    Class attributes: `family` is that of targets, and `abi` the calling convention of kernels. `vendor` and `api` name
    the driver in messages; `visible_variable` is the environment variable that selects GPUs.

    Attributes: `arch` is the GPU's architecture, such as "sm_90" or "gfx942", and `driver` the text of the driver's
    version.
    """

    family: str
    abi: str
    vendor: str
    api: str
    visible_variable: str
    depth = 2
    separate = True
    replays = True
    arch: str
    driver: str

    def __init__(
        self, driver: GpuDriver, threads: int | None, careful: bool, index: int, group: DeviceGroup | None = None
    ) -> None:
        """`threads` upload weights. `careful`: see `GpuRun`. `index` is the number of the engine, `group` its ranks.

        Raises LlmcError E115 if fewer GPUs are visible than it and the engines before it need, or if its GPU cannot
        access those of the other ranks and needs to.
        """
        self._driver = driver
        self._careful = careful
        self.threads = min(threads or default_threads(), _UPLOADERS)
        self._identity = object()  # names the device in _CURRENT without keeping it alive
        self._started = False
        self._stream: Any = None
        self._ring: Ring | None = None
        self._memories: list[int] = []
        self._modules: list[Any] = []
        self._functions: dict[tuple[str, str], Any] = {}
        self._tiles: list[tuple[np.ndarray, Memory]] = []  # tiles of `repeat`, with their copies on the device
        self._runs: list[GpuRun] = []
        self._upload: Upload | None = None
        self._method = PINNED  # method of copying weights if their hashes are checked
        self._shared_memory: Memory | None = None  # memory to which the other ranks write
        self._shared = 0  # bytes of shared memory available to a block
        self._group = group
        member = None if group is None else group.member
        self.number = index if member is None else index * member.ranks + member.rank
        self._check_visible(index, 1 if member is None else member.ranks)

    def _check_visible(self, index: int, ranks: int) -> None:
        """Check that there is a GPU for each rank of the engine, and that this rank's can access the others if the
        group needs it.
        """
        first = index * ranks  # the number of the engine's first GPU
        if first + ranks > 1:
            visible = self._driver.device_count()
            if first + ranks > visible:
                needed = f"{ranks} GPUs of its own, one per rank" if ranks > 1 else "a GPU of its own"
                cause = f"engine {index} needs {needed}, and {visible} are visible"
                engines = visible // ranks
                fewer = f"use --data-parallel-size {engines}" if engines else "compile for fewer ranks"
                raise LlmcError("E115", cause, f"{fewer}, or check {self.visible_variable}")
        if self._group is None or not self._group.needs_access:
            return
        for other in range(first, first + ranks):
            if other != self.number and not self._driver.can_access(self.number, other):
                cause = f"GPU {self.number} cannot access the memory of GPU {other}, as ranks need"
                remedy = f"{USE_NCCL}, or choose GPUs that can (nvidia-smi topo -p2p r) by {self.visible_variable}"
                raise LlmcError("E115", cause, remedy)

    def _start(self) -> None:
        """Create the stream and the staging memory; `close` releases them, and calls `_release`."""
        self._started = True
        try:
            self._enter()
            self._stream = self._driver.stream()
            self._ring = Ring(self._driver, self._stream, self.depth + 1)
            if self._group is not None:
                self._group.start(self._enter)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _make_current(self) -> None:
        """Make the GPU current in the calling thread."""

    def _release(self) -> None:
        """Release the GPU itself, ignoring errors."""
        return

    def alloc(self, nbytes: int) -> Memory:
        """Allocate zeroed device memory; raise LlmcError E203 if there is not enough."""
        memory = self._alloc(nbytes)
        self.zero(memory, 0, nbytes)
        return memory

    def _alloc(self, nbytes: int) -> Memory:
        """Allocate device memory without zeroing it; raise LlmcError E203 if there is not enough."""
        self._enter()
        status, address = self._driver.allocate(max(1, nbytes))
        if status:
            error = self._driver.error(int(status))
            if error.code == "E203":
                free = self.free_memory()
                error = LlmcError("E203", f"cannot allocate {nbytes} bytes on the GPU; {free} are free", error.remedy)
            raise error
        self._memories.append(int(address))
        return Memory(int(address), nbytes, np.empty(0, np.uint8))

    def group_memory(self, nbytes: int) -> Memory:
        """Allocate the memory to which the other ranks of the group write."""
        if self._group is None:
            return super().group_memory(nbytes)
        memory = self.alloc(-(-nbytes // GRAIN_BYTES) * GRAIN_BYTES)
        self._group.share(memory.address)
        self._shared_memory = memory
        slots = Memory(memory.address + DATA, nbytes - DATA, memory.host)
        self.repeat(slots, np.full(DATA, EMPTY, np.uint8), 0)
        return memory

    @property
    def group_handle(self) -> bytes:
        """The handle by which the other ranks connect to this one."""
        return b"" if self._group is None else self._group.handle

    def connect(self, handles: Sequence[bytes]) -> None:
        """Connect to the other ranks, and write the header of this rank's shared memory."""
        if self._group is None:
            return
        self._enter()
        header = self._group.connect(handles)
        if header is not None and self._shared_memory is not None:
            self.write(self._shared_memory, 0, header)
            self._driver.ok(self._driver.synchronize(self._stream))

    def cancel(self) -> None:
        """End the group of ranks, if there is one."""
        if self._group is not None:
            self._group.cancel()

    def write(self, memory: Memory, begin: int, data: np.ndarray) -> None:
        """Copy the array's bytes to offset `begin`, through pinned memory."""
        self._enter()
        self._slots.send(memory.address + begin, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def zero(self, memory: Memory, begin: int, end: int) -> None:
        """Zero the bytes [begin, end)."""
        self._enter()
        if end > begin:
            self._driver.zero(memory.address + begin, end - begin, self._stream)

    def copy(self, target: Memory, at: int, source: Memory, begin: int, nbytes: int) -> None:
        """Copy bytes within the GPU's memory, in the stream."""
        self._enter()
        self._copy(target.address + at, source.address + begin, nbytes)

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
            self._driver.copy_within(target, source, nbytes, self._stream)

    def fetch(self, memory: Memory, begin: int, end: int) -> np.ndarray:
        """Start copying the bytes [begin, end) to the host; see `Device.fetch`."""
        self._enter()
        return self._slots.fetch(memory.address + begin, end - begin)

    def read(self, memory: Memory) -> np.ndarray:
        """Return a copy of the memory after synchronizing the stream."""
        self._enter()
        out = np.empty(memory.nbytes, np.uint8)
        self._driver.ok(self._driver.synchronize(self._stream))
        if memory.nbytes:
            self._driver.read(out.ctypes.data, memory.address, memory.nbytes)
        return out

    def mark(self) -> Event:
        """End the step and return an event for it."""
        self._enter()
        return self._slots.mark()

    def wait(self, event: Event) -> None:
        """Block until the event has completed. Raises LlmcError E119 if the group of ranks has ended."""
        assert isinstance(event, Slot)
        self._enter()
        self._slots.wait(event)
        if self._group is not None:
            self._group.check()

    def done(self, event: Event) -> bool:
        """Return whether the event has completed, without blocking."""
        assert isinstance(event, Slot)
        self._enter()
        return self._slots.done(event)

    def place(self, artifact: Artifact, names: Iterable[str]) -> Mapping[str, int]:
        """Upload the weights and return their addresses.

        Each file gets one allocation, and tensors keep their offsets in it; tensors that are not aligned to
        WEIGHT_ALIGNMENT bytes are copied to allocations of their own. Hashes are checked on the way if
        `artifact.unchecked` is set.
        """
        files = artifact.manifest.weights.of_rank(artifact.rank)
        bases = {f.file: self._alloc(f.bytes).address for f in files}
        args = (self._driver, self._enter, artifact.folder, files, bases)
        if artifact.unchecked:
            done = upload(*args, check=True, threads=self.threads, method=self._method)
        else:
            done = upload(*args, check=False, threads=min(self.threads, _PLAIN_UPLOADERS), method=PINNED)
        self._upload = done if self._upload is None else self._upload + done
        out = {}
        for name in names:
            tensor = artifact.tensors[name]
            out[name] = bases[tensor.file] + tensor.begin
            if tensor.begin % WEIGHT_ALIGNMENT:
                memory = self._alloc(tensor.data.nbytes)
                self._copy(memory.address, out[name], memory.nbytes)
                out[name] = memory.address
        return out

    def load(self, artifact: Artifact) -> None:
        """Load the kernels' binaries; raise LlmcError E112 if this GPU or this runtime cannot run one."""
        self._enter()
        for kernel in artifact.manifest.kernels:
            if self._group is not None and kernel.abi == self._group.abi:
                description = artifact.folder.read(kernel.file, artifact.manifest.files[kernel.file].bytes)
                self._functions[kernel.hash, kernel.entry] = self._group.load_call(description, kernel.file)
                continue
            if kernel.abi != self.abi:
                other = f"has the calling convention {kernel.abi!r}; this device supports {self.abi!r}"
                raise LlmcError("E112", f"kernel {kernel.file} {other}", "upgrade llmc-aot, or recompile the artifact")
            if kernel.shared > self._shared:
                cause = f"kernel {kernel.file} needs {kernel.shared} bytes of shared memory per block; {self.name} has"
                raise LlmcError("E112", f"{cause} {self._shared}", f"recompile with --target {self.family}:{self.arch}")
            self._load(kernel, artifact.folder.read(kernel.file, artifact.manifest.files[kernel.file].bytes))

    def _load(self, kernel: KernelFile, binary: bytes) -> None:
        """Load one kernel's binary. Raises LlmcError E112 if the driver rejects it."""
        driver = self._driver
        try:
            module = driver.load_module(binary)
            self._modules.append(module)
            function = driver.function(module, kernel.entry)
            driver.allow_shared(function, kernel.shared)
        except LlmcError as error:
            if error.code == "E203" or driver.lost:
                raise
            cause = f"kernel {kernel.file} cannot be loaded: {error.cause.removeprefix('the GPU failed: ')}"
            upgrade = f"upgrade the {self.vendor} driver ({self.api} {self.driver})"
            remedy = f"recompile with --target {self.family}:{self.arch}, or {upgrade}"
            raise LlmcError("E112", cause, remedy) from None
        self._functions[kernel.hash, kernel.entry] = function

    def bind(self, program: Program, addresses: Sequence[int], symbols: np.ndarray) -> Run:
        """Return a run of the program; raise LlmcError E113 if it launches a kernel that is not loaded, or is for
        another number of ranks.
        """
        if program.ranks != (1 if self._group is None else self._group.member.ranks):
            cause = f"program {program.name} is for a group of {program.ranks} ranks"
            raise LlmcError("E113", cause, "recompile the artifact")
        functions = []
        for launch in program.launches:
            function = self._functions.get((launch.kernel, launch.entry))
            if function is None or not (launch.threads or isinstance(function, LibraryCall)):
                cause = f"program {program.name} launches {launch.entry} of {launch.kernel[:16]}, which is not loaded"
                raise LlmcError("E113", cause, "recompile the artifact")
            functions.append(function)
        run = GpuRun(self._driver, self._enter, self._stream, program, functions, addresses, symbols, self._careful)
        self._runs.append(run)
        return run

    def prepare(self, run: Run) -> None:
        """Capture and upload the graph for the current symbol values, if the run uses graphs."""
        assert isinstance(run, GpuRun)
        run.prepare()

    def free_memory(self) -> int:
        """Return the bytes of device memory that are free."""
        self._enter()
        return self._driver.free_memory()

    def close(self) -> None:
        """Free all resources, ignoring statuses: after a failure every call has one; the GPU is released anyway."""
        if not self._started:
            return
        driver = self._driver
        with suppress(LlmcError):
            self._make_current()
        self.cancel()  # kernels that wait for another rank give up
        if self._stream is not None:
            driver.synchronize(self._stream)
        for run in self._runs:
            run.free()
        if self._ring is not None:
            self._ring.free()
        if self._group is not None:
            self._group.close()
        for module in self._modules:
            driver.unload_module(module)
        for address in self._memories:
            driver.release(address)
        if self._stream is not None:
            driver.destroy_stream(self._stream)
        self._release()
        _CURRENT.device = None  # also for other devices, whose context _release may have left
        self._started = False
        self._ring = self._stream = None
        for resources in (self._runs, self._modules, self._memories, self._tiles):
            resources.clear()
        self._functions.clear()

    def describe(self) -> Mapping[str, object]:
        """Return the GPU's name, architecture and driver, and the throughput of the uploads in 1e9 bytes per second."""
        facts: dict[str, object] = {"name": self.name, "arch": self.arch, "driver": f"{self.api} {self.driver}"}
        if self._upload is not None:
            facts["upload_gb_s"] = round(self._upload.rate / 1e9, 1)
            facts["upload_threads"] = self._upload.threads
            facts["upload_way"] = self._upload.method
        return facts

    @property
    def upload_summary(self) -> str:
        """The upload of the weights, for example "weights 15.0 GB/s (16 threads, mapped)"; empty before `place`."""
        return str(self._upload) if self._upload else ""

    @property
    def _slots(self) -> Ring:
        if self._ring is None:
            raise RuntimeError("the device is closed")
        return self._ring

    def _enter(self) -> None:
        """Make the GPU current in the calling thread, unless this device was the last to do so there."""
        if getattr(_CURRENT, "device", None) is not self._identity:
            self._make_current()
            _CURRENT.device = self._identity
