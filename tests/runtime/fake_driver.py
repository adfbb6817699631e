"""A driver without a GPU, compiled and loaded in place of the real one: what libcuda and libamdhip64 have in common."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernel_cache import library, preprocessed


class FakeDriver:
    """Control functions of a fake library: faults, the log of calls, and open resources."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self.lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.lib.fake_log.restype = ctypes.c_char_p
        self.lib.fake_used.restype = ctypes.c_long
        self.lib.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]

    def fail(self, name: str, status: int, after: int = 0) -> None:
        """Make a later call of this function fail with a status, after `after` successful ones. "kernel": a kernel's
        execution.
        """
        self.lib.fake_fail(name.encode(), status, after)

    def log(self) -> list[str]:
        """Return the calls since the last use of this method."""
        text = self.lib.fake_log().decode().split()
        self.lib.fake_clear_log()
        return text

    @contextmanager
    def reset(self) -> Iterator[None]:
        """Reset the library for the block, which must release everything."""
        self.lib.fake_reset()
        self.log()
        yield
        assert self.used == 0, "something was not released"

    @property
    def used(self) -> int:
        """The number of allocations, registrations, streams and contexts that have not been released."""
        return int(self.lib.fake_used())


def build(source: Path, folder: Path, name: str, *flags: str) -> Path:
    """Compile a fake library as `name`, under which the bindings look for it."""
    out = folder / name
    out.write_bytes(library(preprocessed(source), "-std=c++17", "-O1", f"-Wl,-soname,{name}", *flags))
    return out
