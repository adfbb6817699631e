"""The CUDA device: one NVIDIA GPU, driven through the driver API (cuda-bindings)."""

from __future__ import annotations

import re
from typing import Any

from llmc_runtime.device.cuda.device_array import CudaMemory
from llmc_runtime.device.cuda.driver import Cuda
from llmc_runtime.device.cuda.early_context import EarlyContext
from llmc_runtime.device.device import Member
from llmc_runtime.device.gpu.device_group import DeviceGroup
from llmc_runtime.device.gpu.gpu_device import GpuDevice
from llmc_runtime.device.gpu.weight_upload import MAPPED, PINNED
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import TargetInfo


class CudaDevice(GpuDevice):
    """A GPU, by default the first one visible to this process; `index` is its number among them. With `member`, it is
    the GPU of that rank of the engine number `index`; with `nccl`, its ranks exchange results by NCCL.

    `threads` read, hash and upload weights (default: the number of physical cores, at most 16). With `careful`, graphs
    are disabled and every launch is synchronized, so that an error names the kernel that failed.

    Raises LlmcError E115 if there is no driver or no such GPU, or if it cannot access the GPUs of the other ranks, E116
    if the driver is too old, E117 if the GPU cannot run binaries for `target`, and E143 if NCCL cannot be used.
    """

    family = "cuda"
    abi = "cuda-1"
    vendor = "NVIDIA"
    api = "CUDA"
    visible_variable = "CUDA_VISIBLE_DEVICES"

    def __init__(
        self,
        target: TargetInfo,
        threads: int | None = None,
        *,
        careful: bool = False,
        index: int = 0,
        member: Member | None = None,
        nccl: bool = False,
    ) -> None:
        self._cuda = cuda = Cuda()
        group = None if member is None else _group(cuda, member, nccl)
        super().__init__(cuda, threads, careful, index, group)
        self._device = cuda.ok(cuda.cu.cuDeviceGet(self.number))
        major, minor = (cuda.attribute(self._device, f"COMPUTE_CAPABILITY_{x}") for x in ("MAJOR", "MINOR"))
        self.name = cuda.ok(cuda.cu.cuDeviceGetName(128, self._device)).split(b"\0")[0].decode()
        self.arch = f"sm_{major}{minor}"
        check_arch(target, self.arch, self.name)
        self.driver = cuda.check_driver(target.arch)
        self._shared = cuda.attribute(self._device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self._method = MAPPED if cuda.attribute(self._device, "READ_ONLY_HOST_REGISTER_SUPPORTED") else PINNED
        early = EarlyContext.take(self.number)
        self._context: Any = early or cuda.ok(cuda.cu.cuDevicePrimaryCtxRetain(self._device))
        self._start()

    def alloc(self, nbytes: int) -> CudaMemory:
        """Allocate zeroed device memory; raise LlmcError E203 if there is not enough."""
        memory = super().alloc(nbytes)
        return CudaMemory(memory.address, nbytes, memory.host, self)

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

    def _make_current(self) -> None:
        self._cuda.ok(self._cuda.cu.cuCtxSetCurrent(self._context))

    def _release(self) -> None:
        self._cuda.cu.cuCtxSetCurrent(None)
        self._cuda.cu.cuDevicePrimaryCtxRelease(self._device)


def _group(cuda: Cuda, member: Member, nccl: bool) -> DeviceGroup:
    """Return the device's place in the group of ranks. Only a device of a group imports the modules of groups."""
    if nccl:
        from llmc_runtime.device.cuda.nccl_group import NcclGroup

        return NcclGroup(member)
    from llmc_runtime.device.gpu.gpu_group import GpuGroup

    return GpuGroup(cuda, member)


def check_arch(target: TargetInfo, arch: str, gpu: str) -> None:
    """Raise LlmcError E117 if a GPU of architecture `arch`, such as "sm_90", cannot run binaries for the target.

    From sm_90 on, kernels use instructions of exactly one architecture. Before that, binaries also run on later
    architectures of the same major version.
    """
    required, actual = (re.fullmatch(r"sm_(\d+)(\d)[af]?", x) for x in (target.arch, arch))
    if required and actual and required[1] == actual[1]:
        if required[2] == actual[2] or (int(required[1]) < 9 and int(required[2]) < int(actual[2])):
            return
    suitable = "sm_80" if actual and actual[1] == "8" else arch
    cause = f"the artifact is for {target.name} ({target.arch}); this GPU is {arch} ({gpu})"
    raise LlmcError("E117", cause, f"recompile for it: llmc compile MODEL --target cuda:{suitable}")
