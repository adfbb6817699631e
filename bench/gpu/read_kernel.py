"""A minimal Triton kernel that reads memory once, for bench.gpu.ceilings. Importing it requires Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(x, y, BLOCK: tl.constexpr):
    """y[i] = the sum of the i-th BLOCK elements of x."""
    i = tl.program_id(0)
    at = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.sum(tl.load(x + at, eviction_policy="evict_first"), 0))
