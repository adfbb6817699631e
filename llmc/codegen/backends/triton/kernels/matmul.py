"""Batched products: out[b] = left[b] @ right[b], for any sizes."""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous


@triton.jit
def matmul(
    left_ptr,  # [batches, M, K]; with HEADS [M, HEADS, K]
    right_ptr,  # [batches, K, N]
    out_ptr,  # [batches, M, N]; with HEADS [M, HEADS, N]
    M,
    K,
    N,
    ROW_TILES,  # cdiv(M, BLOCK_M)
    COLUMN_TILES,  # cdiv(N, BLOCK_N)
    HEADS: tl.constexpr,  # the number of batches if they are the heads of tokens, else 0
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr,  # N is a multiple of BLOCK_N
    WHOLE_DEPTH: tl.constexpr,  # K is a multiple of BLOCK_K
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One tile [BLOCK_M, BLOCK_N] of one batch; the programs of a batch cover its tiles row by row."""
    wait_for_previous(DEPENDENT_LAUNCH)
    program = tl.program_id(0)
    batch = (program // (ROW_TILES * COLUMN_TILES)).to(tl.int64)
    row_tile = program // COLUMN_TILES % ROW_TILES
    column_tile = program % COLUMN_TILES
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows and columns past the end read the last one again, so that only the store and the depth need masks.
    inside = column if WHOLE_COLUMNS else tl.minimum(column, N - 1)
    STEP: tl.constexpr = HEADS if HEADS else 1  # rows of left and out from one of a batch to the next
    first = batch if HEADS else batch * M
    left = left_ptr + first * K + tl.minimum(row, M - 1).to(tl.int64)[:, None] * STEP * K + depth[None, :]
    right = right_ptr + batch * K * N + depth.to(tl.int64)[:, None] * N + inside[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if WHOLE_DEPTH:
            x = tl.load(left + k)
            y = tl.load(right + tl.cast(k, tl.int64) * N)
        else:
            x = tl.load(left + k, mask=depth[None, :] < K - k, other=0.0)
            y = tl.load(right + tl.cast(k, tl.int64) * N, mask=depth[:, None] < K - k, other=0.0)
        if FLOAT32_FACTORS:
            x, y = x.to(tl.float32), y.to(tl.float32)
        sums = tl.dot(x, y, sums, input_precision="ieee")
    out = out_ptr + first * N + row.to(tl.int64)[:, None] * STEP * N + column[None, :]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=(row[:, None] < M) & (WHOLE_COLUMNS | (column[None, :] < N)))
