"""The grouped products of a mixture's experts over quantised weights, dequantised in registers (see kernels/moe.py).

Codes become factors of the left operand's dtype, which holds them exactly. With one scale a row, the sums are
multiplied by it at the end; otherwise the sums of the columns that share a scale are, in float32. With SCALED, the
factors are multiplied by it instead, in their dtype, which costs less for many rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.float_codes import e2m1_factors, e4m3_factors
from llmc.codegen.backends.triton.kernels.moe import (
    ExpertProduct,
    block_columns,
    block_rows,
    store_block,
    wait_and_find_block,
    zero_sums,
)
from llmc.codegen.backends.triton.kernels.quantized_codes import add_pair, byte_factors, nibble_factors
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


class ExpertCodes(NamedTuple):
    """The codes of the experts' weights and their scales."""

    code_ptr: tl.tensor  # [EXPERTS, PARTS, N, K], or bytes [EXPERTS, PARTS, N, K // 2] with HALF
    scale_ptr: tl.tensor  # ENTRIES of an expert
    zero_ptr: tl.tensor  # the zero points, like the scales; None: ZERO_POINT
    HALF: tl.constexpr  # columns between the two codes of a byte, equal to BLOCK_K; 0: a byte is one code
    BLOCK_ROWS: tl.constexpr  # rows that share a scale
    GROUP: tl.constexpr  # columns that share a scale
    ENTRIES: tl.constexpr
    ROW_STRIDE: tl.constexpr  # elements between the scales of adjacent blocks of rows
    GROUP_STRIDE: tl.constexpr  # elements between the scales of adjacent groups of columns
    ZERO_POINT: tl.constexpr
    E2M1: tl.constexpr  # codes of 4 bits are floats
    E4M3: tl.constexpr  # codes of 8 bits are floats
    SCALED: tl.constexpr  # multiply the factors, not the sums, by the scales
    FACTOR: tl.constexpr  # dtype of the factors
    ASSEMBLY: tl.constexpr  # convert codes by PTX instructions


@triton.jit
def expert_codes(codes: ExpertCodes, product: ExpertProduct, expert, column):
    """Return pointers [BLOCK_N, BLOCK_K] to the first step of the expert's codes, and the places of the rows' scales.

    Both have an element for each part.
    """
    N: tl.constexpr = product.N
    LENGTH: tl.constexpr = product.K // 2 if codes.HALF else product.K
    row = clamp(column, N, N % product.BLOCK_N == 0)
    first = codes.code_ptr + expert.to(tl.int64) * (product.PARTS * N * LENGTH)
    first += tl.arange(0, product.BLOCK_K)[None, :]
    pointers, places = (), ()
    for part in tl.static_range(product.PARTS):
        pointers = pointers + (first + (row + part * N)[:, None] * LENGTH,)
        places = places + ((row + part * N) // codes.BLOCK_ROWS * codes.ROW_STRIDE,)
    return pointers, places


@triton.jit
def pair_factors(codes: ExpertCodes, packed, low_zero, high_zero):
    """Return the low and the high codes of bytes in the dtype FACTOR, less their zero points."""
    if codes.E2M1:
        return e2m1_factors(packed, codes.FACTOR, codes.ASSEMBLY)
    else:
        return nibble_factors(packed, low_zero, high_zero, codes.ZERO_POINT, codes.FACTOR, codes.ASSEMBLY)


@triton.jit
def add_pairs(codes: ExpertCodes, total, packed, low_x, high_x, entries, place, column):
    """Return `total` plus the scaled products of the 2 * HALF columns from `column` on, two codes a byte.

    entries: the expert's first scale. place: that of each row after it.
    """
    JOINT: tl.constexpr = codes.GROUP % (2 * codes.HALF) == 0  # both codes of a byte share a scale
    low_at = place + column // codes.GROUP * codes.GROUP_STRIDE
    high_at = place + (column + codes.HALF) // codes.GROUP * codes.GROUP_STRIDE
    scale_ptr = codes.scale_ptr + entries
    low_scale = tl.load(scale_ptr + low_at)[:, None]
    high_scale = low_scale if JOINT else tl.load(scale_ptr + high_at)[:, None]
    low_zero, high_zero = None, None
    if codes.zero_ptr is not None:
        zero_ptr = codes.zero_ptr + entries
        low_zero = tl.load(zero_ptr + low_at)[:, None]
        high_zero = low_zero if JOINT else tl.load(zero_ptr + high_at)[:, None]
    low, high = pair_factors(codes, packed, low_zero, high_zero)
    return add_pair(
        total, low, high, low_x, high_x, low_scale, high_scale, JOINT, codes.SCALED, codes.ASSEMBLY
    )  # fmt: skip


@triton.jit
def add_singles(codes: ExpertCodes, total, code, x, entries, place, column, LATE: tl.constexpr):
    """Return `total` plus the products of a step's columns, one code a byte; they share a scale unless LATE is set."""
    if codes.E4M3:
        factor = e4m3_factors(code, codes.FACTOR, codes.ASSEMBLY)
    else:
        factor = byte_factors(code, codes.FACTOR, codes.ASSEMBLY)
    if LATE:
        return tl.dot(factor, x, total, input_precision="ieee")
    else:
        scale = tl.load(codes.scale_ptr + entries + place + column // codes.GROUP * codes.GROUP_STRIDE)[:, None]
        return total + tl.dot(factor, x, input_precision="ieee") * scale.to(tl.float32)


@triton.jit
def multiply_codes(codes: ExpertCodes, product: ExpertProduct, left_row, pointers, places, entries):
    """Return the products [BLOCK_N, BLOCK_M] of the rows `left_row` of x with each part.

    pointers, places: see `expert_codes`. entries: the expert's first scale.
    """
    K: tl.constexpr = product.K
    PARTS: tl.constexpr = product.PARTS
    LENGTH: tl.constexpr = K // 2 if codes.HALF else K  # bytes of a row
    LATE: tl.constexpr = codes.HALF == 0 and codes.GROUP == K
    WHOLE_K: tl.constexpr = LENGTH % product.BLOCK_K == 0
    depth = tl.arange(0, product.BLOCK_K)
    left = product.x_ptr + left_row[None, :] * K + depth[:, None]
    sums = zero_sums(product, tl.float32)
    for at in tl.range(0, LENGTH, product.BLOCK_K, num_stages=product.STAGES):
        added = ()
        if codes.HALF:
            low_x = tl.load(left + 2 * at).to(codes.FACTOR)
            high_x = tl.load(left + 2 * at + codes.HALF).to(codes.FACTOR)
            for part in tl.static_range(PARTS):
                packed = tl.load(pointers[part] + at)
                total = add_pairs(codes, sums[part], packed, low_x, high_x, entries, places[part], 2 * at)
                added = added + (total,)
        else:
            x = tl.load(left + at, mask=bound(depth[:, None], K - at, WHOLE_K), other=0.0).to(codes.FACTOR)
            for part in tl.static_range(PARTS):
                code = tl.load(pointers[part] + at, mask=bound(depth[None, :], K - at, WHOLE_K), other=0.0)
                added = added + (add_singles(codes, sums[part], code, x, entries, places[part], at, LATE),)
        sums = added
    if LATE:
        scaled = ()
        for part in tl.static_range(PARTS):
            scale = tl.load(codes.scale_ptr + entries + places[part]).to(tl.float32)
            scaled = scaled + (sums[part] * scale[:, None],)
        sums = scaled
    return sums


@triton.jit
def quantized_moe(
    product: ExpertProduct,
    codes: ExpertCodes,
    EARLY_ROWS: tl.constexpr,  # the previous launch does not write `starts`
    EPILOGUE: tl.constexpr,  # (sums of each part) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """EPILOGUE of the products of BLOCK_M pairs of one expert, BLOCK_N columns. A step has BLOCK_K bytes of a row."""
    expert, first_row, stop = wait_and_find_block(product, EARLY_ROWS, DEPENDENT_LAUNCH)
    if expert < product.EXPERTS:
        row, pair, left_row = block_rows(product, first_row, stop)
        column = block_columns(product)
        pointers, places = expert_codes(codes, product, expert, column)
        entries = expert.to(tl.int64) * codes.ENTRIES
        sums = multiply_codes(codes, product, left_row, pointers, places, entries)
        store_block(product, sums, expert, row, pair, stop, column, EPILOGUE)
