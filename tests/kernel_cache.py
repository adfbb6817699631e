"""A cache of compiled kernels that the tests of a checkout share: equal sources are compiled once."""

from __future__ import annotations

from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / "build" / "test-cache"
