"""The grouped products of experts with quantised activations and weights (see kernels/moe.py), both in codes of 8 bits.

With one scale a row (GROUP = K), the sums of codes are multiplied by the scales of both at the end. Otherwise the codes
of each group of columns are multiplied into sums of their own, which are multiplied by the scales of the group and
added to the total in float32.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.moe import (
    ExpertProduct,
    block_columns,
    block_rows,
    expert_weights,
    store_block,
    wait_and_find_block,
    zero_sums,
)
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def add_group(
    sums, x, weights, k, x_scale_row, scale_rows, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,
):  # fmt: skip
    """Return the sums of each part plus the scaled products of the columns from k on, which share a scale."""
    x_scale = tl.load(x_scale_row + k // GROUP)[None, :]
    added = ()
    for part in tl.static_range(PARTS):
        w = tl.load(weights[part] + k)
        if FLOAT32_FACTORS:
            w = w.to(tl.float32)
        scale = tl.load(scale_rows[part] + k // GROUP)[:, None]
        added = added + (sums[part] + tl.dot(w, x, input_precision="ieee").to(tl.float32) * (x_scale * scale),)
    return added


@triton.jit
def add_codes(
    sums, x, weights, mask, k, PARTS: tl.constexpr, SUM: tl.constexpr, FLOAT32_FACTORS: tl.constexpr
):  # fmt: skip
    """Return the sums of each part plus the products of the columns from k on, without scales."""
    added = ()
    for part in tl.static_range(PARTS):
        w = tl.load(weights[part] + k, mask=mask, other=0.0)
        if FLOAT32_FACTORS:
            w = w.to(tl.float32)
        added = added + (tl.dot(w, x, sums[part], input_precision="ieee", out_dtype=SUM),)
    return added


@triton.jit
def multiply_scaled(
    product: ExpertProduct,
    left_row,
    weights,
    x_scale_row,
    scale_rows,
    GROUP: tl.constexpr,
    SUM: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,
):
    """Return the products [BLOCK_N, BLOCK_M] of the rows `left_row` with each part, times all scales, in float32.

    x_scale_row, scale_rows: pointers to the first scale of each row, and of each row of a part.
    """
    K: tl.constexpr = product.K
    PARTS: tl.constexpr = product.PARTS
    WHOLE_K: tl.constexpr = K % product.BLOCK_K == 0
    LATE: tl.constexpr = GROUP == K
    depth = tl.arange(0, product.BLOCK_K)
    left = product.x_ptr + left_row[None, :] * K + depth[:, None]
    sums = zero_sums(product, SUM if LATE else tl.float32)
    for k in tl.range(0, K, product.BLOCK_K, num_stages=product.STAGES):
        x = tl.load(left + k, mask=bound(depth[:, None], K - k, WHOLE_K), other=0.0)
        if FLOAT32_FACTORS:
            x = x.to(tl.float32)
        if LATE:
            mask = bound(depth[None, :], K - k, WHOLE_K)
            sums = add_codes(sums, x, weights, mask, k, PARTS, SUM, FLOAT32_FACTORS)
        else:
            sums = add_group(sums, x, weights, k, x_scale_row, scale_rows, GROUP, PARTS, FLOAT32_FACTORS)
    if LATE:
        x_scale = tl.load(x_scale_row)[None, :]
        scaled = ()
        for part in tl.static_range(PARTS):
            scaled = scaled + (sums[part].to(tl.float32) * (x_scale * tl.load(scale_rows[part])[:, None]),)
        sums = scaled
    return sums


@triton.jit
def scaled_moe(
    product: ExpertProduct,  # x are codes
    x_scale_ptr,  # [tokens or pairs, K // GROUP]
    code_ptr,  # [EXPERTS, PARTS, N, K]
    scale_ptr,  # [EXPERTS, cdiv(PARTS * N, BLOCK_ROWS), K // GROUP]
    BLOCK_ROWS: tl.constexpr,  # rows of the weight that share a scale
    GROUP: tl.constexpr,  # columns that share a scale, a multiple of BLOCK_K if that is not K
    SUM: tl.constexpr,  # dtype of sums of codes
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    EARLY_ROWS: tl.constexpr,  # the previous launch does not write `starts`
    EPILOGUE: tl.constexpr,  # (sums of each part) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """EPILOGUE of the products of BLOCK_M pairs of one expert, BLOCK_N columns."""
    N: tl.constexpr = product.N
    GROUPS: tl.constexpr = product.K // GROUP
    SCALES: tl.constexpr = (product.PARTS * N + BLOCK_ROWS - 1) // BLOCK_ROWS * GROUPS  # scales per expert
    expert, first_row, stop = wait_and_find_block(product, EARLY_ROWS, DEPENDENT_LAUNCH)
    if expert < product.EXPERTS:
        row, pair, left_row = block_rows(product, first_row, stop)
        column = block_columns(product)
        weights = expert_weights(code_ptr, product, expert, column)
        scale_ptr += expert.to(tl.int64) * SCALES
        scale_rows = ()
        for part in tl.static_range(product.PARTS):
            weight_row = clamp(column, N, N % product.BLOCK_N == 0) + part * N
            scale_rows = scale_rows + (scale_ptr + weight_row // BLOCK_ROWS * GROUPS,)
        x_scale_row = x_scale_ptr + left_row * GROUPS
        sums = multiply_scaled(product, left_row, weights, x_scale_row, scale_rows, GROUP, SUM, FLOAT32_FACTORS)
        store_block(product, sums, expert, row, pair, stop, column, EPILOGUE)
