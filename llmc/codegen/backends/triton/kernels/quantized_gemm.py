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
from llmc.codegen.backends.triton.kernels.gemm_small import weight_rows
from llmc.codegen.backends.triton.kernels.l2_prefetch import prefetch
from llmc.codegen.backends.triton.kernels.product_output import Output, store_product
from llmc.codegen.backends.triton.kernels.quantized_codes import WeightCodes, add_pair, byte_factors, nibble_factors
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
def block_entries(codes: WeightCodes, entry_ptr, row, column, ROWS: tl.constexpr, SLICES: tl.constexpr):
    """Load the scales or zero points of `row`, of ROWS, in the blocks of the columns `column`, as [.., rows, 1]."""
    return tl.load(entry_ptr + column // codes.GROUP * ROWS + spread(row, SLICES, True))


@triton.jit
def add_bytes(
    codes: WeightCodes, sums, x_tile, code_tiles, at, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the sums after the columns from `at` on, of bytes with one code each; the scales are applied later."""
    K: tl.constexpr = codes.K
    WHOLE: tl.constexpr = K % (BLOCK_K * SLICES) == 0
    mask = bound(step_places(BLOCK_K, BLOCK_K, SLICES, False), K - at, WHOLE)
    x = tl.load(x_tile + at, mask=mask, other=0.0).to(FACTOR)
    added = ()
    for i in tl.static_range(len(code_tiles)):
        mask = bound(step_places(BLOCK_K, BLOCK_K, SLICES, True), K - at, WHOLE)
        code = tl.load(code_tiles[i] + at, mask=mask, other=0, eviction_policy="evict_first")
        added = added + (tl.dot(byte_factors(code, FACTOR, codes.ASSEMBLY), x, sums[i], input_precision="ieee"),)
    return added


@triton.jit
def add_nibbles(
    codes: WeightCodes, sums, x_tile, code_tiles, rows, at, ROWS: tl.constexpr, SLICES: tl.constexpr,
    SCALED: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the sums after the 2 * HALF * SLICES columns of the bytes from `at` on, multiplied by their scales."""
    HALF: tl.constexpr = codes.HALF
    x_low = tl.load(x_tile + 2 * at).to(FACTOR)
    x_high = tl.load(x_tile + (2 * at + HALF)).to(FACTOR)
    column = 2 * at + step_places(1, 2 * HALF, SLICES, True)
    JOINT: tl.constexpr = codes.GROUP % (2 * HALF) == 0  # both codes of a byte are in one block
    added = ()
    for i in tl.static_range(len(code_tiles)):
        packed = tl.load(code_tiles[i] + at, eviction_policy="evict_first")
        low_scale = block_entries(codes, codes.scale_ptr, rows[i], column, ROWS, SLICES)
        high_scale = low_scale
        low_zero, high_zero = None, None
        if codes.zero_ptr is not None:
            low_zero = block_entries(codes, codes.zero_ptr, rows[i], column, ROWS, SLICES)
            high_zero = low_zero
        if not JOINT:
            high_scale = block_entries(codes, codes.scale_ptr, rows[i], column + HALF, ROWS, SLICES)
            if codes.zero_ptr is not None:
                high_zero = block_entries(codes, codes.zero_ptr, rows[i], column + HALF, ROWS, SLICES)
        low, high = nibble_factors(packed, low_zero, high_zero, codes.ZERO_POINT, FACTOR, codes.ASSEMBLY)
        added = added + (
            add_pair(sums[i], low, high, x_low, x_high, low_scale, high_scale, JOINT, SCALED, codes.ASSEMBLY),
        )
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
    codes: WeightCodes,
    output: Output,
    ROW_TILES,  # cdiv(M, BLOCK_M)
    JOINED: tl.constexpr,  # the rows of both parts form one tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # bytes of a row in a slice of a step; HALF, if that is not 0
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_GROUP: tl.constexpr,  # rows of tiles that are computed together
    SCALED: tl.constexpr,  # multiply the factors, not the sums, by the scales
    PREFETCH_LINES: tl.constexpr,  # cache lines of each row of codes to prefetch before the wait
    FACTOR: tl.constexpr,  # dtype of the factors
    DEPENDENT_LAUNCH: tl.constexpr,
    LATE_LAUNCH: tl.constexpr,
):
    N: tl.constexpr = output.N
    K: tl.constexpr = codes.K
    HALF: tl.constexpr = codes.HALF
    LENGTH: tl.constexpr = K // 2 if HALF else K  # bytes of a row
    row_tile, column_tile = grouped_tile(ROW_TILES, (N + BLOCK_N - 1) // BLOCK_N, TILE_GROUP)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row = weight_rows(column_tile, column, N, 1, BLOCK_N, JOINED)
    code_tiles, rows, sums = tiles_of_codes(
        codes.code_ptr, row, N, LENGTH, 1 if JOINED else codes.PARTS, BLOCK_M, BLOCK_K, SLICES, PREFETCH_LINES
    )  # fmt: skip
    SPAN: tl.constexpr = 2 * HALF if HALF else BLOCK_K  # columns of a slice
    x_row = clamp(token, output.M, output.WHOLE_M) * K
    x_tile = x_ptr + spread(x_row, SLICES, False) + step_places(BLOCK_K, SPAN, SLICES, False)
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    for at in tl.range(0, LENGTH, BLOCK_K * SLICES, num_stages=STAGES):
        if HALF:
            sums = add_nibbles(codes, sums, x_tile, code_tiles, rows, at, codes.PARTS * N, SLICES, SCALED, FACTOR)
        else:
            sums = add_bytes(codes, sums, x_tile, code_tiles, at, BLOCK_K, SLICES, FACTOR)
    sums = finish_sums(sums, codes.scale_ptr, rows, HALF > 0, JOINED, BLOCK_M, BLOCK_N, SLICES)
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    store_product(output, sums, token[None, :], column[:, None], N % BLOCK_N == 0)
