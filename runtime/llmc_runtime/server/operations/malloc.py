"""Tunes glibc's allocator to return freed memory: large blocks are mapped separately, the heap's end is trimmed."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # in glibc's malloc.h
_THRESHOLD_BYTES = 256 << 10


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def return_freed_memory(arenas: int) -> None:
    """Make this process return freed memory to the system. `arenas` limits the number of heaps for threads.

    Setting the thresholds also keeps glibc from raising them. Has no effect if the C library has no mallopt.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES)
        mallopt(_M_ARENA_MAX, arenas)


def trim() -> None:
    """Also return free pages inside the heap."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if unknown."""
    return _pages(1)


def address_bytes() -> int:
    """Return the size of this process's address space in bytes; 0 if unknown."""
    return _pages(0)


def _pages(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0
