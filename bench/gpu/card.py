"""Whether this machine has a GPU that CUDA programs can use; it opens nothing on it."""

from __future__ import annotations


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
