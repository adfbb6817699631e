"""Mixtures of experts: (token, expert) pairs sorted by expert, the grouped products, and the sum of their results.

Pair p is choice p % CHOICES of token p // CHOICES. `moe_route` sorts the pairs by expert. A program of the products
finds its expert and its block of rows from the starts of the experts' pairs. The grid has enough programs for any
routing; programs without rows return at once, and the weights of experts that no token chose are not read.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def moe_route(
    experts_ptr,  # [pairs]: the expert of each pair
    order_ptr,  # [pairs]: the pairs in the order of their experts
    starts_ptr,  # [EXPERTS + 1]: the start of each expert's pairs in `order`
    pairs,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,  # pairs that a program reads at once
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One expert per program: count the pairs of earlier experts, then store the expert's own pairs behind them."""
    wait_for_previous(DEPENDENT_LAUNCH)
    expert = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)
    for k in range(0, pairs, CHUNK):
        chosen = tl.load(experts_ptr + k + place, mask=place < pairs - k, other=EXPERTS)
        before += (chosen < expert).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(starts_ptr + expert, at)
    if expert == 0:
        tl.store(starts_ptr + EXPERTS, pairs)
    for k in range(0, pairs, CHUNK):
        chosen = tl.load(experts_ptr + k + place, mask=place < pairs - k, other=EXPERTS)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + at + tl.cumsum(mine, axis=0) - 1, k + place, mask=mine != 0)
        at += tl.sum(mine, axis=0)


@triton.jit
def find_block(starts_ptr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (expert, first row of this program's block, end of the expert's rows); EXPERTS if there is no block."""
    candidate = tl.arange(0, EXPERTS_PADDED)
    first = tl.load(starts_ptr + candidate, mask=candidate < EXPERTS, other=0)
    rows = tl.load(starts_ptr + candidate + 1, mask=candidate < EXPERTS, other=0) - first
    blocks = (rows + (BLOCK_M - 1)) // BLOCK_M
    ends = tl.cumsum(blocks, axis=0)
    block = tl.program_id(1)
    expert = tl.sum(((ends <= block) & (candidate < EXPERTS)).to(tl.int32), axis=0)
    here = candidate == expert
    row = tl.sum(tl.where(here, first + (block - ends + blocks) * BLOCK_M, 0), axis=0)
    stop = tl.sum(tl.where(here, first + rows, 0), axis=0)
    return expert, row, stop


@triton.jit
def expert_weights(
    weight_ptr,
    expert,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return pointers [BLOCK_N, BLOCK_K] to the first step of the expert's rows `column` of each part."""
    depth = tl.arange(0, BLOCK_K)
    weight_ptr += expert.to(tl.int64) * (PARTS * N * K)
    first = weight_ptr + clamp(column, N, N % BLOCK_N == 0)[:, None] * K + depth[None, :]
    weights = ()
    for part in tl.static_range(PARTS):
        weights = weights + (first + part * N * K,)
    return weights


@triton.jit
def multiply(
    left_ptr,
    left_row,
    weights,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,
):
    """Return the products [BLOCK_N, BLOCK_M] of the rows `left_row` of the left operand with each part."""
    WHOLE_K: tl.constexpr = K % BLOCK_K == 0
    depth = tl.arange(0, BLOCK_K)
    left = left_ptr + left_row[None, :] * K + depth[:, None]
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = tl.load(left + k, mask=bound(depth[:, None], K - k, WHOLE_K), other=0.0)
        if FLOAT32_FACTORS:
            x = x.to(tl.float32)
        added = ()
        for part in tl.static_range(PARTS):
            w = tl.load(weights[part] + k, mask=bound(depth[None, :], K - k, WHOLE_K), other=0.0)
            if FLOAT32_FACTORS:
                w = w.to(tl.float32)
            added = added + (tl.dot(w, x, sums[part], input_precision="ieee"),)
        sums = added
    return sums


@triton.jit
def add_bias(sums, bias_ptr, expert, column, N: tl.constexpr, PARTS: tl.constexpr):
    """Add the expert's row of the bias [EXPERTS, PARTS, N] (or None) to the sums of each part."""
    if bias_ptr is None:
        return sums
    else:
        at = bias_ptr + expert.to(tl.int64) * (PARTS * N) + column
        added = ()
        for part in tl.static_range(PARTS):
            bias = tl.load(at + part * N, mask=column < N, other=0).to(tl.float32)
            added = added + (sums[part] + bias[:, None],)
        return added


@triton.jit
def moe_up(
    x_ptr,  # [tokens, K]
    order_ptr,  # [pairs], as moe_route writes it
    starts_ptr,  # [EXPERTS + 1]
    weight_ptr,  # [EXPERTS, 2, N, K]: gate, up
    bias_ptr,  # [EXPERTS, 2, N], or None
    out_ptr,  # [pairs, N], in the order of the experts
    CHOICES: tl.constexpr,  # experts per token
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    GATE: tl.constexpr,  # (gate, up) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """GATE of the first two products of BLOCK_M pairs of one expert, BLOCK_N columns."""
    wait_for_previous(DEPENDENT_LAUNCH)
    expert, first_row, stop = find_block(starts_ptr, EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert < EXPERTS:
        row = first_row + tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + row, mask=row < stop, other=0).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        weights = expert_weights(weight_ptr, expert, column, N, K, 2, BLOCK_N, BLOCK_K)
        token = pair // CHOICES
        sums = multiply(x_ptr, token, weights, K, 2, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32_FACTORS)
        mask = (row < stop)[None, :] & (column < N)[:, None]
        sums = add_bias(sums, bias_ptr, expert, column, N, 2)
        out = GATE(sums[0], sums[1])
        at = out_ptr + row.to(tl.int64)[None, :] * N + column[:, None]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_down(
    x_ptr,  # [pairs, K], in the order of the experts
    order_ptr,  # [pairs], as moe_route writes it
    starts_ptr,  # [EXPERTS + 1]
    weight_ptr,  # [EXPERTS, N, K]
    scale_ptr,  # [pairs]: the routing weight of each pair
    bias_ptr,  # [EXPERTS, N], or None
    out_ptr,  # [pairs, N], in the order of the tokens
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The weighted results of BLOCK_M pairs of one expert, BLOCK_N columns."""
    wait_for_previous(DEPENDENT_LAUNCH)
    expert, first_row, stop = find_block(starts_ptr, EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert < EXPERTS:
        row = first_row + tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + row, mask=row < stop, other=0).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        weights = expert_weights(weight_ptr, expert, column, N, K, 1, BLOCK_N, BLOCK_K)
        near = tl.minimum(row, stop - 1).to(tl.int64)
        sums = multiply(x_ptr, near, weights, K, 1, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, FLOAT32_FACTORS)
        mask = (row < stop)[None, :] & (column < N)[:, None]
        sums = add_bias(sums, bias_ptr, expert, column, N, 1)
        scale = tl.load(scale_ptr + pair).to(tl.float32)
        out = (sums[0] * scale[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pair[None, :] * N + column[:, None], out, mask=mask)


@triton.jit
def moe_combine(
    y_ptr,  # [tokens, CHOICES, N]
    residual_ptr,  # [tokens, N], or None
    out_ptr,  # [tokens, N]
    CHOICES: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The sum of a token's choices in order, and of the residual, for BLOCK_N columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < N
    wait_for_previous(DEPENDENT_LAUNCH)
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(CHOICES):
        total += tl.load(y_ptr + (token * CHOICES + choice) * N + column, mask=mask, other=0).to(tl.float32)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + token * N + column, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + token * N + column, total.to(out_ptr.dtype.element_ty), mask=mask)
