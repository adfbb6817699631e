"""A cache of compiled kernels that the tests of a checkout share: equal sources are compiled once."""

from __future__ import annotations

from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / "build" / "test-cache"


def with_kernels(cache: Path) -> Path:
    """Make an empty cache whose kernels are those of CACHE: an artifact is compiled anew, its kernels are not."""
    kernels = CACHE / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    cache.mkdir()
    (cache / "kernels").symlink_to(kernels)
    return cache
