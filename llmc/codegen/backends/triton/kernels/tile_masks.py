"""Bounds of tiles. WHOLE means that the tile divides the size exactly, so that no element is out of bounds.

A mask that is always true costs nothing, because Triton removes it from loads and stores.
"""

import triton
import triton.language as tl


@triton.jit
def bound(index, size, WHOLE: tl.constexpr):
    """Return the mask of the elements of `index` that are below `size`."""
    if WHOLE:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < size


@triton.jit
def clamp(index, size, WHOLE: tl.constexpr):
    """Return `index`, with indices past the end replaced by the last index."""
    if WHOLE:
        return index
    else:
        return tl.minimum(index, size - 1)
