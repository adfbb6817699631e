"""Linear layers on tensor cores for many tokens: out = epilogue(x @ weight[0].T, .., x @ weight[PARTS - 1].T, extras).

Each program computes a tile of BLOCK_M tokens and BLOCK_N columns of every part. With SPLITS, a program multiplies one
of SPLITS parts of the depth and stores its sums; `splitk_combine` adds the parts and applies the epilogue.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import launch_after_loads, wait_before_loads
from llmc.codegen.backends.triton.kernels.product_output import Output, store_product
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def grouped_tile(ROW_TILES, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """Return (row, column) of this program's tile. Programs cover GROUP rows of tiles at a time, column by column.

    Programs that run at the same time then share rows of both factors in the L2 cache.
    """
    program = tl.program_id(0)
    first = program // (GROUP * COLUMN_TILES) * GROUP
    height = tl.minimum(ROW_TILES - first, GROUP)
    return first + program % (GROUP * COLUMN_TILES) % height, program % (GROUP * COLUMN_TILES) // height


@triton.jit
def store_tile(output: Output, sums, token, column, SPLITS: tl.constexpr, WHOLE_N: tl.constexpr):
    """Store the epilogue of the sums [tokens, columns]; with SPLITS, store the sums of this program's part."""
    token, column = token[:, None], column[None, :]
    if SPLITS:
        mask = bound(token, output.M, output.WHOLE_M) & bound(column, output.N, WHOLE_N)
        at = tl.program_id(1).to(tl.int64) * output.M * output.N + token * output.N + column
        tl.store(output.out_ptr + at, sums[0], mask=mask)
    else:
        store_product(output, sums, token, column, WHOLE_N)


@triton.jit
def gemm(
    x_ptr,  # [M, K]
    weight_ptr,  # [PARTS, N, K]
    output: Output,  # [M, N]; with SPLITS, [SPLITS, M, N] in float32 without an epilogue
    ROW_TILES,  # cdiv(M, BLOCK_M)
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,  # 0: the depth is not split
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    SUM: tl.constexpr,  # dtype of the sums
    DEPENDENT_LAUNCH: tl.constexpr,
    LATE_LAUNCH: tl.constexpr,
):
    N: tl.constexpr = output.N
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WHOLE_N: tl.constexpr = N % BLOCK_N == 0
    DEPTH: tl.constexpr = K // SPLITS if SPLITS else K  # columns of K that this program multiplies
    WHOLE_K: tl.constexpr = DEPTH % BLOCK_K == 0
    row_tile, column_tile = grouped_tile(ROW_TILES, COLUMN_TILES, GROUP)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    if SPLITS:
        weight_ptr += tl.program_id(1) * DEPTH
        x_ptr += tl.program_id(1) * DEPTH
    weight_row = clamp(column, N, WHOLE_N).to(tl.int64) * K
    x_row = clamp(token, output.M, output.WHOLE_M) * K
    weight_tiles = ()
    for part in tl.static_range(PARTS):
        weight_tiles = weight_tiles + (weight_ptr + part * N * K + weight_row[None, :] + depth[:, None],)
    x_tile = x_ptr + x_row[:, None] + depth[None, :]
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_M, BLOCK_N], SUM),)
    for k in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_tile + k, mask=bound(depth[None, :], DEPTH - k, WHOLE_K), other=0.0)
        if FLOAT32_FACTORS:
            x = x.to(tl.float32)
        added = ()
        for part in tl.static_range(PARTS):
            w = tl.load(weight_tiles[part] + k, mask=bound(depth[:, None], DEPTH - k, WHOLE_K), other=0.0)
            if FLOAT32_FACTORS:
                w = w.to(tl.float32)
            added = added + (tl.dot(x, w, sums[part], input_precision="ieee", out_dtype=SUM),)
        sums = added
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    store_tile(output, sums, token, column, SPLITS, WHOLE_N)
