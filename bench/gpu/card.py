"""Detects a usable CUDA GPU and reports its state, without opening a context on it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

FACTS = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"


def why_no_gpu() -> str | None:
    """Return None if a CUDA device can be used, or the reason why not."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        return f"cuda-bindings is not installed ({e})"
    try:
        (status,) = driver.cuInit(0)
        if status != driver.CUresult.CUDA_SUCCESS:
            return f"the driver answers {status.name}"
        status, count = driver.cuDeviceGetCount()
    except RuntimeError as e:
        return f"there is no CUDA driver ({' '.join(str(e).split())[:80]})"
    return None if count else "the driver sees no device"


def state() -> str:
    """Return a line of nvidia-smi with clocks, power, temperature and memory in use, or why it failed."""
    command = ["nvidia-smi", f"--query-gpu={FACTS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"nvidia-smi does not answer ({e})"
    return done.stdout.strip() or f"nvidia-smi ended with {done.returncode}"


def skip_without_gpu(items: list[Any], folder: Path) -> None:
    """Skip pytest's items under a folder that are marked `gpu`, with the reason, if there is no GPU."""
    import pytest

    marked = [i for i in items if folder in i.path.parents and i.get_closest_marker("gpu")]
    if marked and (why := why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))
