"""Codes of quantised weights as factors: bytes with one signed code, or with two codes of 4 bits (see pack_nibbles).

With ASSEMBLY, four bytes are converted at once: a permutation puts each code under the high byte of 128 (bf16) or of
1024 (f16), where the last bit is worth 1. An operation on pairs then subtracts 128 (1024) and the zero point.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# Codes under 128 in bf16: low to $0, $1 and high to $2, $3, from the bytes $4 and the pairs of -(128 + zero) $5, $6.
NIBBLES_BF16 = tl.constexpr("""{
.reg .b32 low, high, one, base;
mov.b32 one, 0x3F803F80;
mov.b32 base, 0x43434343;
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, base, 0x4140;
prmt.b32 $1, low, base, 0x4342;
prmt.b32 $2, high, base, 0x4140;
prmt.b32 $3, high, base, 0x4342;
fma.rn.bf16x2 $0, $0, one, $5;
fma.rn.bf16x2 $1, $1, one, $6;
fma.rn.bf16x2 $2, $2, one, $7;
fma.rn.bf16x2 $3, $3, one, $8;
}""")
# The same in f16 under 1024.
NIBBLES_F16 = tl.constexpr("""{
.reg .b32 low, high, base;
mov.b32 base, 0x64646464;
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, base, 0x4140;
prmt.b32 $1, low, base, 0x4342;
prmt.b32 $2, high, base, 0x4140;
prmt.b32 $3, high, base, 0x4342;
add.rn.f16x2 $0, $0, $5;
add.rn.f16x2 $1, $1, $6;
add.rn.f16x2 $2, $2, $7;
add.rn.f16x2 $3, $3, $8;
}""")
# Signed bytes: bit 7 under 128 is 256, so a code is its low seven bits less 128 if it is negative, both under 128.
BYTES_BF16 = tl.constexpr("""{
.reg .b32 low, sign, base, minus, a, b;
mov.b32 base, 0x43434343;
mov.b32 minus, 0xBF80BF80;
and.b32 low, $2, 0x7F7F7F7F;
and.b32 sign, $2, 0x80808080;
prmt.b32 a, sign, base, 0x4140;
prmt.b32 b, sign, base, 0x4342;
prmt.b32 $0, low, base, 0x4140;
prmt.b32 $1, low, base, 0x4342;
fma.rn.bf16x2 $0, a, minus, $0;
fma.rn.bf16x2 $1, b, minus, $1;
}""")
# Signed bytes plus 128, under 1024.
BYTES_F16 = tl.constexpr("""{
.reg .b32 code, base, less;
mov.b32 base, 0x64646464;
mov.b32 less, 0xE480E480;
xor.b32 code, $2, 0x80808080;
prmt.b32 $0, code, base, 0x4140;
prmt.b32 $1, code, base, 0x4342;
add.rn.f16x2 $0, $0, less;
add.rn.f16x2 $1, $1, less;
}""")

# Codes plus 128 in float32: low to $0-$3 and high to $4-$7, from the bytes $8.
NIBBLES_F32 = tl.constexpr("""{
.reg .b32 low, high, base;
mov.b32 base, 0x43000000;
and.b32 low, $8, 0x0F0F0F0F;
shr.u32 high, $8, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 $0, low, base, 0x7044;
prmt.b32 $1, low, base, 0x7144;
prmt.b32 $2, low, base, 0x7244;
prmt.b32 $3, low, base, 0x7344;
prmt.b32 $4, high, base, 0x7044;
prmt.b32 $5, high, base, 0x7144;
prmt.b32 $6, high, base, 0x7244;
prmt.b32 $7, high, base, 0x7344;
}""")
# Signed bytes plus 128 plus 2**15 in float32, from the bytes $4: codes are the second byte of the mantissa.
BYTES_F32 = tl.constexpr("""{
.reg .b32 code, base;
mov.b32 base, 0x47000000;
xor.b32 code, $4, 0x80808080;
prmt.b32 $0, code, base, 0x7604;
prmt.b32 $1, code, base, 0x7614;
prmt.b32 $2, code, base, 0x7624;
prmt.b32 $3, code, base, 0x7634;
}""")
# bf16 products of pairs; targets before sm_90 have only the fused operation.
PRODUCT_BF16 = tl.constexpr("{.reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero;}")


class WeightCodes(NamedTuple):
    """A quantised weight, of one part or several."""

    code_ptr: tl.tensor  # [PARTS, N, K], or bytes [PARTS, N, K // 2] with HALF
    scale_ptr: tl.tensor  # [BLOCKS, PARTS, N]
    zero_ptr: tl.tensor  # [BLOCKS, PARTS, N]: the zero points; None: ZERO_POINT
    K: tl.constexpr
    PARTS: tl.constexpr
    HALF: tl.constexpr  # columns between the two codes of a byte; 0: a byte is one code, and a row has one scale
    GROUP: tl.constexpr  # columns that share a scale
    ZERO_POINT: tl.constexpr
    ASSEMBLY: tl.constexpr  # convert codes by PTX instructions


@triton.jit
def nibble_factors(packed, low_zero, high_zero, ZERO_POINT: tl.constexpr, FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the low and the high codes less their zero points in the dtype FACTOR, exactly.

    The zero points are tiles of integers that broadcast to `packed`; None for ZERO_POINT.
    """
    if ASSEMBLY:
        BASE: tl.constexpr = 128 if FACTOR == tl.bfloat16 else 1024
        if low_zero is None:
            low_offset = tl.full([1] * len(packed.shape), -BASE - ZERO_POINT, FACTOR)
            high_offset = low_offset
        else:
            low_offset = (-BASE - low_zero.to(tl.int32)).to(tl.float32).to(FACTOR)
            high_offset = (-BASE - high_zero.to(tl.int32)).to(tl.float32).to(FACTOR)
        OPERANDS: tl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r"
        if FACTOR == tl.bfloat16:
            return tl.inline_asm_elementwise(
                NIBBLES_BF16, OPERANDS, [packed, low_offset, high_offset], (tl.bfloat16, tl.bfloat16), True, 4
            )
        else:
            return tl.inline_asm_elementwise(
                NIBBLES_F16, OPERANDS, [packed, low_offset, high_offset], (tl.float16, tl.float16), True, 4
            )
    else:
        low = (packed & 15).to(tl.int8) - (ZERO_POINT if low_zero is None else low_zero.to(tl.int8))
        high = (packed >> 4).to(tl.int8) - (ZERO_POINT if high_zero is None else high_zero.to(tl.int8))
        return low.to(FACTOR), high.to(FACTOR)


@triton.jit
def byte_factors(code, FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return signed codes in the dtype FACTOR."""
    if ASSEMBLY:
        if FACTOR == tl.bfloat16:
            return tl.inline_asm_elementwise(BYTES_BF16, "=&r,=&r,r", [code], tl.bfloat16, True, 4)
        else:
            return tl.inline_asm_elementwise(BYTES_F16, "=&r,=&r,r", [code], tl.float16, True, 4)
    else:
        return code.to(FACTOR)


@triton.jit
def scaled_factors(factor, scale, ASSEMBLY: tl.constexpr):
    """Return factors times the scales of their rows, in the factors' dtype."""
    if ASSEMBLY:
        pair = [factor, scale.to(factor.dtype)]
        if factor.dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(PRODUCT_BF16, "=r,r,r", pair, tl.bfloat16, True, 2)
        else:
            return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", pair, tl.float16, True, 2)
    else:
        return factor * scale.to(factor.dtype)


@triton.jit
def add_pair(
    total, low, high, low_x, high_x, low_scale, high_scale, JOINT: tl.constexpr, SCALED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return `total` plus the scaled products of the low and the high codes of bytes.

    JOINT: they share their scales. SCALED: multiply the factors, not the sums, by the scales.
    """
    if SCALED:
        total = tl.dot(scaled_factors(low, low_scale, ASSEMBLY), low_x, total, input_precision="ieee")
        return tl.dot(scaled_factors(high, high_scale, ASSEMBLY), high_x, total, input_precision="ieee")
    elif JOINT:
        added = tl.dot(low, low_x, input_precision="ieee")
        return total + tl.dot(high, high_x, added, input_precision="ieee") * low_scale.to(tl.float32)
    else:
        total = total + tl.dot(low, low_x, input_precision="ieee") * low_scale.to(tl.float32)
        return total + tl.dot(high, high_x, input_precision="ieee") * high_scale.to(tl.float32)


@triton.jit
def nibble_floats(packed, ASSEMBLY: tl.constexpr):
    """Return the low and the high codes in float32, plus 128 with ASSEMBLY."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            NIBBLES_F32,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [packed],
            (tl.float32, tl.float32),
            True,
            4,
        )
    else:
        return (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)


@triton.jit
def byte_floats(code, ASSEMBLY: tl.constexpr):
    """Return signed codes in float32, plus 32896 with ASSEMBLY."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(BYTES_F32, "=&r,=&r,=&r,=&r,r", [code], tl.float32, True, 4)
    else:
        return code.to(tl.float32)
