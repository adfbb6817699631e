"""The driver without a GPU, built and put in the place of libcuda; see test_cuda_driver.py, which starts this."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Driver:
    """The library's own functions, for tests: faults, what GPU it pretends to be, what was called, what is held."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.lib.fake_log.restype = ctypes.c_char_p
        for count in (self.lib.fake_used, self.lib.fake_registrations, self.lib.fake_most_registered):
            count.restype = ctypes.c_long
        self.lib.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]
        self.lib.fake_gpu.argtypes = [ctypes.c_int] * 4 + [ctypes.c_ulonglong]

    def fail(self, name: str, status: int, after: int = 0) -> None:
        """The call of this name after so many more fails with a status; "kernel": a kernel, when it runs."""
        self.lib.fake_fail(name.encode(), status, after)

    def gpu(self, version: int = 13000, major: int = 9, minor: int = 0, count: int = 1, nbytes: int = 1 << 30) -> None:
        """What the machine has."""
        self.lib.fake_gpu(version, major, minor, count, nbytes)

    def registers(self, yes: bool) -> None:
        """Whether the GPU can read registered memory that is mapped read-only."""
        self.lib.fake_registers(int(yes))

    @property
    def registrations(self) -> int:
        """How often memory was registered since the test began."""
        return int(self.lib.fake_registrations())

    @property
    def most_registered(self) -> int:
        """Bytes that were registered at once, at most."""
        return int(self.lib.fake_most_registered())

    def log(self) -> list[str]:
        """What was asked for since the last call of this."""
        text = self.lib.fake_log().decode().split()
        self.lib.fake_clear_log()
        return text

    @property
    def used(self) -> int:
        """Allocations, registrations, streams and contexts that were not given back."""
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
