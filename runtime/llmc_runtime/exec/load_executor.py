"""Opens an artifact as an executor: on its device, or as a group of ranks.

The modules of ranks are imported if there are several, since they need packages of the extra `serve`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmc_runtime.artifact import Artifact, open_artifact
from llmc_runtime.device.device import Device
from llmc_runtime.device.open_device import open_device
from llmc_runtime.exec.draft_artifact import open_with_draft
from llmc_runtime.exec.executor import Executor
from llmc_runtime.heartbeat import HEARTBEAT_TIMEOUT

if TYPE_CHECKING:
    from llmc_runtime.exec.rank_group import RankGroup


def load_executor(path: str | Path, *, kv_bytes: int | None = None, careful: bool = False) -> Executor:
    """Open and check the artifact and load it onto its device, for tools. The caller closes the executor.

    Raises the LlmcErrors of `open_with_draft`, `open_device` and `Executor`.
    """
    artifact = open_with_draft(path)
    group = start_ranks(artifact, None)
    device: Device | None = None
    try:
        threads, member = (group.threads, group.member) if group else (None, None)
        device = open_device(artifact, threads, careful=careful, member=member)
        return make_executor(artifact, device, group, kv_bytes)
    except BaseException:
        release(device, group)
        raise


def load_kernels(path: str | Path) -> None:
    """Open and check the artifact, also of a draft model, and load its kernels onto its device, for tools.

    Raises the LlmcErrors of `open_artifact` and `open_device`, and E112.
    """
    artifact = open_artifact(path)
    device = open_device(artifact, None)
    try:
        device.load(artifact)
    finally:
        device.close()


def start_ranks(
    artifact: Artifact,
    threads: int | None,
    verify: bool = True,
    ray: bool = False,
    engine: int = 0,
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
) -> RankGroup | None:
    """Start the processes of the other ranks, with `threads` threads each; None if the artifact has one rank. `engine`
    is the number of the engine. A rank hangs once it has sent no heartbeat for `heartbeat_timeout` seconds.

    With `ray`, they are actors of a Ray cluster. Raises the LlmcErrors of RankGroup.
    """
    if artifact.manifest.ranks == 1:
        return None
    from llmc_runtime.exec.rank_group import RankGroup

    return RankGroup(artifact, threads, verify, ray=ray, engine=engine, heartbeat_timeout=heartbeat_timeout)


def make_executor(
    artifact: Artifact, device: Device, group: RankGroup | None, kv_bytes: int | None, snapshots: int | None = 0
) -> Executor:
    """Load the artifact onto the device and onto those of the other ranks. Raises the LlmcErrors of `Executor`."""
    if group is None:
        return Executor(artifact, device, kv_bytes, snapshots)
    from llmc_runtime.exec.group_executor import GroupExecutor

    return GroupExecutor(artifact, device, group, kv_bytes, snapshots)


def release(device: Device | None, group: RankGroup | None) -> None:
    """Close what was opened before an executor could be made."""
    if group is not None:
        group.close()
    if device is not None:
        device.close()
