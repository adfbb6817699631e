"""The CUDA driver API through the Python bindings of CUDA 12 and 13: loading, initialization and error reporting.

Everything that differs between the two generations is here. The functions and constants that the CUDA device uses have
the same names and parameters from cuda-bindings 12.8 to 13; the drivers on which they initialize differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from llmc_runtime.device.gpu.driver import MAP_BYTES, OR_CPU, GpuDriver, dotted
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.install_command import install_command
from llmc_runtime.format.launch_param import MAPPED
from llmc_runtime.format.program import Launch

# The minimum CUDA version of the driver (1000 * major + 10 * minor) for loading an architecture's binaries and for
# programmatic dependent launch inside graphs.
_MIN_DRIVER = 12030
_MIN_DRIVER_BY_ARCH: Mapping[str, int] = MappingProxyType({"sm_100": 12080, "sm_103": 12090, "sm_120": 12080})
_UPGRADE = "upgrade the NVIDIA driver"
_MAPS_SINCE = 12000  # the driver API version that introduced tensor maps
_TENSOR_MAP_TYPES: Mapping[str, str] = MappingProxyType(
    {"bf16": "BFLOAT16", "f16": "FLOAT16", "i8": "UINT8", "f8e4m3": "UINT8"}
)
_PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without opting in
_READ_ONLY = 8  # flag of cuMemHostRegister
_PEER_ACCESS = 1  # flag of cuIpcOpenMemHandle: enable access to the other GPU if needed
_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "GetDeviceCount": "DeviceGetCount",
        "Free": "MemFree",
        "HostFree": "MemFreeHost",
        "MemsetAsync": "MemsetD8Async",
        "StreamCreateWithFlags": "StreamCreate",
        "EventCreateWithFlags": "EventCreate",
        "GraphInstantiateWithFlags": "GraphInstantiate",
    }
)
# Statuses of a refusal to register host memory. They do not indicate a failure of the GPU.
_REFUSALS = frozenset(
    "CUDA_ERROR_" + name
    for name in ("INVALID_VALUE", "OUT_OF_MEMORY", "OPERATING_SYSTEM", "NOT_PERMITTED", "NOT_SUPPORTED")
)
# Errors of executed work after which the context is unusable.
_FATAL = frozenset(
    "CUDA_ERROR_" + name
    for name in (
        "DEVICE_UNAVAILABLE", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "TENSOR_MEMORY_LEAK", "CONTAINED", "UNKNOWN",
    )
)  # fmt: skip


class Cuda(GpuDriver):
    """The initialized driver API. `cu` is the bindings' module, whose functions return (CUresult, *values)."""

    api = "CUDA"
    prefix = "cu"
    renamed = _RENAMED
    statuses = "CUresult"
    out_of_memory = "CUDA_ERROR_OUT_OF_MEMORY"
    not_ready = "CUDA_ERROR_NOT_READY"
    fatal = _FATAL

    def __init__(self, cu: Any = None) -> None:
        """Raises LlmcError E115 if there is no driver or no GPU."""
        self.cu = cu if cu is not None else _bindings()
        super().__init__(self.cu)
        try:
            status = int(self.cu.cuInit(0)[0])
        except RuntimeError as error:  # raised by the bindings if libcuda cannot be loaded or lacks a function
            cause = f"no NVIDIA driver found ({error})"
            raise LlmcError("E115", cause, f"install the driver (for containers: --gpus all), {OR_CPU}") from None
        if status:
            name = self.name(status)
            cause = f"the NVIDIA driver does not start: {name}"
            if name == "CUDA_ERROR_NO_DEVICE":
                cause = "the NVIDIA driver finds no GPU (CUDA_ERROR_NO_DEVICE)"
            raise LlmcError("E115", cause, f"check nvidia-smi and CUDA_VISIBLE_DEVICES, {OR_CPU}")

    def _text(self, status: int) -> str:
        try:
            result = self.cu.cuGetErrorString(self.cu.CUresult(status))
        except (RuntimeError, ValueError):
            return "unknown"
        return result[1].decode() if not result[0] and result[1] else "unknown"

    def check_driver(self, arch: str) -> str:
        """Return the driver's CUDA version as text. Raises LlmcError E116 if binaries for `arch` need a later one."""
        version = int(self.ok(self.cu.cuDriverGetVersion()))
        minimum = max(_MIN_DRIVER, _MIN_DRIVER_BY_ARCH.get(arch.rstrip("af"), 0))
        if version < minimum:
            cause = f"the NVIDIA driver supports CUDA {dotted(version)}; kernels for {arch} need {dotted(minimum)}"
            raise LlmcError("E116", cause, _UPGRADE)
        return dotted(version)

    def follow(self, stream: int, other: int) -> None:
        """Make later work in `stream` wait for the work already in `other`. The values 1 and 2 are default streams."""
        event = self.event()
        try:
            self.ok(self.cu.cuEventRecord(event, other))
            self.ok(self.cu.cuStreamWaitEvent(stream, event, 0))
        finally:
            self.cu.cuEventDestroy(event)  # the wait in the stream remains

    def attribute(self, device: Any, name: str) -> int:
        """Return a device attribute, such as "COMPUTE_CAPABILITY_MAJOR"."""
        attribute_id = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.ok(self.cu.cuDeviceGetAttribute(attribute_id, device)))

    def register(self, address: int, nbytes: int) -> str:
        """Pin pages of mapped memory for reading by the GPU. Returns "", or the reason why the driver refuses.

        Raises LlmcError E114 if the GPU has failed. `unregister` at the same address reverts it.
        """
        status = int(self.cu.cuMemHostRegister(address, nbytes, _READ_ONLY)[0])
        if status and (self.lost or self.name(status) not in _REFUSALS):
            raise self.error(status)
        return f"cuMemHostRegister: {self.name(status)}" if status else ""

    def allow_shared(self, function: Any, nbytes: int) -> None:
        """Allow launches of the kernel with up to `nbytes` of dynamic shared memory."""
        if nbytes > _PLAIN_SHARED:
            attribute_id = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.ok(self.cu.cuFuncSetAttribute(function, attribute_id, nbytes))

    def tensor_map(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
    ) -> bytes:
        """Encode a CUtensorMap (128 bytes) for a tensor of one of the dtypes of `MAPPED`.

        `strides` are in elements, one per axis, the last of them 1. `address` and the strides of the other axes have to
        be multiples of 16 bytes; `box` is the shape of one copy. Raises LlmcError E114 if the driver rejects the
        arguments, and E116 if it does not support tensor maps.
        """
        cu, rank = self.cu, len(shape)
        kind = getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TENSOR_MAP_TYPES[dtype]}")
        steps = [MAPPED[dtype] * s for s in reversed(strides[:-1])]
        # The bindings' own function is not used: it keeps the map at an address that is not a multiple of 64 bytes,
        # which the driver requires.
        storage = ctypes.create_string_buffer(2 * MAP_BYTES)
        begin = -ctypes.addressof(storage) % MAP_BYTES
        status = self._encode(
            ctypes.addressof(storage) + begin, int(kind), rank, address, _longs(reversed(shape)), _longs(steps),
            _ints(reversed(box)), _ints([1] * rank), int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            swizzle, int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
            int(cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )  # fmt: skip
        if status:
            raise self.error(status)
        return storage.raw[begin : begin + MAP_BYTES]

    @cached_property
    def _encode(self) -> Callable[..., int]:
        """cuTensorMapEncodeTiled(out, type, rank, address, sizes, strides, box, element strides, four options)."""
        name = "cuTensorMapEncodeTiled"
        address, _ = self.ok(self.cu.cuGetProcAddress(name.encode(), _MAPS_SINCE, 0))
        if not address:  # reported with a status of success
            raise LlmcError("E116", f"the NVIDIA driver has no {name}, which the kernels need", _UPGRADE)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        kinds = (pointer, number, ctypes.c_uint, *[pointer] * 5, *[number] * 4)
        return ctypes.CFUNCTYPE(number, *kinds)(int(address))

    def launch_config(self, launch: Launch, stream: Any) -> Any:
        """Return a launch configuration with a grid of 1. `launch.pdl` allows programmatic dependent launch: the kernel
        may start before the preceding one has ended. `launch.cluster` is the number of blocks of a cluster along x, y
        and z.
        """
        ids = self.cu.CUlaunchAttributeID
        attributes = []
        config = self.cu.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
        config.sharedMemBytes, config.hStream = launch.shared, stream
        if launch.pdl:
            attribute = self.cu.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if launch.cluster:
            attribute = self.cu.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = launch.cluster
            attributes.append(attribute)
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def allocate(self, nbytes: int) -> tuple[Any, ...]:
        return self.cu.cuMemAlloc(nbytes)

    def pin(self, nbytes: int) -> int:
        return int(self.ok(self.cu.cuMemAllocHost(nbytes)))

    def unregister(self, address: int) -> tuple[Any, ...]:
        return self.cu.cuMemHostUnregister(address)

    def can_access(self, number: int, other: int) -> bool:
        devices = [self.ok(self.cu.cuDeviceGet(n)) for n in (number, other)]
        return bool(self.ok(self.cu.cuDeviceCanAccessPeer(*devices)))

    def share(self, address: int) -> bytes:
        return bytes(self.ok(self.cu.cuIpcGetMemHandle(address)).reserved)

    def open_shared(self, handle: bytes) -> tuple[Any, ...]:
        shared = self.cu.CUipcMemHandle()
        shared.reserved = handle
        return self.cu.cuIpcOpenMemHandle(shared, _PEER_ACCESS)

    def close_shared(self, address: int) -> None:
        self.cu.cuIpcCloseMemHandle(address)

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.ok(self.cu.cuMemcpyHtoDAsync(target, source, nbytes, stream))

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.ok(self.cu.cuMemcpyDtoHAsync(target, source, nbytes, stream))

    def copy_within(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.ok(self.cu.cuMemcpyDtoDAsync(target, source, nbytes, stream))

    def read(self, target: int, source: int, nbytes: int) -> None:
        self.ok(self.cu.cuMemcpyDtoH(target, source, nbytes))

    def launch(self, config: Any, function: Any, params: int) -> tuple[Any, ...]:
        return self.cu.cuLaunchKernelEx(config, function, params, 0)

    def begin_capture(self, stream: Any) -> None:
        self.ok(self.cu.cuStreamBeginCapture(stream, self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))


def _longs(values: Iterable[int]) -> Any:
    items = list(values)
    return (ctypes.c_uint64 * len(items))(*items)


def _ints(values: Iterable[int]) -> Any:
    items = list(values)
    return (ctypes.c_uint32 * len(items))(*items)


def _bindings() -> Any:
    """Import cuda-bindings. Raises LlmcError E115 if it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        remedy = f"{install_command('cuda13')} (cuda12, if the driver supports CUDA 12 only)"
        raise LlmcError("E115", f"the package cuda-bindings cannot be imported: {error}", remedy) from None
    return driver
