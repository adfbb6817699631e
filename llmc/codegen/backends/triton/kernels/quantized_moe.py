"""The grouped products of a mixture's experts over quantised weights, dequantised in registers (see kernels/moe.py).

Codes become factors of the left operand's dtype, which holds them exactly. With one scale a row, the sums are
multiplied by it at the end; otherwise the sums of the columns that share a scale are, in float32. With SCALED, the
factors are multiplied by it instead, in their dtype, which costs less for many rows.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.float_codes import e2m1_factors, e4m3_factors
from llmc.codegen.backends.triton.kernels.moe import add_bias, find_block
from llmc.codegen.backends.triton.kernels.quantized_codes import byte_factors, nibble_factors, scaled_factors
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def expert_codes(
    code_ptr,
    expert,
    column,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
):
    """Return pointers [BLOCK_N, BLOCK_K] to the first step of the expert's codes, and the places of the rows' scales.

    Both have an element for each part.
    """
    row = clamp(column, N, N % BLOCK_N == 0)
    first = code_ptr + expert.to(tl.int64) * (PARTS * N * LENGTH) + tl.arange(0, BLOCK_K)[None, :]
    codes, places = (), ()
    for part in tl.static_range(PARTS):
        codes = codes + (first + (row + part * N)[:, None] * LENGTH,)
        places = places + ((row + part * N) // BLOCK_ROWS * ROW_STRIDE,)
    return codes, places


@triton.jit
def pair_factors(
    packed, low_zero, high_zero, ZERO_POINT: tl.constexpr, E2M1: tl.constexpr, FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return the low and the high codes of bytes in the dtype FACTOR, less their zero points."""
    if E2M1:
        return e2m1_factors(packed, FACTOR, ASSEMBLY)
    else:
        return nibble_factors(packed, low_zero, high_zero, ZERO_POINT, FACTOR, ASSEMBLY)


@triton.jit
def add_pairs(
    total,
    packed,
    low_x,
    high_x,
    scale_ptr,
    zero_ptr,
    place,
    column,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    E2M1: tl.constexpr,
    SCALED: tl.constexpr,
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Return `total` plus the scaled products of the 2 * HALF columns from `column` on, two codes a byte."""
    JOINT: tl.constexpr = GROUP % (2 * HALF) == 0  # both codes of a byte share a scale
    low_at = place + column // GROUP * GROUP_STRIDE
    high_at = place + (column + HALF) // GROUP * GROUP_STRIDE
    low_scale = tl.load(scale_ptr + low_at)[:, None]
    high_scale = low_scale if JOINT else tl.load(scale_ptr + high_at)[:, None]
    low_zero, high_zero = None, None
    if zero_ptr is not None:
        low_zero = tl.load(zero_ptr + low_at)[:, None]
        high_zero = low_zero if JOINT else tl.load(zero_ptr + high_at)[:, None]
    low, high = pair_factors(packed, low_zero, high_zero, ZERO_POINT, E2M1, FACTOR, ASSEMBLY)
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
def add_singles(
    total,
    code,
    x,
    scale_ptr,
    place,
    column,
    LATE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    E4M3: tl.constexpr,
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Return `total` plus the products of a step's columns, one code a byte; they share a scale unless LATE is set."""
    factor = e4m3_factors(code, FACTOR, ASSEMBLY) if E4M3 else byte_factors(code, FACTOR, ASSEMBLY)
    if LATE:
        return tl.dot(factor, x, total, input_precision="ieee")
    else:
        scale = tl.load(scale_ptr + place + column // GROUP * GROUP_STRIDE)[:, None]
        return total + tl.dot(factor, x, input_precision="ieee") * scale.to(tl.float32)


@triton.jit
def multiply_codes(
    left_ptr,
    left_row,
    codes,
    scale_ptr,
    zero_ptr,
    places,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_STRIDE: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    E2M1: tl.constexpr,
    E4M3: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Return the products [BLOCK_N, BLOCK_M] of the rows `left_row` of the left operand with each part."""
    LENGTH: tl.constexpr = K // 2 if HALF else K  # bytes of a row
    LATE: tl.constexpr = HALF == 0 and GROUP == K
    WHOLE_K: tl.constexpr = LENGTH % BLOCK_K == 0
    depth = tl.arange(0, BLOCK_K)
    left = left_ptr + left_row[None, :] * K + depth[:, None]
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
    for at in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        added = ()
        if HALF:
            low_x = tl.load(left + 2 * at).to(FACTOR)
            high_x = tl.load(left + 2 * at + HALF).to(FACTOR)
            for part in tl.static_range(PARTS):
                packed = tl.load(codes[part] + at)
                total = add_pairs(
                    sums[part], packed, low_x, high_x, scale_ptr, zero_ptr, places[part], 2 * at, HALF, GROUP,
                    GROUP_STRIDE, ZERO_POINT, E2M1, SCALED, FACTOR, ASSEMBLY,
                )  # fmt: skip
                added = added + (total,)
        else:
            x = tl.load(left + at, mask=bound(depth[:, None], K - at, WHOLE_K), other=0.0).to(FACTOR)
            for part in tl.static_range(PARTS):
                code = tl.load(codes[part] + at, mask=bound(depth[None, :], K - at, WHOLE_K), other=0.0)
                total = add_singles(
                    sums[part], code, x, scale_ptr, places[part], at, LATE, GROUP, GROUP_STRIDE, E4M3, FACTOR, ASSEMBLY
                )  # fmt: skip
                added = added + (total,)
        sums = added
    if LATE:
        scaled = ()
        for part in tl.static_range(PARTS):
            scaled = scaled + (sums[part] * tl.load(scale_ptr + places[part]).to(tl.float32)[:, None],)
        sums = scaled
    return sums


@triton.jit
def quantized_moe(
    x_ptr,  # [tokens, K], or [pairs, K] in the order of the experts (CHOICES = 0)
    order_ptr,  # [pairs], as moe_route writes it
    starts_ptr,  # [EXPERTS + 1]
    code_ptr,  # [EXPERTS, PARTS, N, K], or bytes [EXPERTS, PARTS, N, K // 2] with HALF
    scale_ptr,  # the scales, ENTRIES of an expert
    zero_ptr,  # the zero points; None: ZERO_POINT
    weight_ptr,  # [pairs]: the routing weight of each pair, or None
    bias_ptr,  # [EXPERTS, PARTS, N], or None
    out_ptr,  # [pairs, N]: in the order of the experts, or, with weights, of the tokens
    CHOICES: tl.constexpr,  # experts per token
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,  # columns between the two codes of a byte; 0: a byte is one code
    BLOCK_ROWS: tl.constexpr,  # rows that share a scale
    GROUP: tl.constexpr,  # columns that share a scale
    ENTRIES: tl.constexpr,
    ROW_STRIDE: tl.constexpr,  # from the scale of one block of rows to the next
    GROUP_STRIDE: tl.constexpr,  # from the scale of one group of columns to the next
    ZERO_POINT: tl.constexpr,
    E2M1: tl.constexpr,  # codes of 4 bits are floats
    E4M3: tl.constexpr,  # codes of 8 bits are floats
    SCALED: tl.constexpr,  # multiply the factors, not the sums, by the scales
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # bytes of a row in a step; HALF, if that is not 0
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,  # dtype of the factors
    ASSEMBLY: tl.constexpr,  # convert codes by PTX instructions
    EPILOGUE: tl.constexpr,  # (sums of each part) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """EPILOGUE of the products of BLOCK_M pairs of one expert, BLOCK_N columns."""
    wait_for_previous(DEPENDENT_LAUNCH)
    expert, first_row, stop = find_block(starts_ptr, EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert < EXPERTS:
        row = first_row + tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + row, mask=row < stop, other=0).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        LENGTH: tl.constexpr = K // 2 if HALF else K
        tiles = expert_codes(code_ptr, expert, column, N, LENGTH, PARTS, BLOCK_N, BLOCK_K, BLOCK_ROWS, ROW_STRIDE)
        codes, places = tiles
        entries = expert.to(tl.int64) * ENTRIES
        left_row = pair // CHOICES if CHOICES else tl.minimum(row, stop - 1).to(tl.int64)
        sums = multiply_codes(
            x_ptr, left_row, codes, scale_ptr + entries, None if zero_ptr is None else zero_ptr + entries, places, K,
            PARTS, HALF, GROUP, GROUP_STRIDE, ZERO_POINT, E2M1, E4M3, SCALED, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FACTOR,
            ASSEMBLY,
        )  # fmt: skip
        sums = add_bias(sums, bias_ptr, expert, column, N, PARTS)
        out = EPILOGUE(sums)
        place = row.to(tl.int64)
        if weight_ptr is not None:
            out = out * tl.load(weight_ptr + pair).to(tl.float32)[None, :]
            place = pair
        mask = (row < stop)[None, :] & (column < N)[:, None]
        tl.store(out_ptr + place[None, :] * N + column[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)
