"""Linear layers with quantised weights on tensor cores: out = epilogue(x @ w[0].T, .., x @ w[PARTS - 1].T, extras).

w = (code - zero) * scale. Codes less their zero points are integers that x's dtype holds exactly; they are the factors
of the products. The sums of the columns that share a scale are multiplied by it in float32; with SCALED, the factors
are multiplied by it in x's dtype instead, which costs less for many tokens.

Each program computes BLOCK_N rows of every part for BLOCK_M tokens, as a tile [BLOCK_N, BLOCK_M]: the transpose of what
it stores, because the codes are converted in registers, from which tensor cores can read their left factor. With
SLICES, a step is a batch of SLICES products over different columns, so that warps multiply independently; their sums
are added at the end.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import launch_after_loads, wait_before_loads
from llmc.codegen.backends.triton.kernels.gemm import grouped_tile
from llmc.codegen.backends.triton.kernels.gemm_small import prefetch, weight_rows
from llmc.codegen.backends.triton.kernels.quantized_codes import byte_factors, nibble_factors, scaled_factors
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def step_places(SIZE: tl.constexpr, STRIDE: tl.constexpr, SLICES: tl.constexpr, LEFT: tl.constexpr):
    """Return the places of SLICES runs of SIZE elements, STRIDE apart, in the LEFT factor or the right one."""
    place = tl.arange(0, SIZE)
    if SLICES == 1:
        return place[None, :] if LEFT else place[:, None]
    else:
        first = tl.arange(0, SLICES)[:, None, None] * STRIDE
        return first + (place[None, None, :] if LEFT else place[None, :, None])


@triton.jit
def spread(row, SLICES: tl.constexpr, LEFT: tl.constexpr):
    """Return `row` along the rows of the LEFT factor, or along the columns of the right one."""
    if SLICES == 1:
        return row[:, None] if LEFT else row[None, :]
    else:
        return row[None, :, None] if LEFT else row[None, None, :]


@triton.jit
def block_entries(entry_ptr, row, column, ROWS: tl.constexpr, GROUP: tl.constexpr, SLICES: tl.constexpr):
    """Load the scales or zero points of `row`, in the blocks of the columns `column`, as [.., rows, 1]."""
    return tl.load(entry_ptr + column // GROUP * ROWS + spread(row, SLICES, True))


@triton.jit
def add_bytes(
    sums,
    x_tile,
    code_tiles,
    at,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Return the sums after the columns from `at` on, of bytes with one code each; the scales are applied later."""
    WHOLE: tl.constexpr = K % (BLOCK_K * SLICES) == 0
    mask = bound(step_places(BLOCK_K, BLOCK_K, SLICES, False), K - at, WHOLE)
    x = tl.load(x_tile + at, mask=mask, other=0.0).to(FACTOR)
    added = ()
    for i in tl.static_range(len(code_tiles)):
        mask = bound(step_places(BLOCK_K, BLOCK_K, SLICES, True), K - at, WHOLE)
        code = tl.load(code_tiles[i] + at, mask=mask, other=0, eviction_policy="evict_first")
        added = added + (tl.dot(byte_factors(code, FACTOR, ASSEMBLY), x, sums[i], input_precision="ieee"),)
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
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    SCALED: tl.constexpr,
    FACTOR: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Return the sums after the 2 * HALF * SLICES columns of the bytes from `at` on, multiplied by their scales."""
    x_low = tl.load(x_tile + 2 * at).to(FACTOR)
    x_high = tl.load(x_tile + (2 * at + HALF)).to(FACTOR)
    column = 2 * at + step_places(1, 2 * HALF, SLICES, True)
    JOINT: tl.constexpr = GROUP % (2 * HALF) == 0  # both codes of a byte are in one block
    added = ()
    for i in tl.static_range(len(code_tiles)):
        packed = tl.load(code_tiles[i] + at, eviction_policy="evict_first")
        low_scale = block_entries(scale_ptr, rows[i], column, ROWS, GROUP, SLICES)
        high_scale = low_scale
        low_zero, high_zero = None, None
        if zero_ptr is not None:
            low_zero = block_entries(zero_ptr, rows[i], column, ROWS, GROUP, SLICES)
            high_zero = low_zero
        if not JOINT:
            high_scale = block_entries(scale_ptr, rows[i], column + HALF, ROWS, GROUP, SLICES)
            if zero_ptr is not None:
                high_zero = block_entries(zero_ptr, rows[i], column + HALF, ROWS, GROUP, SLICES)
        low, high = nibble_factors(packed, low_zero, high_zero, ZERO_POINT, FACTOR, ASSEMBLY)
        if SCALED:
            total = tl.dot(scaled_factors(low, low_scale, ASSEMBLY), x_low, sums[i], input_precision="ieee")
            total = tl.dot(scaled_factors(high, high_scale, ASSEMBLY), x_high, total, input_precision="ieee")
        elif JOINT:
            total = tl.dot(low, x_low, input_precision="ieee")
            total = sums[i] + tl.dot(high, x_high, total, input_precision="ieee") * low_scale.to(tl.float32)
        else:
            total = sums[i] + tl.dot(low, x_low, input_precision="ieee") * low_scale.to(tl.float32)
            total = total + tl.dot(high, x_high, input_precision="ieee") * high_scale.to(tl.float32)
        added = added + (total,)
    return added


@triton.jit
def finish_sums(
    sums,
    scale_ptr,
    rows,
    NIBBLES: tl.constexpr,
    JOINED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Return the sums of each part [BLOCK_N, BLOCK_M]: of all slices, and multiplied by their rows' scales."""
    finished = ()
    for i in tl.static_range(len(sums)):
        total = sums[i] if SLICES == 1 else tl.sum(sums[i], axis=0)
        if not NIBBLES:
            total = total * tl.load(scale_ptr + rows[i]).to(tl.float32)[:, None]
        finished = finished + (total,)
    if JOINED:
        finished = tl.split(tl.permute(tl.reshape(finished[0], (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    return finished


@triton.jit
def tiles_of_codes(
    code_ptr,
    row,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
):
    """Return (pointers to the first step of the codes, rows, sums of 0) of each tile; `row` are those of the first."""
    code_tiles, rows, sums = (), (), ()
    for part in tl.static_range(TILES):
        first = spread((row + part * N) * LENGTH, SLICES, True)
        code_tiles = code_tiles + (code_ptr + first + step_places(BLOCK_K, BLOCK_K, SLICES, True),)
        rows = rows + ((row + part * N).to(tl.int32),)
        if SLICES == 1:
            sums = sums + (tl.zeros([row.shape[0], BLOCK_M], tl.float32),)
        else:
            sums = sums + (tl.zeros([SLICES, row.shape[0], BLOCK_M], tl.float32),)
        if PREFETCH_LINES:
            prefetch(code_ptr, (row + part * N) * LENGTH, LENGTH, 128, PREFETCH_LINES)
    return code_tiles, rows, sums


@triton.jit
def quantized_gemm(
    x_ptr,  # [M, K]
    code_ptr,  # [PARTS, N, K], or bytes [PARTS, N, K // 2] with HALF
    scale_ptr,  # [BLOCKS, PARTS, N]
    zero_ptr,  # [BLOCKS, PARTS, N]: the zero points; None: ZERO_POINT
    out_ptr,  # [M, N]
    extra_ptrs,  # the other operands of the epilogue, as LOAD_EXTRAS takes them
    M,
    ROW_TILES,  # cdiv(M, BLOCK_M)
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,  # the rows of both parts form one tile
    HALF: tl.constexpr,  # columns between the two codes of a byte; 0: a byte is one code, and a row has one scale
    GROUP: tl.constexpr,  # columns that share a scale
    ZERO_POINT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # bytes of a row in a slice of a step; HALF, if that is not 0
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_GROUP: tl.constexpr,  # rows of tiles that are computed together
    WHOLE_M: tl.constexpr,  # BLOCK_M divides M
    SCALED: tl.constexpr,  # multiply the factors, not the sums, by the scales
    PREFETCH_LINES: tl.constexpr,  # cache lines of each row of codes to prefetch before the wait
    FACTOR: tl.constexpr,  # dtype of the factors
    ASSEMBLY: tl.constexpr,  # convert codes by PTX instructions
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
    row = weight_rows(column_tile, column, N, 1, BLOCK_N, JOINED)
    code_tiles, rows, sums = tiles_of_codes(
        code_ptr, row, N, LENGTH, 1 if JOINED else PARTS, BLOCK_M, BLOCK_K, SLICES, PREFETCH_LINES
    )  # fmt: skip
    SPAN: tl.constexpr = 2 * HALF if HALF else BLOCK_K  # columns of a slice
    x_row = clamp(token, M, WHOLE_M) * K
    x_tile = x_ptr + spread(x_row, SLICES, False) + step_places(BLOCK_K, SPAN, SLICES, False)
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    for at in tl.range(0, LENGTH, BLOCK_K * SLICES, num_stages=STAGES):
        if HALF:
            sums = add_nibbles(
                sums, x_tile, code_tiles, scale_ptr, zero_ptr, rows, at, PARTS * N, HALF, SLICES, GROUP, ZERO_POINT,
                SCALED, FACTOR, ASSEMBLY,
            )  # fmt: skip
        else:
            sums = add_bytes(sums, x_tile, code_tiles, at, K, BLOCK_K, SLICES, FACTOR, ASSEMBLY)
    sums = finish_sums(sums, scale_ptr, rows, HALF > 0, JOINED, BLOCK_M, BLOCK_N, SLICES)
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    tokens, columns = token[None, :], column[:, None]
    token_mask, column_mask = bound(tokens, M, WHOLE_M), bound(columns, N, WHOLE_N)
    extras = LOAD_EXTRAS(extra_ptrs, tokens, columns, token_mask, column_mask)
    out = EPILOGUE(sums, extras)
    tl.store(out_ptr + (tokens * N + columns), out.to(out_ptr.dtype.element_ty), mask=token_mask & column_mask)
