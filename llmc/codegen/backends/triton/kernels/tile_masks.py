"""Bounds of tiles. WHOLE says that tiles divide a size exactly: then nothing reaches past its end.

A mask that is true everywhere costs nothing: Triton removes it from loads and stores.
"""

import triton
import triton.language as tl


@triton.jit
def bound(index, size, WHOLE: tl.constexpr):
    """The mask of the elements of `index` that are below `size`."""
    if WHOLE:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < size


@triton.jit
def clamp(index, size, WHOLE: tl.constexpr):
    """`index`, with the last index in place of those past the end."""
    if WHOLE:
        return index
    else:
        return tl.minimum(index, size - 1)
