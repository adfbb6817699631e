"""Linear layers over 8-bit codes with scales of blocks: out = epilogue(sum of each part, extras).

Each group of GROUP columns of a token has a scale, and each tile of SCALE_ROWS x GROUP codes of the weight. The codes
of a group are multiplied into an accumulator of their own; its sums, times both scales, are added to the total.

With WEIGHT_LEFT (few tokens), tiles are [BLOCK_N, BLOCK_M], the transpose of what is stored, because tensor-core
instructions have many rows but may have few columns; with SLICES, a step is a batch of SLICES products over different
columns, so that warps multiply independently. Else (many tokens) tiles are [BLOCK_M, BLOCK_N]: a thread then holds few
rows, and therefore few scales of tokens; with MAPPED, both factors are then loaded by TMA.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import launch_after_loads, wait_before_loads
from llmc.codegen.backends.triton.kernels.gemm import grouped_tile
from llmc.codegen.backends.triton.kernels.gemm_small import prefetch, tile_pointers, weight_rows
from llmc.codegen.backends.triton.kernels.product_output import Output, store_product
from llmc.codegen.backends.triton.kernels.quantized_gemm import spread
from llmc.codegen.backends.triton.kernels.tile_masks import clamp


@triton.jit
def load_scales(scale_row, k, GROUP: tl.constexpr, SPAN: tl.constexpr, SLICES: tl.constexpr, LEFT: tl.constexpr):
    """Load the scales of the columns from k on, SPAN in each slice; scale_row: pointers to the first scale of rows."""
    if SLICES == 1:
        group = k // GROUP
    else:
        group = (k + tl.arange(0, SLICES) * SPAN)[:, None, None] // GROUP
    return tl.load(spread(scale_row, SLICES, LEFT) + group)


@triton.jit
def load_factor(
    ptr, tile, k, TURNED: tl.constexpr, ONCE: tl.constexpr, MAPPED: tl.constexpr, FLOAT32_FACTORS: tl.constexpr
):
    """Load the columns of a factor from k on; `tile`: pointers to the first step or, of a map, the first row.

    TURNED: transpose what a map loads; pointers are those of the transpose already. ONCE: nothing else reads it.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    if MAPPED:
        factor = ptr.load([tile, k])
        if TURNED:
            factor = factor.T
    else:
        factor = tl.load(tile + k, eviction_policy=POLICY)
    if FLOAT32_FACTORS:
        factor = factor.to(tl.float32)
    return factor


@triton.jit
def add_products(
    sums,
    x_ptr,
    code_ptr,
    x_tile,
    x_scale_row,
    weight_tiles,
    scale_rows,
    k,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SLICES: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    MAPPED: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,
):
    """Return the sums after the columns from k on, SPAN in each slice."""
    x_scale = load_scales(x_scale_row, k, GROUP, SPAN, SLICES, not WEIGHT_LEFT)
    x = load_factor(x_ptr, x_tile, k, False, False, MAPPED, FLOAT32_FACTORS)
    added = ()
    for i in tl.static_range(len(weight_tiles)):
        scale = load_scales(scale_rows[i], k, GROUP, SPAN, SLICES, WEIGHT_LEFT)
        w = load_factor(code_ptr, weight_tiles[i], k, True, WEIGHT_LEFT, MAPPED, FLOAT32_FACTORS)
        if WEIGHT_LEFT:
            product = tl.dot(w, x, input_precision="ieee")
        else:
            product = tl.dot(x, w, input_precision="ieee")
        added = added + (sums[i] + product * (x_scale * scale),)
    return added


@triton.jit
def parts_of_weight(
    code_ptr,
    scale_ptr,
    column_tile,
    column,
    N: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    JOINED: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    MAPPED: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
):
    """Return (the first step of the codes, pointers to the scales of rows, sums of 0) of each tile."""
    HEIGHT: tl.constexpr = 2 * BLOCK_N if JOINED else BLOCK_N  # rows of a tile of codes
    SHAPE: tl.constexpr = [HEIGHT, BLOCK_M] if WEIGHT_LEFT else [BLOCK_M, HEIGHT]
    row = weight_rows(column_tile, column, N, 1, BLOCK_N, JOINED)
    weight_tiles, scale_rows, sums = (), (), ()
    for part in tl.static_range(TILES):
        weight_row = (row + part * N) * K
        if MAPPED:
            weight_tiles = weight_tiles + (column_tile * BLOCK_N + part * N,)
        else:
            weight_tiles = weight_tiles + (tile_pointers(code_ptr, weight_row, BLOCK_K, SLICES, WEIGHT_LEFT),)
        scaled = column_tile * BLOCK_N + tl.arange(0, 1) if ONE_SCALE else row
        scale_rows = scale_rows + (scale_ptr + (scaled + part * N) // SCALE_ROWS * GROUPS,)
        sums = sums + (tl.zeros(SHAPE if SLICES == 1 else [SLICES] + SHAPE, tl.float32),)
        if PREFETCH_LINES:
            prefetch(code_ptr, weight_row, K, 128, PREFETCH_LINES)
    return weight_tiles, scale_rows, sums


@triton.jit
def sums_of_parts(sums, JOINED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr):
    """Return the sums of each part: of all slices, and divided if JOINED."""
    if SLICES > 1:
        total = ()
        for i in tl.static_range(len(sums)):
            total = total + (tl.sum(sums[i], axis=0),)
        sums = total
    if JOINED:
        sums = tl.split(tl.permute(tl.reshape(sums[0], (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    return sums


@triton.jit
def scaled_gemm(
    x_ptr,  # codes [M, K]; with MAPPED their tensor map, boxes of [BLOCK_M, BLOCK_K]
    code_ptr,  # [PARTS, N, K]; with MAPPED the tensor map of [PARTS * N, K], boxes of [BLOCK_N, BLOCK_K]
    x_scale_ptr,  # [M, K // GROUP]
    scale_ptr,  # [cdiv(PARTS * N, SCALE_ROWS), K // GROUP]
    output: Output,
    ROW_TILES,  # cdiv(M, BLOCK_M)
    K: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,  # the rows of both parts form one tile, so that fewer rows of each fill an instruction
    GROUP: tl.constexpr,  # columns that share a scale
    SCALE_ROWS: tl.constexpr,  # rows of the weight that share a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of a step: of all slices; it divides K
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_GROUP: tl.constexpr,  # rows of tiles that are computed together
    WEIGHT_LEFT: tl.constexpr,
    MAPPED: tl.constexpr,
    ONE_SCALE: tl.constexpr,  # the rows of a tile share a scale
    PREFETCH_LINES: tl.constexpr,  # cache lines of each row of codes to prefetch before the wait
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    DEPENDENT_LAUNCH: tl.constexpr,
    LATE_LAUNCH: tl.constexpr,
):
    N: tl.constexpr = output.N
    row_tile, column_tile = grouped_tile(ROW_TILES, (N + BLOCK_N - 1) // BLOCK_N, TILE_GROUP)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    weight_tiles, scale_rows, sums = parts_of_weight(
        code_ptr, scale_ptr, column_tile, column, N, K, 1 if JOINED else PARTS, JOINED, K // GROUP, SCALE_ROWS,
        BLOCK_M, BLOCK_N, BLOCK_K, SLICES, WEIGHT_LEFT, ONE_SCALE, MAPPED, PREFETCH_LINES,
    )  # fmt: skip
    x_row = clamp(token, output.M, output.WHOLE_M)
    x_tile = row_tile * BLOCK_M if MAPPED else tile_pointers(x_ptr, x_row * K, BLOCK_K, SLICES, not WEIGHT_LEFT)
    x_scale_row = x_scale_ptr + x_row * (K // GROUP)
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        sums = add_products(
            sums, x_ptr, code_ptr, x_tile, x_scale_row, weight_tiles, scale_rows, k, GROUP, BLOCK_K // SLICES, SLICES,
            WEIGHT_LEFT, MAPPED, FLOAT32_FACTORS,
        )  # fmt: skip
    sums = sums_of_parts(sums, JOINED, BLOCK_M, BLOCK_N, SLICES)
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    tokens, columns = spread(token, 1, not WEIGHT_LEFT), spread(column, 1, WEIGHT_LEFT)
    store_product(output, sums, tokens, columns, N % BLOCK_N == 0)
