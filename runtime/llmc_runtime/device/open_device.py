"""Selects and opens the device that an artifact was compiled for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc_runtime.artifact import Artifact
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.manifest import Manifest

if TYPE_CHECKING:
    from llmc_runtime.device.device import Device, Member


def prepare_device(manifest: Manifest, number: int) -> None:
    """Begin to initialize GPU `number` in another thread if the artifact needs one, while its programs are read.

    If its device is not opened after all, `discard_device` has to be called.
    """
    if manifest.target.name.partition(":")[0] == "cuda" and manifest.ranks == 1:
        from llmc_runtime.device.cuda.early_context import EarlyContext

        EarlyContext.begin(number)


def discard_device(manifest: Manifest, number: int) -> None:
    """Undo `prepare_device`, if the device has not been opened."""
    if manifest.target.name.partition(":")[0] == "cuda" and manifest.ranks == 1:
        from llmc_runtime.device.cuda.early_context import EarlyContext

        EarlyContext.discard(number)


def open_device(
    artifact: Artifact,
    threads: int | None,
    *,
    careful: bool = False,
    index: int = 0,
    engines: int = 1,
    member: Member | None = None,
) -> Device:
    """Open the device that the artifact was compiled for.

    `threads` is the number of compute threads on a CPU, and of threads that upload weights to a GPU; None selects the
    device's default. With `careful`, a GPU is synchronized after every launch, so that an error names the kernel that
    failed; a CPU reports errors synchronously in any case. `index` is the number of the engine, of `engines`, which
    determines its GPU among those visible. `member` is the device's place in a group, if the artifact has several
    ranks.

    Raises LlmcError E112 if the runtime has no such kind of device, E115 to E117 if this machine or this runtime cannot
    run the target, and E143 if the artifact's ranks use NCCL and it cannot be used.
    """
    device = _device(artifact, threads, careful, index, member)
    device.users = engines * artifact.manifest.ranks
    return device


def _device(artifact: Artifact, threads: int | None, careful: bool, index: int, member: Member | None) -> Device:
    target = artifact.manifest.target
    family = target.name.partition(":")[0]
    if family == "cpu":
        from llmc_runtime.device.cpu_device import CpuDevice

        return CpuDevice(threads, member)
    if family == "cuda":
        from llmc_runtime.device.cuda.cuda_device import CudaDevice

        nccl = member is not None and _uses_nccl(artifact.manifest)
        return CudaDevice(target, threads, careful=careful, index=index, member=member, nccl=nccl)
    if artifact.manifest.ranks > 1:
        cause = f"the artifact is for {artifact.manifest.ranks} ranks on {target.name}, which are not supported"
        raise LlmcError("E112", cause, "recompile it without --tensor-parallel-size")
    if family == "hip":
        from llmc_runtime.device.hip.hip_device import HipDevice

        return HipDevice(target, threads, careful=careful, index=index)
    remedy = "recompile for this machine: llmc compile MODEL --target cpu:native (or cuda:sm_90)"
    raise LlmcError("E112", f"the artifact is for {target.name}; this runtime has no device of that kind", remedy)


def _uses_nccl(manifest: Manifest) -> bool:
    from llmc_runtime.format.nccl_call import uses_nccl

    return uses_nccl(manifest)
