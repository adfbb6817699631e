"""The CUDA device on a driver without a GPU: libcuda/check_*.py, in a process of their own, as the library stays."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted((Path(__file__).parent / "libcuda").glob("check_*.py"))


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.drawn
def test_on_a_driver_without_a_gpu() -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    if has_driver():
        pytest.skip("this machine has a driver: tests/gpu run the device on it")
    assert CHECKS
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, CHECKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
