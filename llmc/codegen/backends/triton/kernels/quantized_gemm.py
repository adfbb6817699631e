"""Linear layers with quantised weights on tensor cores: out = epilogue(x @ w[0].T, .., x @ w[PARTS - 1].T, extras).

w = (code - zero) * scale. Codes less their zero points are integers that x's dtype holds exactly; they are the factors
of the products. The sums of the columns that share a scale are multiplied by it in float32.

Each program computes BLOCK_N rows of every part for BLOCK_M tokens, as a tile [BLOCK_N, BLOCK_M]: the transpose of what
it stores, because the codes are converted in registers, from which tensor cores can read their left factor.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import launch_after_loads, wait_before_loads
from llmc.codegen.backends.triton.kernels.gemm import grouped_tile
from llmc.codegen.backends.triton.kernels.quantized_codes import high_codes, low_codes
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def block_scale(scale_ptr, row, block):
    """Return the scales of the rows' blocks in float32, as [rows, 1]."""
    return tl.load(scale_ptr + row + block).to(tl.float32)[:, None]


@triton.jit
def block_zero(zero_ptr, row, block):
    """Return the zero points of the rows' blocks as i8, as [rows, 1]."""
    return tl.load(zero_ptr + row + block).to(tl.int8)[:, None]


@triton.jit
def add_codes(
    sums,
    x_tile,
    code_tiles,
    at,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Return the sums after the columns from `at` on, of bytes with one code each; the scales are applied later."""
    depth = tl.arange(0, BLOCK_K)
    x = tl.load(x_tile + at, mask=bound(depth[:, None], K - at, K % BLOCK_K == 0), other=0.0).to(FACTOR)
    added = ()
    for part in tl.static_range(PARTS):
        code = tl.load(code_tiles[part] + at, mask=bound(depth[None, :], K - at, K % BLOCK_K == 0), other=0)
        added = added + (tl.dot(code.to(FACTOR), x, sums[part], input_precision="ieee"),)
    return added


@triton.jit
def add_nibbles(
    sums,
    x_tile,
    code_tiles,
    scale_ptr,
    zero_ptr,
    rows,
    at,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Return the sums after the 2 * HALF columns of the bytes from `at` on, multiplied by their scales."""
    x_low = tl.load(x_tile + 2 * at).to(FACTOR)
    x_high = tl.load(x_tile + (2 * at + HALF)).to(FACTOR)
    added = ()
    for part in tl.static_range(PARTS):
        packed = tl.load(code_tiles[part] + at)
        block = 2 * at // GROUP
        low_scale = block_scale(scale_ptr, rows[part], block)
        low_zero = None if zero_ptr is None else block_zero(zero_ptr, rows[part], block)
        low = low_codes(packed, low_zero, ZERO_POINT).to(FACTOR)
        total = tl.dot(low, x_low, input_precision="ieee")
        if GROUP % (2 * HALF) == 0:  # both halves are in one block
            high = high_codes(packed, low_zero, ZERO_POINT).to(FACTOR)
            total = tl.dot(high, x_high, total, input_precision="ieee") * low_scale
        else:
            block = (2 * at + HALF) // GROUP
            high_scale = block_scale(scale_ptr, rows[part], block)
            high_zero = None if zero_ptr is None else block_zero(zero_ptr, rows[part], block)
            high = high_codes(packed, high_zero, ZERO_POINT).to(FACTOR)
            total = total * low_scale + tl.dot(high, x_high, input_precision="ieee") * high_scale
        added = added + (sums[part] + total,)
    return added


@triton.jit
def scale_sums(sums, scale_ptr, rows, PARTS: tl.constexpr):
    """Multiply the sums by the scale of each row."""
    scaled = ()
    for part in tl.static_range(PARTS):
        scaled = scaled + (sums[part] * tl.load(scale_ptr + rows[part]).to(tl.float32)[:, None],)
    return scaled


@triton.jit
def quantized_gemm(
    x_ptr,  # [M, K]
    code_ptr,  # [PARTS, N, K], or bytes [PARTS, N, K // 2] with HALF
    scale_ptr,  # [PARTS, N, BLOCKS]
    zero_ptr,  # [PARTS, N, BLOCKS]: the zero points; None: ZERO_POINT
    out_ptr,  # [M, N]
    extra_ptrs,  # the other operands of the epilogue, as LOAD_EXTRAS takes them
    M,
    ROW_TILES,  # cdiv(M, BLOCK_M)
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,  # columns between the two codes of a byte; 0: a byte is one code, and a row has one scale
    GROUP: tl.constexpr,  # columns that share a scale
    BLOCKS: tl.constexpr,  # scales of a row
    ZERO_POINT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # bytes of a row in a step; HALF, if that is not 0
    STAGES: tl.constexpr,
    TILE_GROUP: tl.constexpr,  # rows of tiles that are computed together
    WHOLE_M: tl.constexpr,  # BLOCK_M divides M
    FACTOR: tl.constexpr,  # dtype of the factors
    LOAD_EXTRAS: tl.constexpr,  # (extra_ptrs, tokens, columns, token mask, column mask) -> tuple
    EPILOGUE: tl.constexpr,  # (sums of each part, extras) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
    LATE_LAUNCH: tl.constexpr,
):
    WHOLE_N: tl.constexpr = N % BLOCK_N == 0
    LENGTH: tl.constexpr = K // 2 if HALF else K  # bytes of a row
    row_tile, column_tile = grouped_tile(ROW_TILES, (N + BLOCK_N - 1) // BLOCK_N, TILE_GROUP)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    row = clamp(column, N, WHOLE_N).to(tl.int64)
    code_tiles, rows, sums = (), (), ()
    for part in tl.static_range(PARTS):
        code_tiles = code_tiles + (code_ptr + (row + part * N)[:, None] * LENGTH + depth[None, :],)
        rows = rows + ((row + part * N) * BLOCKS,)
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
    x_tile = x_ptr + clamp(token, M, WHOLE_M)[None, :] * K + depth[:, None]
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    for at in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        if HALF:
            sums = add_nibbles(
                sums, x_tile, code_tiles, scale_ptr, zero_ptr, rows, at, PARTS, HALF, GROUP, ZERO_POINT, FACTOR
            )  # fmt: skip
        else:
            sums = add_codes(sums, x_tile, code_tiles, at, K, PARTS, BLOCK_K, FACTOR)
    if not HALF:
        sums = scale_sums(sums, scale_ptr, rows, PARTS)
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    tokens, columns = token[None, :], column[:, None]
    token_mask, column_mask = bound(tokens, M, WHOLE_M), bound(columns, N, WHOLE_N)
    extras = LOAD_EXTRAS(extra_ptrs, tokens, columns, token_mask, column_mask)
    out = EPILOGUE(sums, extras)
    tl.store(out_ptr + (tokens * N + columns), out.to(out_ptr.dtype.element_ty), mask=token_mask & column_mask)
