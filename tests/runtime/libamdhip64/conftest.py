"""HIP's runtime without a GPU, compiled and loaded in place of libamdhip64; started by test_hip_driver.py."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.fake_driver import FakeDriver, build


class Driver(FakeDriver):
    """Control functions of the fake library, with the simulated GPU."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lib.fake_gpu.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_ulonglong]
        self.lib.fake_extent.argtypes = [ctypes.c_ulonglong]
        self.lib.fake_extent.restype = ctypes.c_ulonglong

    def gpu(
        self, version: int = 70226015, arch: str = "gfx942:sramecc+:xnack-", count: int = 1, nbytes: int = 1 << 30
    ) -> None:
        """Set the properties of the simulated GPU; `version` is 10,000,000 * major + 100,000 * minor + patch."""
        self.lib.fake_gpu(version, arch.encode(), count, nbytes)

    def extent(self, address: int) -> int:
        """The bytes from an address to the end of its allocation."""
        return int(self.lib.fake_extent(address))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    source = Path(__file__).with_name("libamdhip64.cpp")
    return Driver(build(source, tmp_path_factory.mktemp("libamdhip64"), "libamdhip64.so"))


@pytest.fixture
def driver(library: Driver) -> Iterator[Driver]:
    with library.reset():
        yield library
