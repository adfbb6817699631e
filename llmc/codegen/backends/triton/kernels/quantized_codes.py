"""Codes of quantised weights as factors: bytes with one signed code, or with two codes of 4 bits (see pack_nibbles)."""

import triton
import triton.language as tl


@triton.jit
def low_codes(packed, zero, ZERO_POINT: tl.constexpr):
    """Return the codes in the low four bits less their zero points, as integers. zero: None for ZERO_POINT."""
    code = (packed & 15).to(tl.int8)
    return code - (ZERO_POINT if zero is None else zero)


@triton.jit
def high_codes(packed, zero, ZERO_POINT: tl.constexpr):
    """Return the codes in the high four bits less their zero points, as integers. zero: None for ZERO_POINT."""
    code = (packed >> 4).to(tl.int8)
    return code - (ZERO_POINT if zero is None else zero)
