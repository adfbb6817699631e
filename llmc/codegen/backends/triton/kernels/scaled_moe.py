"""The grouped products of experts with quantised activations and weights (see kernels/moe.py), both in codes of 8 bits.

With one scale a row (GROUP = K), the sums of codes are multiplied by the scales of both at the end. Otherwise the codes
of each group of columns are multiplied into sums of their own, which are multiplied by the scales of the group and
added to the total in float32.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.moe import add_bias, expert_weights, find_block
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
    left_ptr,
    left_row,
    weights,
    x_scale_row,
    scale_rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SUM: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,
):
    """Return the products [BLOCK_N, BLOCK_M] of the rows `left_row` with each part, times all scales, in float32.

    x_scale_row, scale_rows: pointers to the first scale of each row, and of each row of a part.
    """
    WHOLE_K: tl.constexpr = K % BLOCK_K == 0
    LATE: tl.constexpr = GROUP == K
    depth = tl.arange(0, BLOCK_K)
    left = left_ptr + left_row[None, :] * K + depth[:, None]
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_M], SUM if LATE else tl.float32),)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
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
    x_ptr,  # codes [tokens, K], or [pairs, K] in the order of the experts (CHOICES = 0)
    x_scale_ptr,  # [tokens or pairs, K // GROUP]
    order_ptr,  # [pairs], as moe_route writes it
    starts_ptr,  # [EXPERTS + 1]
    code_ptr,  # [EXPERTS, PARTS, N, K]
    scale_ptr,  # [EXPERTS, cdiv(PARTS * N, BLOCK_ROWS), K // GROUP]
    weight_ptr,  # [pairs]: the routing weight of each pair, or None
    bias_ptr,  # [EXPERTS, PARTS, N], or None
    out_ptr,  # [pairs, N]: in the order of the experts, or, with weights, of the tokens
    CHOICES: tl.constexpr,  # experts per token
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # rows of the weight that share a scale
    GROUP: tl.constexpr,  # columns that share a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of a step; it divides GROUP, if that is not K
    STAGES: tl.constexpr,
    SUM: tl.constexpr,  # dtype of sums of codes
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    EPILOGUE: tl.constexpr,  # (sums of each part) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """EPILOGUE of the products of BLOCK_M pairs of one expert, BLOCK_N columns."""
    wait_for_previous(DEPENDENT_LAUNCH)
    GROUPS: tl.constexpr = K // GROUP
    SCALES: tl.constexpr = (PARTS * N + BLOCK_ROWS - 1) // BLOCK_ROWS * GROUPS  # of an expert
    expert, first_row, stop = find_block(starts_ptr, EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert < EXPERTS:
        row = first_row + tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + row, mask=row < stop, other=0).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        weights = expert_weights(code_ptr, expert, column, N, K, PARTS, BLOCK_N, BLOCK_K)
        scale_ptr += expert.to(tl.int64) * SCALES
        scale_rows = ()
        for part in tl.static_range(PARTS):
            weight_row = clamp(column, N, N % BLOCK_N == 0) + part * N
            scale_rows = scale_rows + (scale_ptr + weight_row // BLOCK_ROWS * GROUPS,)
        left_row = pair // CHOICES if CHOICES else tl.minimum(row, stop - 1).to(tl.int64)
        sums = multiply_scaled(
            x_ptr, left_row, weights, x_scale_ptr + left_row * GROUPS, scale_rows, K, PARTS, GROUP, BLOCK_M, BLOCK_N,
            BLOCK_K, STAGES, SUM, FLOAT32_FACTORS,
        )  # fmt: skip
        sums = add_bias(sums, bias_ptr, expert, column, N, PARTS)
        out = EPILOGUE(sums)
        place = row.to(tl.int64)
        if weight_ptr is not None:
            out = out * tl.load(weight_ptr + pair).to(tl.float32)[None, :]
            place = pair
        mask = (row < stop)[None, :] & (column < N)[:, None]
        tl.store(out_ptr + place[None, :] * N + column[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)
