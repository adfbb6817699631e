"""The driver without a GPU, compiled and loaded in place of libcuda; started by test_cuda_driver.py."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Driver:
    """Control functions of the fake library: faults, the simulated GPU, the log of calls, and open resources."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.lib.fake_log.restype = ctypes.c_char_p
        for count in (self.lib.fake_used, self.lib.fake_registrations, self.lib.fake_most_registered):
            count.restype = ctypes.c_long
        self.lib.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]
        self.lib.fake_gpu.argtypes = [ctypes.c_int] * 4 + [ctypes.c_ulonglong]

    def fail(self, name: str, status: int, after: int = 0) -> None:
        """Make a later call of this function fail with a status, after `after` successful ones. "kernel": a kernel's
        execution.
        """
        self.lib.fake_fail(name.encode(), status, after)

    def gpu(self, version: int = 13000, major: int = 9, minor: int = 0, count: int = 1, nbytes: int = 1 << 30) -> None:
        """Set the properties of the simulated GPU."""
        self.lib.fake_gpu(version, major, minor, count, nbytes)

    def registers(self, yes: bool) -> None:
        """Set whether the GPU can read registered memory that is mapped read-only."""
        self.lib.fake_registers(int(yes))

    @property
    def registrations(self) -> int:
        """The number of registrations since the start of the test."""
        return int(self.lib.fake_registrations())

    @property
    def most_registered(self) -> int:
        """The largest number of bytes registered at the same time."""
        return int(self.lib.fake_most_registered())

    def log(self) -> list[str]:
        """Return the calls since the last use of this method."""
        text = self.lib.fake_log().decode().split()
        self.lib.fake_clear_log()
        return text

    @property
    def used(self) -> int:
        """The number of allocations, registrations, streams and contexts that have not been released."""
        return int(self.lib.fake_used())


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    out = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    source = Path(__file__).with_name("libcuda.cpp")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", out, source, "-ldl"]
    subprocess.run([str(c) for c in command], check=True)
    return Driver(out)


@pytest.fixture
def driver(library: Driver) -> Iterator[Driver]:
    library.lib.fake_reset()
    library.log()
    yield library
    assert library.used == 0, "something was not given back"
