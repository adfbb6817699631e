"""Whether this machine has a GPU that CUDA programs can use, and in what state it is; it opens nothing on it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

FACTS = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"


def why_no_gpu() -> str | None:
    """None where a CUDA device can be used, else the reason in words."""
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
    """One line of nvidia-smi about clocks, power, heat and memory in use; why not, where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={FACTS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"nvidia-smi does not answer ({e})"
    return done.stdout.strip() or f"nvidia-smi ended with {done.returncode}"


def skip_without_gpu(items: list[Any], folder: Path) -> None:
    """Give pytest's items under a folder that are marked `gpu` a skip with its reason, where there is no GPU."""
    import pytest

    marked = [i for i in items if folder in i.path.parents and i.get_closest_marker("gpu")]
    if marked and (why := why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))
