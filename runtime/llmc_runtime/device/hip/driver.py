"""The HIP API of AMD's ROCm through hip-python: loading, initialization and error reporting.

Everything that differs between versions of hip-python is here. The functions and constants that the HIP device uses
have the same names and parameters from hip-python 6.3 to 10, except for the properties of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc_runtime.device.gpu.driver import OR_CPU, GpuDriver, dotted
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.install_command import install_command
from llmc_runtime.format.program import Launch

# The minimum version of ROCm (1000 * major + 10 * minor): that of the oldest bindings, and by architecture where later.
_MIN_ROCM = 6030
_MIN_ROCM_BY_ARCH: Mapping[str, int] = MappingProxyType({"gfx950": 7000})
_CHECK = "check rocminfo, HIP_VISIBLE_DEVICES and the access to /dev/kfd and /dev/dri"
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

    api = "HIP"
    prefix = "hip"
    statuses = "hipError_t"
    out_of_memory = "hipErrorOutOfMemory"
    not_ready = "hipErrorNotReady"
    fatal = _FATAL

    def __init__(self, hip: Any = None) -> None:
        """Raises LlmcError E115 if there is no ROCm or no GPU."""
        self.hip = hip if hip is not None else _bindings()
        super().__init__(self.hip)
        try:
            status = int(self.hip.hipInit(0)[0]) or int(self.hip.hipGetDeviceCount()[0])
        except RuntimeError as error:  # raised by the bindings if libamdhip64 cannot be loaded or lacks a function
            cause = f"no ROCm found ({error})"
            remedy = f"install ROCm's HIP runtime, and add the folder of libamdhip64.so to LD_LIBRARY_PATH, {OR_CPU}"
            raise LlmcError("E115", cause, remedy) from None
        if status:
            name = self.name(status)
            cause = f"ROCm does not start: {name}"
            if name in ("hipErrorNoDevice", "hipErrorInvalidDevice"):  # hipInit returns the latter without a GPU
                cause = f"ROCm finds no AMD GPU ({name})"
            raise LlmcError("E115", cause, f"{_CHECK}, {OR_CPU}")
        modes = self.hip.hipStreamCaptureMode
        kinds = self.hip.hipMemcpyKind
        self._in, self._out = kinds.hipMemcpyHostToDevice, kinds.hipMemcpyDeviceToHost
        self._within, self._capture_mode = kinds.hipMemcpyDeviceToDevice, modes.hipStreamCaptureModeThreadLocal

    def _text(self, status: int) -> str:
        try:
            result = self.hip.hipGetErrorString(self.hip.hipError_t(status))
        except (RuntimeError, ValueError):
            return "unknown"
        return result[1].decode() if result[1] else "unknown"

    def check_driver(self, arch: str) -> str:
        """Return ROCm's version as text. Raises LlmcError E116 if binaries for `arch` need a newer one."""
        version = int(self.ok(self.hip.hipRuntimeGetVersion()))  # 10,000,000 * major + 100,000 * minor + patch
        installed = 1000 * (version // 10_000_000) + 10 * (version % 10_000_000 // 100_000)
        minimum = max(_MIN_ROCM, _MIN_ROCM_BY_ARCH.get(arch, 0))
        if installed < minimum:
            cause = f"this machine has ROCm {dotted(installed)}; kernels for {arch} need {dotted(minimum)}"
            raise LlmcError("E116", cause, "upgrade ROCm and the amdgpu driver")
        return dotted(installed)

    def properties(self, index: int) -> GpuProperties:
        """Return the properties of a GPU."""
        if self.hip.__name__.startswith("rocm."):  # hip-python 10
            device = self.ok(self.hip.hipGetDeviceProperties(index))
            return GpuProperties(device.name, device.gcnArchName, device.sharedMemPerBlock)
        device = self.hip.hipDeviceProp_t()
        self.ok(self.hip.hipGetDeviceProperties(device, index))
        return GpuProperties(device.name.decode(), device.gcnArchName.decode(), device.sharedMemPerBlock)

    def set_device(self, index: int) -> None:
        """Make a GPU current in the calling thread."""
        self.ok(self.hip.hipSetDevice(index))

    def allocate(self, nbytes: int) -> tuple[Any, ...]:
        status, memory = self.hip.hipMalloc(nbytes)
        return status, 0 if status else int(memory)

    def pin(self, nbytes: int) -> int:
        return int(self.ok(self.hip.hipHostMalloc(nbytes, 0)))

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.ok(self.hip.hipMemcpyAsync(target, source, nbytes, self._in, stream))

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.ok(self.hip.hipMemcpyAsync(target, source, nbytes, self._out, stream))

    def copy_within(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.ok(self.hip.hipMemcpyAsync(target, source, nbytes, self._within, stream))

    def read(self, target: int, source: int, nbytes: int) -> None:
        self.ok(self.hip.hipMemcpy(target, source, nbytes, self._out))

    def launch_config(self, launch: Launch, stream: Any) -> LaunchConfig:
        """Return the configuration of a launch with a grid of 1. Raises LlmcError E113 for dependent launches and
        clusters, which AMD GPUs do not have.
        """
        if launch.pdl or launch.cluster:
            feature = "a dependent launch" if launch.pdl else "a cluster of blocks"
            raise LlmcError("E113", f"{launch.entry} uses {feature}, which AMD GPUs lack", "recompile the artifact")
        return LaunchConfig(launch.threads, launch.shared, stream)

    def launch(self, config: LaunchConfig, function: Any, params: int) -> tuple[Any, ...]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.threads, 1, 1)
        return self.hip.hipModuleLaunchKernel(function, *grid, *block, config.shared, config.stream, params, None)

    def begin_capture(self, stream: Any) -> None:
        self.ok(self.hip.hipStreamBeginCapture(stream, self._capture_mode))


def _bindings() -> Any:
    """Import hip-python. Raises LlmcError E115 if it is not installed."""
    try:
        from hip import hip
    except ImportError as error:
        remedy = f"{install_command('rocm')} (hip-python of the machine's version of ROCm, such as hip-python~=7.2)"
        cause = f"AMD GPUs need the package hip-python, which cannot be imported: {error}"
        raise LlmcError("E115", cause, remedy) from None
    return hip
