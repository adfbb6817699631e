"""From an artifact to the device that it was compiled for, opened; it loads nothing onto it."""

from __future__ import annotations

from llmc_runtime.artifact import Artifact
from llmc_runtime.device.device import Device
from llmc_runtime.format.errors import LlmcError


def open_device(artifact: Artifact, threads: int | None, *, careful: bool = False) -> Device:
    """The device that the artifact was compiled for; `threads` compute on the CPU, and copy weights to a GPU.

    `careful`: a GPU is waited for after every launch, so that a failure names its kernel; a CPU always does so.

    LlmcError E112 where the kind is unknown, E115 to E117 where this machine or runtime has none that serves.
    """
    target = artifact.manifest.target
    family = target.name.partition(":")[0]
    if family == "cpu":
        from llmc_runtime.device.cpu import CpuDevice

        return CpuDevice(threads)
    if family == "cuda":
        from llmc_runtime.device.cuda import CudaDevice

        return CudaDevice(target, threads, careful=careful)
    remedy = "recompile for this machine: llmc compile MODEL --target cpu:native (or cuda:sm_90)"
    if family == "hip":
        raise LlmcError("E115", f"the artifact is for {target.name}; this runtime cannot run on AMD GPUs yet", remedy)
    raise LlmcError("E112", f"the artifact is for {target.name}; this runtime has no device of that kind", remedy)
