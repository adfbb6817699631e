"""The driver without a GPU, compiled and loaded in place of libcuda; started by test_cuda_driver.py."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.fake_driver import FakeDriver, build


class Driver(FakeDriver):
    """Control functions of the fake library, with the simulated GPU and the registered memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for count in (self.lib.fake_registrations, self.lib.fake_most_registered):
            count.restype = ctypes.c_long
        self.lib.fake_gpu.argtypes = [ctypes.c_int] * 4 + [ctypes.c_ulonglong]

    def gpu(self, version: int = 13000, major: int = 9, minor: int = 0, count: int = 1, nbytes: int = 1 << 30) -> None:
        """Set the properties of the simulated GPU."""
        self.lib.fake_gpu(version, major, minor, count, nbytes)

    def registers(self, yes: bool) -> None:
        """Set whether the GPU can read registered memory that is mapped read-only."""
        self.lib.fake_registers(int(yes))

    def reaches(self, yes: bool) -> None:
        """Set whether GPUs can access each other's memory."""
        self.lib.fake_reaches(int(yes))

    @property
    def device(self) -> int:
        """The number of the GPU that was opened last."""
        return int(self.lib.fake_device())

    @property
    def retained(self) -> int:
        """How often the context is retained now."""
        return int(self.lib.fake_retained())

    @property
    def registrations(self) -> int:
        """The number of registrations since the start of the test."""
        return int(self.lib.fake_registrations())

    @property
    def most_registered(self) -> int:
        """The largest number of bytes registered at the same time."""
        return int(self.lib.fake_most_registered())


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    source = Path(__file__).with_name("libcuda.cpp")
    return Driver(build(source, tmp_path_factory.mktemp("libcuda"), "libcuda.so.1"))


@pytest.fixture
def driver(library: Driver) -> Iterator[Driver]:
    with library.reset():
        yield library
