"""The HIP device: one AMD GPU, driven through the HIP API (hip-python).

No test has run on AMD hardware; docs/amd.md describes what has been tested.
"""

from __future__ import annotations

from llmc_runtime.device.gpu.gpu_device import GpuDevice
from llmc_runtime.device.hip.driver import Hip
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import TargetInfo


class HipDevice(GpuDevice):
    """A GPU, by default the first one visible to this process; `index` is its number among them.

    `threads` read, hash and upload weights (default: the number of physical cores, at most 16). With `careful`, graphs
    are disabled and every launch is synchronized, so that an error names the kernel that failed. Weights are copied
    through pinned memory, as HIP does not register memory that is mapped for reading.

    Raises LlmcError E115 if there is no ROCm or no such GPU, E116 if ROCm is too old, and E117 if the GPU cannot run
    binaries for `target`.
    """

    family = "hip"
    abi = "hip-1"
    vendor = "AMD"
    api = "ROCm"
    visible_variable = "HIP_VISIBLE_DEVICES"

    def __init__(
        self, target: TargetInfo, threads: int | None = None, *, careful: bool = False, index: int = 0
    ) -> None:
        self._hip = hip = Hip()
        super().__init__(hip, threads, careful, index)
        device = hip.properties(index)
        self.name = device.name
        self.arch = device.arch.partition(":")[0]
        check_arch(target, self.arch, self.name)
        self.driver = hip.check_driver(target.arch)
        self._shared = device.shared
        self._start()

    def _make_current(self) -> None:
        self._hip.set_device(self.number)


def check_arch(target: TargetInfo, arch: str, gpu: str) -> None:
    """Raise LlmcError E117 if a GPU of architecture `arch`, such as "gfx942", cannot run binaries for the target.

    Code objects run on exactly the architecture that they were compiled for.
    """
    if target.arch != arch:
        cause = f"the artifact is for {target.name} ({target.arch}); this GPU is {arch} ({gpu})"
        raise LlmcError("E117", cause, f"recompile for it: llmc compile MODEL --target hip:{arch}")
