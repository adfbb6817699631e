"""Keeps freed memory with the system: large blocks are mapped one by one, and the heap's end is given back."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_THRESHOLD = 256 << 10  # bytes


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def return_freed_memory(arenas: int) -> None:
    """Have this process return what it frees; setting the thresholds also keeps glibc from raising them. `arenas`
    bounds the heaps of threads. Without effect where the C library has no mallopt."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _THRESHOLD)
        mallopt(_M_ARENA_MAX, arenas)


def trim() -> None:
    """Return the free pages within the heap, too."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def resident_bytes() -> int:
    """Memory of this process that is in use; 0 where the system does not tell."""
    return _pages(1)


def address_bytes() -> int:
    """Size of this process's address space; 0 where the system does not tell."""
    return _pages(0)


def _pages(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0
