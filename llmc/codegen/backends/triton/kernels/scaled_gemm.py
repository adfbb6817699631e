"""Linear layers over 8-bit codes with scales of blocks: out = epilogue(sum of each part, extras).

Each group of GROUP columns of a token has a scale, and each tile of SCALE_ROWS x GROUP codes of the weight. The codes
of a group are multiplied into an accumulator of their own; its sums, times both scales, are added to the total.

With WEIGHT_LEFT (few tokens), tiles are [BLOCK_N, BLOCK_M], the transpose of what is stored, because tensor-core
instructions have many rows but may have few columns; with SLICES, a step is a batch of SLICES products over different
columns, so that warps multiply independently. Else (many tokens) tiles are [BLOCK_M, BLOCK_N]: a thread then holds few
rows, and therefore few scales of tokens; with MAPPED, both factors are then loaded by TMA.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import launch_after_loads, wait_before_loads
from llmc.codegen.backends.triton.kernels.gemm import grouped_tile
from llmc.codegen.backends.triton.kernels.gemm_small import tile_pointers, weight_rows
from llmc.codegen.backends.triton.kernels.l2_prefetch import prefetch
from llmc.codegen.backends.triton.kernels.product_output import Output, store_product
from llmc.codegen.backends.triton.kernels.quantized_gemm import spread
from llmc.codegen.backends.triton.kernels.tile_masks import clamp


class ScaledTile(NamedTuple):
    """The constants of a product and of its tiles, besides those of its result."""

    K: tl.constexpr
    PARTS: tl.constexpr
    GROUP: tl.constexpr  # columns that share a scale
    SCALE_ROWS: tl.constexpr  # rows of the weight that share a scale
    JOINED: tl.constexpr  # the rows of both parts form one tile, so that fewer rows of each fill an instruction
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_K: tl.constexpr  # columns of a step: of all slices; it divides K
    SLICES: tl.constexpr
    WEIGHT_LEFT: tl.constexpr
    MAPPED: tl.constexpr
    ONE_SCALE: tl.constexpr  # the rows of a tile share a scale
    PREFETCH_LINES: tl.constexpr  # cache lines of each row of codes to prefetch before the wait
    FLOAT32_FACTORS: tl.constexpr  # convert both factors to float32 before the product


@triton.jit
def load_scales(tile: ScaledTile, scale_row, k, LEFT: tl.constexpr):
    """Load the scales of a step from column k on; scale_row: pointers to the first scale of rows."""
    SLICES: tl.constexpr = tile.SLICES
    if SLICES == 1:
        group = k // tile.GROUP
    else:
        group = (k + tl.arange(0, SLICES) * (tile.BLOCK_K // SLICES))[:, None, None] // tile.GROUP
    return tl.load(spread(scale_row, SLICES, LEFT) + group)


@triton.jit
def load_factor(tile: ScaledTile, ptr, first, k, TURNED: tl.constexpr, ONCE: tl.constexpr):
    """Load the columns of a factor from k on; `first`: pointers to the first step or, of a map, the first row.

    TURNED: transpose what a map loads; pointers are those of the transpose already. ONCE: nothing else reads it.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    if tile.MAPPED:
        factor = ptr.load([first, k])
        if TURNED:
            factor = factor.T
    else:
        factor = tl.load(first + k, eviction_policy=POLICY)
    if tile.FLOAT32_FACTORS:
        factor = factor.to(tl.float32)
    return factor


@triton.jit
def add_products(tile: ScaledTile, sums, x_ptr, code_ptr, x_tile, x_scale_row, weight_tiles, scale_rows, k):
    """Return the sums after a step, from column k on."""
    x_scale = load_scales(tile, x_scale_row, k, not tile.WEIGHT_LEFT)
    x = load_factor(tile, x_ptr, x_tile, k, False, False)
    added = ()
    for i in tl.static_range(len(weight_tiles)):
        scale = load_scales(tile, scale_rows[i], k, tile.WEIGHT_LEFT)
        w = load_factor(tile, code_ptr, weight_tiles[i], k, True, tile.WEIGHT_LEFT)
        if tile.WEIGHT_LEFT:
            product = tl.dot(w, x, input_precision="ieee")
        else:
            product = tl.dot(x, w, input_precision="ieee")
        added = added + (sums[i] + product * (x_scale * scale),)
    return added


@triton.jit
def parts_of_weight(tile: ScaledTile, code_ptr, scale_ptr, column_tile, column, N: tl.constexpr):
    """Return (the first step of the codes, pointers to the scales of rows, sums of 0) of each tile."""
    K: tl.constexpr = tile.K
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    HEIGHT: tl.constexpr = 2 * BLOCK_N if tile.JOINED else BLOCK_N  # rows of a tile of codes
    SHAPE: tl.constexpr = [HEIGHT, tile.BLOCK_M] if tile.WEIGHT_LEFT else [tile.BLOCK_M, HEIGHT]
    row = weight_rows(column_tile, column, N, 1, BLOCK_N, tile.JOINED)
    weight_tiles, scale_rows, sums = (), (), ()
    for part in tl.static_range(1 if tile.JOINED else tile.PARTS):
        weight_row = (row + part * N) * K
        if tile.MAPPED:
            weight_tiles = weight_tiles + (column_tile * BLOCK_N + part * N,)
        else:
            first = tile_pointers(code_ptr, weight_row, tile.BLOCK_K, tile.SLICES, tile.WEIGHT_LEFT)
            weight_tiles = weight_tiles + (first,)
        scaled = column_tile * BLOCK_N + tl.arange(0, 1) if tile.ONE_SCALE else row
        scale_rows = scale_rows + (scale_ptr + (scaled + part * N) // tile.SCALE_ROWS * (K // tile.GROUP),)
        sums = sums + (tl.zeros(SHAPE if tile.SLICES == 1 else [tile.SLICES] + SHAPE, tl.float32),)
        if tile.PREFETCH_LINES:
            prefetch(code_ptr, weight_row, K, 128, tile.PREFETCH_LINES)
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
    tile: ScaledTile,
    ROW_TILES,  # cdiv(M, BLOCK_M)
    STAGES: tl.constexpr,
    TILE_GROUP: tl.constexpr,  # rows of tiles that are computed together
    DEPENDENT_LAUNCH: tl.constexpr,
    LATE_LAUNCH: tl.constexpr,
):
    N: tl.constexpr = output.N
    K: tl.constexpr = tile.K
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    LEFT: tl.constexpr = tile.WEIGHT_LEFT
    row_tile, column_tile = grouped_tile(ROW_TILES, (N + BLOCK_N - 1) // BLOCK_N, TILE_GROUP)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    weight_tiles, scale_rows, sums = parts_of_weight(tile, code_ptr, scale_ptr, column_tile, column, N)
    x_row = clamp(token, output.M, output.WHOLE_M)
    x_tile = row_tile * BLOCK_M if tile.MAPPED else tile_pointers(x_ptr, x_row * K, tile.BLOCK_K, tile.SLICES, not LEFT)
    x_scale_row = x_scale_ptr + x_row * (K // tile.GROUP)
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    for k in tl.range(0, K, tile.BLOCK_K, num_stages=STAGES):
        sums = add_products(tile, sums, x_ptr, code_ptr, x_tile, x_scale_row, weight_tiles, scale_rows, k)
    sums = sums_of_parts(sums, tile.JOINED, BLOCK_M, BLOCK_N, tile.SLICES)
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    store_product(output, sums, spread(token, 1, not LEFT), spread(column, 1, LEFT), N % BLOCK_N == 0)
