"""Mixtures of experts: (token, expert) pairs sorted by expert, the grouped products, and the sum of their results.

Pair p is choice p % CHOICES of token p // CHOICES. `moe_route` sorts the pairs by expert. A program of the products
finds its expert and its block of rows from the starts of the experts' pairs. The grid has enough programs for any
routing; programs without rows return at once, and the weights of experts that no token chose are not read.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous, wait_or_launch
from llmc.codegen.backends.triton.kernels.l2_prefetch import prefetch
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def moe_route(
    experts_ptr,  # [pairs]: the expert of each pair
    order_ptr,  # [pairs]: the pairs in the order of their experts
    starts_ptr,  # [EXPERTS + 1]: the start of each expert's pairs in `order`
    pairs,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,  # pairs that a program reads at once
    EAGER_LAUNCH: tl.constexpr,  # let the next kernel begin before the pairs are sorted
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One expert per program: count the pairs of earlier experts, then store the expert's own pairs behind them."""
    wait_or_launch(DEPENDENT_LAUNCH, EAGER_LAUNCH)
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
        is_own = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + at + tl.cumsum(is_own, axis=0) - 1, k + place, mask=is_own != 0)
        at += tl.sum(is_own, axis=0)


class ExpertProduct(NamedTuple):
    """The parameters that all grouped products of experts share.

    With CHOICES, a row of x is a token, and results are in the order of the experts; otherwise, x is in the order of
    the experts, and results are weighted and in the order of the tokens.
    """

    x_ptr: tl.tensor  # [tokens or pairs, K]
    order_ptr: tl.tensor  # [pairs], as moe_route writes it
    starts_ptr: tl.tensor  # [EXPERTS + 1]
    weights_ptr: tl.tensor  # [pairs]: the routing weight of each pair; None with CHOICES
    bias_ptr: tl.tensor  # [EXPERTS, PARTS, N], or None
    out_ptr: tl.tensor  # [pairs, N]
    CHOICES: tl.constexpr  # experts per token, or 0
    EXPERTS: tl.constexpr
    EXPERTS_PADDED: tl.constexpr
    N: tl.constexpr
    K: tl.constexpr
    PARTS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr
    STAGES: tl.constexpr


@triton.jit
def find_block(product: ExpertProduct):
    """Return (expert, first row of this program's block, end of the expert's rows); EXPERTS if there is no block."""
    candidate = tl.arange(0, product.EXPERTS_PADDED)
    first = tl.load(product.starts_ptr + candidate, mask=candidate < product.EXPERTS, other=0)
    rows = tl.load(product.starts_ptr + candidate + 1, mask=candidate < product.EXPERTS, other=0) - first
    blocks = (rows + (product.BLOCK_M - 1)) // product.BLOCK_M
    ends = tl.cumsum(blocks, axis=0)
    block = tl.program_id(1)
    expert = tl.sum(((ends <= block) & (candidate < product.EXPERTS)).to(tl.int32), axis=0)
    here = candidate == expert
    row = tl.sum(tl.where(here, first + (block - ends + blocks) * product.BLOCK_M, 0), axis=0)
    stop = tl.sum(tl.where(here, first + rows, 0), axis=0)
    return expert, row, stop


@triton.jit
def wait_and_find_block(product: ExpertProduct, EARLY_ROWS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    """Wait for the previous kernels, and return the block of this program as `find_block`.

    EARLY_ROWS: the previous launch does not write `starts`, so the block is found before the wait.
    """
    if EARLY_ROWS:
        block = find_block(product)
        wait_for_previous(DEPENDENT_LAUNCH)
    else:
        wait_for_previous(DEPENDENT_LAUNCH)
        block = find_block(product)
    return block


@triton.jit
def block_rows(product: ExpertProduct, first_row, stop):
    """Return the rows of a block in the order of the experts, their pairs, and their rows of x [BLOCK_M]."""
    row = first_row + tl.arange(0, product.BLOCK_M)
    pair = tl.load(product.order_ptr + row, mask=row < stop, other=0).to(tl.int64)
    if product.CHOICES:
        left_row = pair // product.CHOICES
    else:
        left_row = tl.minimum(row, stop - 1).to(tl.int64)
    return row, pair, left_row


@triton.jit
def block_columns(product: ExpertProduct):
    """Return the columns [BLOCK_N] of this program."""
    return tl.program_id(0) * product.BLOCK_N + tl.arange(0, product.BLOCK_N)


@triton.jit
def expert_weights(weight_ptr, product: ExpertProduct, expert, column):
    """Return pointers [BLOCK_N, BLOCK_K] to the first step of the expert's rows `column` of each part."""
    N: tl.constexpr = product.N
    K: tl.constexpr = product.K
    depth = tl.arange(0, product.BLOCK_K)
    weight_ptr += expert.to(tl.int64) * (product.PARTS * N * K)
    first = weight_ptr + clamp(column, N, N % product.BLOCK_N == 0)[:, None] * K + depth[None, :]
    weights = ()
    for part in tl.static_range(product.PARTS):
        weights = weights + (first + part * N * K,)
    return weights


class Prefetch(NamedTuple):
    """The weights that a grouped product prefetches before it knows which experts have rows."""

    PROGRAMS: tl.constexpr  # that run at a time, so that they may begin before the wait
    LINE: tl.constexpr  # elements of a cache line
    LINES: tl.constexpr  # lines of each row of the weights; 0: none are prefetched


@triton.jit
def prefetch_likely_weights(weight_ptr, product: ExpertProduct, ahead: Prefetch, pairs):
    """Prefetch the first columns of the weights that this program needs if every expert has one block of rows.

    This is a guess: with at least as many pairs as experts, most experts have rows, so that another program needs the
    weights soon if this one does not. Only the first programs guess, as the later ones find no time before the wait.
    """
    K: tl.constexpr = product.K
    N: tl.constexpr = product.N
    expert = tl.program_id(1)
    program = expert * tl.num_programs(0) + tl.program_id(0)
    if (program < ahead.PROGRAMS) & (expert < product.EXPERTS) & (pairs >= product.EXPERTS):
        column = clamp(block_columns(product), N, N % product.BLOCK_N == 0).to(tl.int64)
        weight_ptr += expert.to(tl.int64) * (product.PARTS * N * K)
        for part in tl.static_range(product.PARTS):
            prefetch(weight_ptr + part * N * K, column * K, K, ahead.LINE, ahead.LINES)


@triton.jit
def zero_sums(product: ExpertProduct, SUM: tl.constexpr):
    """Return zeros [BLOCK_N, BLOCK_M] for each part."""
    sums = ()
    for _ in tl.static_range(product.PARTS):
        sums = sums + (tl.zeros([product.BLOCK_N, product.BLOCK_M], SUM),)
    return sums


@triton.jit
def multiply(product: ExpertProduct, left_row, weights, FLOAT32_FACTORS: tl.constexpr):
    """Return the products [BLOCK_N, BLOCK_M] of the rows `left_row` of x with each part."""
    K: tl.constexpr = product.K
    WHOLE_K: tl.constexpr = K % product.BLOCK_K == 0
    depth = tl.arange(0, product.BLOCK_K)
    left = product.x_ptr + left_row[None, :] * K + depth[:, None]
    sums = zero_sums(product, tl.float32)
    for k in tl.range(0, K, product.BLOCK_K, num_stages=product.STAGES):
        x = tl.load(left + k, mask=bound(depth[:, None], K - k, WHOLE_K), other=0.0)
        if FLOAT32_FACTORS:
            x = x.to(tl.float32)
        added = ()
        for part in tl.static_range(product.PARTS):
            w = tl.load(weights[part] + k, mask=bound(depth[None, :], K - k, WHOLE_K), other=0.0)
            if FLOAT32_FACTORS:
                w = w.to(tl.float32)
            added = added + (tl.dot(w, x, sums[part], input_precision="ieee"),)
        sums = added
    return sums


@triton.jit
def add_bias(product: ExpertProduct, sums, expert, column):
    """Add the expert's row of the bias, if there is one, to the sums of each part."""
    if product.bias_ptr is None:
        return sums
    else:
        at = product.bias_ptr + expert.to(tl.int64) * (product.PARTS * product.N) + column
        added = ()
        for part in tl.static_range(product.PARTS):
            bias = tl.load(at + part * product.N, mask=column < product.N, other=0).to(tl.float32)
            added = added + (sums[part] + bias[:, None],)
        return added


@triton.jit
def store_block(product: ExpertProduct, sums, expert, row, pair, stop, column, EPILOGUE: tl.constexpr):
    """Store EPILOGUE of the sums of each part and the bias, times the routing weights, if there are any."""
    out = EPILOGUE(add_bias(product, sums, expert, column))
    place = row.to(tl.int64)
    if product.weights_ptr is not None:
        out = out * tl.load(product.weights_ptr + pair).to(tl.float32)[None, :]
        place = pair
    at = product.out_ptr + place[None, :] * product.N + column[:, None]
    mask = (row < stop)[None, :] & (column < product.N)[:, None]
    tl.store(at, out.to(product.out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def moe_product(
    product: ExpertProduct,
    weight_ptr,  # [EXPERTS, PARTS, N, K]
    pairs,
    ahead: Prefetch,
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    EARLY_ROWS: tl.constexpr,  # the previous launch does not write `starts`
    EPILOGUE: tl.constexpr,  # (sums of each part) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """EPILOGUE of the products of BLOCK_M pairs of one expert, BLOCK_N columns."""
    if ahead.LINES:
        prefetch_likely_weights(weight_ptr, product, ahead, pairs)
    expert, first_row, stop = wait_and_find_block(product, EARLY_ROWS, DEPENDENT_LAUNCH)
    if expert < product.EXPERTS:
        row, pair, left_row = block_rows(product, first_row, stop)
        column = block_columns(product)
        weights = expert_weights(weight_ptr, product, expert, column)
        sums = multiply(product, left_row, weights, FLOAT32_FACTORS)
        store_block(product, sums, expert, row, pair, stop, column, EPILOGUE)


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
