"""The HIP API of AMD's ROCm through hip-python: loading, initialization and error reporting.

Everything that differs between versions of hip-python is here. The functions and constants that the HIP device uses
have the same names and parameters from hip-python 6.3 to 10, except for the properties of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc_runtime.device.gpu.driver import GpuDriver
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.install_command import install_command
from llmc_runtime.format.program import Launch

# The minimum version of ROCm (1000 * major + 10 * minor): that of the oldest bindings, and by architecture where later.
_MIN_ROCM = 6030
_MIN_ROCM_BY_ARCH: Mapping[str, int] = MappingProxyType({"gfx950": 7000})
_CPU = "or compile for the CPU: llmc compile MODEL --target cpu:native"
_CHECK = "check rocminfo, HIP_VISIBLE_DEVICES and the access to /dev/kfd and /dev/dri"
_NON_BLOCKING, _NO_TIMING = 1, 2
_FATAL = frozenset(
    "hipError" + name
    for name in (
        "ECCNotCorrectable", "IllegalAddress", "LaunchTimeOut", "ContextIsDestroyed", "Assert", "LaunchFailure",
        "IllegalState", "Unknown", "RuntimeMemory", "RuntimeOther",
    )
)  # fmt: skip


@dataclass(slots=True)
class LaunchConfig:
    """The grid, threads per block, bytes of shared memory, and stream of a launch."""

    threads: int
    shared: int
    stream: Any
    gridDimX: int = 1
    gridDimY: int = 1
    gridDimZ: int = 1


@dataclass(frozen=True)
class GpuProperties:
    """A GPU: its name, its architecture with features, such as "gfx942:sramecc+:xnack-", and the bytes of shared memory
    available to a block.
    """

    name: str
    arch: str
    shared: int


class Hip(GpuDriver):
    """The initialized API. `hip` is the bindings' module, whose functions return (hipError_t, *values)."""

    out_of_memory = "hipErrorOutOfMemory"
    not_ready = "hipErrorNotReady"
    fatal = _FATAL

    def __init__(self, hip: Any = None) -> None:
        """Raises LlmcError E115 if there is no ROCm or no GPU."""
        self.hip = hip if hip is not None else _bindings()
        try:
            status = int(self.hip.hipInit(0)[0]) or int(self.hip.hipGetDeviceCount()[0])
        except RuntimeError as error:  # raised by the bindings if libamdhip64 cannot be loaded or lacks a function
            cause = f"no ROCm found ({error})"
            remedy = f"install ROCm's HIP runtime, and add the folder of libamdhip64.so to LD_LIBRARY_PATH, {_CPU}"
            raise LlmcError("E115", cause, remedy) from None
        if status:
            name = self.name(status)
            cause = f"ROCm does not start: {name}"
            if name in ("hipErrorNoDevice", "hipErrorInvalidDevice"):  # hipInit returns the latter without a GPU
                cause = f"ROCm finds no AMD GPU ({name})"
            raise LlmcError("E115", cause, f"{_CHECK}, {_CPU}")
        modes = self.hip.hipStreamCaptureMode
        kinds = self.hip.hipMemcpyKind
        self._in, self._out = kinds.hipMemcpyHostToDevice, kinds.hipMemcpyDeviceToHost
        self._within, self._capture_mode = kinds.hipMemcpyDeviceToDevice, modes.hipStreamCaptureModeThreadLocal

    def name(self, status: int) -> str:
        """Return the status's name, such as "hipErrorIllegalAddress"."""
        try:
            return str(self.hip.hipError_t(status).name)
        except ValueError:  # ROCm is newer than the bindings
            return f"HIP error {status}"

    def _text(self, status: int) -> str:
        try:
            result = self.hip.hipGetErrorString(self.hip.hipError_t(status))
        except (RuntimeError, ValueError):
            return "unknown"
        return result[1].decode() if result[1] else "unknown"

    def check_driver(self, arch: str) -> str:
        """Return ROCm's version as text. Raises LlmcError E116 if binaries for `arch` need a newer one."""
        version = int(self.ok(self.hip.hipRuntimeGetVersion()))  # 10,000,000 * major + 100,000 * minor + patch
        found = 1000 * (version // 10_000_000) + 10 * (version % 10_000_000 // 100_000)
        minimum = max(_MIN_ROCM, _MIN_ROCM_BY_ARCH.get(arch, 0))
        if found < minimum:
            cause = f"this machine has ROCm {_dotted(found)}; kernels for {arch} need {_dotted(minimum)}"
            raise LlmcError("E116", cause, "upgrade ROCm and the amdgpu driver")
        return _dotted(found)

    def properties(self, index: int) -> GpuProperties:
        """Return the properties of a GPU."""
        if self.hip.__name__.startswith("rocm."):  # hip-python 10
            found = self.ok(self.hip.hipGetDeviceProperties(index))
            return GpuProperties(found.name, found.gcnArchName, found.sharedMemPerBlock)
        found = self.hip.hipDeviceProp_t()
        self.ok(self.hip.hipGetDeviceProperties(found, index))
        return GpuProperties(found.name.decode(), found.gcnArchName.decode(), found.sharedMemPerBlock)

    def device_count(self) -> int:
        """Return the number of GPUs that are visible to this process."""
        return int(self.ok(self.hip.hipGetDeviceCount()))

    def set_device(self, index: int) -> None:
        """Make a GPU current in the calling thread."""
        self.ok(self.hip.hipSetDevice(index))

    def allocate(self, nbytes: int) -> tuple[Any, ...]:
        """Allocate device memory: (status, address)."""
        status, memory = self.hip.hipMalloc(nbytes)
        return status, 0 if status else int(memory)

    def release(self, address: int) -> None:
        """Free device memory, ignoring errors."""
        self.hip.hipFree(address)

    def pin(self, nbytes: int) -> int:
        """Allocate pinned host memory."""
        return int(self.ok(self.hip.hipHostMalloc(nbytes, 0)))

    def unpin(self, address: int) -> None:
        """Free pinned host memory, ignoring errors."""
        self.hip.hipHostFree(address)

    def free_memory(self) -> int:
        """Return the bytes of device memory that are free."""
        free, _ = self.ok(self.hip.hipMemGetInfo())
        return int(free)

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy pinned host memory to the device, in the stream."""
        self.ok(self.hip.hipMemcpyAsync(target, source, nbytes, self._in, stream))

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy device memory to pinned host memory, in the stream."""
        self.ok(self.hip.hipMemcpyAsync(target, source, nbytes, self._out, stream))

    def copy_within(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Copy device memory to device memory, in the stream."""
        self.ok(self.hip.hipMemcpyAsync(target, source, nbytes, self._within, stream))

    def read(self, target: int, source: int, nbytes: int) -> None:
        """Copy device memory to any host memory, and wait for the end."""
        self.ok(self.hip.hipMemcpy(target, source, nbytes, self._out))

    def zero(self, address: int, nbytes: int, stream: Any) -> None:
        """Zero device memory, in the stream."""
        self.ok(self.hip.hipMemsetAsync(address, 0, nbytes, stream))

    def stream(self) -> Any:
        """Create a stream that does not synchronize with the default stream."""
        return self.ok(self.hip.hipStreamCreateWithFlags(_NON_BLOCKING))

    def destroy_stream(self, stream: Any) -> None:
        """Destroy a stream, ignoring errors."""
        self.hip.hipStreamDestroy(stream)

    def synchronize(self, stream: Any) -> tuple[Any, ...]:
        """Wait until a stream is idle: (status,)."""
        return self.hip.hipStreamSynchronize(stream)

    def event(self) -> Any:
        """Create an event without timing."""
        return self.ok(self.hip.hipEventCreateWithFlags(_NO_TIMING))

    def destroy_event(self, event: Any) -> None:
        """Destroy an event, ignoring errors."""
        self.hip.hipEventDestroy(event)

    def record(self, event: Any, stream: Any) -> None:
        """Record an event in a stream."""
        self.ok(self.hip.hipEventRecord(event, stream))

    def wait(self, event: Any) -> None:
        """Block until a recorded event has completed."""
        self.ok(self.hip.hipEventSynchronize(event))

    def completed(self, event: Any) -> bool:
        """Return whether a recorded event has completed, or never will because the GPU failed."""
        return self.name(int(self.hip.hipEventQuery(event)[0])) != self.not_ready

    def load_module(self, binary: bytes) -> Any:
        """Load a code object."""
        return self.ok(self.hip.hipModuleLoadData(binary))

    def unload_module(self, module: Any) -> None:
        """Unload a code object, ignoring errors."""
        self.hip.hipModuleUnload(module)

    def function(self, module: Any, entry: str) -> Any:
        """Return a kernel of a loaded code object."""
        return self.ok(self.hip.hipModuleGetFunction(module, entry.encode()))

    def launch_config(self, launch: Launch, stream: Any) -> LaunchConfig:
        """Return the configuration of a launch with a grid of 1. Raises LlmcError E113 for dependent launches and
        clusters, which AMD GPUs do not have.
        """
        if launch.pdl or launch.cluster:
            what = "a dependent launch" if launch.pdl else "a cluster of blocks"
            raise LlmcError("E113", f"{launch.entry} asks for {what}, which AMD GPUs lack", "recompile the artifact")
        return LaunchConfig(launch.threads, launch.shared, stream)

    def launch(self, config: LaunchConfig, function: Any, params: int) -> tuple[Any, ...]:
        """Launch a kernel, whose parameters are at the addresses in the table at `params`: (status,)."""
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.threads, 1, 1)
        return self.hip.hipModuleLaunchKernel(function, *grid, *block, config.shared, config.stream, params, None)

    def begin_capture(self, stream: Any) -> None:
        """Capture what this thread submits to the stream as a graph from now on."""
        self.ok(self.hip.hipStreamBeginCapture(stream, self._capture_mode))

    def end_capture(self, stream: Any) -> tuple[Any, ...]:
        """End the capture: (status, graph)."""
        return self.hip.hipStreamEndCapture(stream)

    def instantiate(self, graph: Any) -> Any:
        """Make a captured graph executable."""
        return self.ok(self.hip.hipGraphInstantiateWithFlags(graph, 0))

    def destroy_graph(self, graph: Any) -> None:
        """Destroy a captured graph, ignoring errors."""
        self.hip.hipGraphDestroy(graph)

    def destroy_executable(self, graph: Any) -> None:
        """Destroy an executable graph, ignoring errors."""
        self.hip.hipGraphExecDestroy(graph)

    def upload_graph(self, graph: Any, stream: Any) -> None:
        """Prepare an executable graph on the GPU before its first launch."""
        self.ok(self.hip.hipGraphUpload(graph, stream))

    def launch_graph(self, graph: Any, stream: Any) -> tuple[Any, ...]:
        """Launch an executable graph: (status,)."""
        return self.hip.hipGraphLaunch(graph, stream)


def _bindings() -> Any:
    try:
        from hip import hip
    except ImportError as error:
        remedy = f"{install_command('rocm')} (hip-python of the machine's version of ROCm, such as hip-python~=7.2)"
        cause = f"AMD GPUs need the package hip-python, which cannot be imported: {error}"
        raise LlmcError("E115", cause, remedy) from None
    return hip


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
