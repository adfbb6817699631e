"""The HIP device on a simulated runtime: runs libamdhip64/check_*.py in another process, since the library stays
loaded. Also compares its declarations with ROCm's headers, and tests the errors on a machine without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.open_device import open_device
from llmc_runtime.format.errors import LlmcError

from llmc.artifact.write import write_artifact
from tests.runtime.libamdhip64 import toy

FOLDER = Path(__file__).parent / "libamdhip64"
CHECKS = sorted(FOLDER.glob("check_*.py"))
FAMILIES = 0.006  # share of the model families and GPUs that a run of this file draws: one
HEADERS = Path("/usr/include")


def has_bindings() -> bool:
    return importlib.util.find_spec("hip") is not None


def has_library() -> bool:
    try:
        ctypes.CDLL("libamdhip64.so")
    except OSError:
        return False
    return True


@pytest.mark.drawn
def test_on_a_runtime_without_a_gpu() -> None:
    if not has_bindings():
        pytest.skip("hip-python is not installed")
    if has_library():
        pytest.skip("this machine has ROCm, in whose place no other library is loaded")
    assert CHECKS
    drawn = ("--share", str(FAMILIES))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *drawn, *map(str, CHECKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_declarations_are_those_of_rocm() -> None:
    """Functions that differ from ROCm's declarations do not compile together with them."""
    if not (HEADERS / "hip" / "hip_runtime_api.h").is_file():
        pytest.skip("ROCm's headers (Debian: libamdhip64-dev) are not installed")
    source = FOLDER / "libamdhip64.cpp"
    command = ["g++", "-std=c++17", "-fsyntax-only", "-DREAL_HEADERS", "-D__HIP_PLATFORM_AMD__", source]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_artifact_without_the_bindings_the_library_or_a_gpu(tmp_path: Path) -> None:
    if Path("/dev/kfd").exists():
        pytest.skip("this machine has an AMD GPU")
    write_artifact(tmp_path / "toy.llmc", toy.parts(tmp_path))
    found = "finds no AMD GPU" if has_library() else "no ROCm found"
    words = found if has_bindings() else "need the package hip-python"
    with pytest.raises(LlmcError, match=rf"E115.*{words}.*\n  Try: "):
        open_device(open_artifact(tmp_path / "toy.llmc"), None)
