"""Codes of small floats as factors: bytes with two codes of e2m1 (see pack_nibbles), and bytes with one of e4m3.

With ASSEMBLY, four bytes are converted at once. The magnitudes of e2m1 select bytes of the results from tables. Those
of e4m3 are shifted to the exponent and mantissa of the result, whose larger bias a product with a power of two undoes.
"""

import triton
import triton.language as tl

# e2m1 in bf16: low codes to $0, $1 and high codes to $2, $3, from the bytes $4. Tables: h and g of the results' high
# bytes, l and k of their low ones. Four digits of a selector are the codes of two bytes.
E2M1_BF16 = tl.constexpr("""{
.reg .b32 h, g, l, k, select, sign, high, low, next, t;
mov.b32 h, 0x3F3F3F00;
mov.b32 g, 0x40404040;
mov.b32 l, 0xC0800000;
mov.b32 k, 0xC0804000;
and.b32 select, $4, 0x77777777;
and.b32 sign, $4, 0x88888888;
shr.u32 next, select, 16;
prmt.b32 high, h, g, select;
prmt.b32 low, l, k, select;
prmt.b32 $0, low, high, 0x6240;
prmt.b32 $2, low, high, 0x7351;
prmt.b32 high, h, g, next;
prmt.b32 low, l, k, next;
prmt.b32 $1, low, high, 0x6240;
prmt.b32 $3, low, high, 0x7351;
prmt.b32 t, sign, sign, 0x1100;
and.b32 next, t, 0x80008000;
xor.b32 $2, $2, next;
shl.b32 t, t, 4;
and.b32 t, t, 0x80008000;
xor.b32 $0, $0, t;
prmt.b32 t, sign, sign, 0x3322;
and.b32 next, t, 0x80008000;
xor.b32 $3, $3, next;
shl.b32 t, t, 4;
and.b32 t, t, 0x80008000;
xor.b32 $1, $1, t;
}""")
# The same in f16, whose low bytes are 0.
E2M1_F16 = tl.constexpr("""{
.reg .b32 h, g, select, sign, high, next, t, zero;
mov.b32 h, 0x3E3C3800;
mov.b32 g, 0x46444240;
mov.b32 zero, 0;
and.b32 select, $4, 0x77777777;
and.b32 sign, $4, 0x88888888;
shr.u32 next, select, 16;
prmt.b32 high, h, g, select;
prmt.b32 $0, zero, high, 0x6040;
prmt.b32 $2, zero, high, 0x7050;
prmt.b32 high, h, g, next;
prmt.b32 $1, zero, high, 0x6040;
prmt.b32 $3, zero, high, 0x7050;
prmt.b32 t, sign, sign, 0x1100;
and.b32 next, t, 0x80008000;
xor.b32 $2, $2, next;
shl.b32 t, t, 4;
and.b32 t, t, 0x80008000;
xor.b32 $0, $0, t;
prmt.b32 t, sign, sign, 0x3322;
and.b32 next, t, 0x80008000;
xor.b32 $3, $3, next;
shl.b32 t, t, 4;
and.b32 t, t, 0x80008000;
xor.b32 $1, $1, t;
}""")
# e4m3 in bf16: to $0, $1 from the bytes $2; 0x7B80 is 2 ** 120.
E4M3_BF16 = tl.constexpr("""{
.reg .b32 a, b, s, factor, none, zero;
mov.b32 zero, 0;
mov.b32 factor, 0x7B807B80;
mov.b32 none, 0x80008000;
prmt.b32 a, $2, zero, 0x1404;
prmt.b32 b, $2, zero, 0x3424;
and.b32 s, a, 0x80008000;
and.b32 a, a, 0x7F007F00;
shr.u32 a, a, 4;
xor.b32 a, a, s;
and.b32 s, b, 0x80008000;
and.b32 b, b, 0x7F007F00;
shr.u32 b, b, 4;
xor.b32 b, b, s;
fma.rn.bf16x2 $0, a, factor, none;
fma.rn.bf16x2 $1, b, factor, none;
}""")
# e4m3 in f16; 0x5C00 is 2 ** 8.
E4M3_F16 = tl.constexpr("""{
.reg .b32 a, b, s, factor, none, zero;
mov.b32 zero, 0;
mov.b32 factor, 0x5C005C00;
mov.b32 none, 0x80008000;
prmt.b32 a, $2, zero, 0x1404;
prmt.b32 b, $2, zero, 0x3424;
and.b32 s, a, 0x80008000;
and.b32 a, a, 0x7F007F00;
shr.u32 a, a, 1;
xor.b32 a, a, s;
and.b32 s, b, 0x80008000;
and.b32 b, b, 0x7F007F00;
shr.u32 b, b, 1;
xor.b32 b, b, s;
fma.rn.f16x2 $0, a, factor, none;
fma.rn.f16x2 $1, b, factor, none;
}""")


@triton.jit
def e2m1_value(code, FACTOR: tl.constexpr):
    """Return codes below 16 in the dtype FACTOR: the integers 0, 1, 2, 3, 4, 6, 8, 12, halved, with their signs."""
    size = (code & 7).to(tl.int32)
    twice = tl.where(size < 2, size, (2 + (size & 1)) << (tl.maximum(size >> 1, 1) - 1))
    return (tl.where(code > 7, -twice, twice).to(tl.float32) * 0.5).to(FACTOR)


@triton.jit
def e2m1_factors(packed, FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the low and the high codes of e2m1 in the dtype FACTOR."""
    if ASSEMBLY:
        if FACTOR == tl.bfloat16:
            return tl.inline_asm_elementwise(
                E2M1_BF16, "=&r,=&r,=&r,=&r,r", [packed], (tl.bfloat16, tl.bfloat16), True, 4
            )
        else:
            return tl.inline_asm_elementwise(E2M1_F16, "=&r,=&r,=&r,=&r,r", [packed], (tl.float16, tl.float16), True, 4)
    else:
        return e2m1_value(packed & 15, FACTOR), e2m1_value(packed >> 4, FACTOR)


@triton.jit
def e4m3_factors(code, FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return codes of e4m3 other than NaN in the dtype FACTOR."""
    if ASSEMBLY:
        bits = code.to(tl.uint8, bitcast=True)
        if FACTOR == tl.bfloat16:
            return tl.inline_asm_elementwise(E4M3_BF16, "=&r,=&r,r", [bits], tl.bfloat16, True, 4)
        else:
            return tl.inline_asm_elementwise(E4M3_F16, "=&r,=&r,r", [bits], tl.float16, True, 4)
    else:
        return code.to(FACTOR)
