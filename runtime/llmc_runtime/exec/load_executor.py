"""Opens an artifact directly as an executor, for tools. Serving uses the engine instead."""

from __future__ import annotations

from pathlib import Path

from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.open_device import open_device
from llmc_runtime.exec.executor import Executor


def load_executor(
    path: str | Path, *, kv_bytes: int | None = None, threads: int | None = None, careful: bool = False
) -> Executor:
    """Open and check the artifact and load it onto its device. The caller closes the executor.

    Raises the LlmcErrors of `open_artifact`, `open_device` and `Executor`.
    """
    artifact = open_artifact(path, threads=threads)
    device = open_device(artifact, threads, careful=careful)
    try:
        return Executor(artifact, device, kv_bytes)
    except BaseException:
        device.close()
        raise
