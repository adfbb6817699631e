"""Rounds groups of columns to 8-bit codes with a scale each."""

import triton
import triton.language as tl


@triton.jit
def round_groups(x, GROUP: tl.constexpr, LIMIT: tl.constexpr, WHOLE_NUMBERS: tl.constexpr):
    """Return the codes of float32 numbers x [.., columns], not converted yet, and the scales [.., columns // GROUP].

    LIMIT: the largest code. A group of zeros has the scale 0. WHOLE_NUMBERS: round to the nearest integer, halves up.
    """
    groups = tl.reshape(x, x.shape[:-1] + [x.shape[-1] // GROUP, GROUP])
    largest = tl.max(tl.abs(groups), axis=len(x.shape), keep_dims=True)
    codes = groups * tl.div_rn(tl.full(largest.shape, LIMIT, tl.float32), tl.maximum(largest, 1e-30))
    if WHOLE_NUMBERS:
        codes = tl.floor(codes + 0.5)
    return tl.reshape(codes, x.shape), tl.reshape(largest * (1.0 / LIMIT), groups.shape[:-1])
