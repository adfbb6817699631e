"""Linear layers on tensor cores for many tokens, with tiles loaded by TMA, on Hopper and later.

Like `gemm`, with tensor maps in place of pointers. Threads compute no addresses and no masks of the factors, because
TMA fills elements outside of a matrix with zeros. The rows of two parts form one tile, so that one instruction
multiplies both.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import launch_after_loads, wait_before_loads
from llmc.codegen.backends.triton.kernels.gemm import grouped_tile, store_tile
from llmc.codegen.backends.triton.kernels.product_output import Output


@triton.jit
def gemm_tma(
    x_map,  # tensor map of [M, K], boxes of [BLOCK_M, BLOCK_K]
    weight_map,  # one part: [N, K] in boxes [BLOCK_N, BLOCK_K]; two parts: [2, N, K] in boxes [2, BLOCK_N, BLOCK_K]
    output: Output,  # [M, N]; with SPLITS, [SPLITS, M, N] in float32 without an epilogue
    ROW_TILES,  # cdiv(M, BLOCK_M)
    K: tl.constexpr,
    PARTS: tl.constexpr,  # 1 or 2
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
    COLUMN_TILES: tl.constexpr = (output.N + BLOCK_N - 1) // BLOCK_N
    WHOLE_N: tl.constexpr = output.N % BLOCK_N == 0
    row_tile, column_tile = grouped_tile(ROW_TILES, COLUMN_TILES, GROUP)
    first_row, first_column = row_tile * BLOCK_M, column_tile * BLOCK_N
    column = first_column + tl.arange(0, BLOCK_N)
    token = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    tile = tl.zeros([BLOCK_M, PARTS * BLOCK_N], SUM)
    begin, end = 0, K
    if SPLITS:  # every part is a whole number of steps
        begin = tl.program_id(1) * (K // SPLITS)
        end = (tl.program_id(1) + 1) * (K // SPLITS)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        x = x_map.load([first_row, k])
        if PARTS == 2:
            w = tl.reshape(weight_map.load([0, first_column, k]), (2 * BLOCK_N, BLOCK_K))
        else:
            w = weight_map.load([first_column, k])
        if FLOAT32_FACTORS:
            x, w = x.to(tl.float32), w.to(tl.float32)
        tile = tl.dot(x, w.T, tile, input_precision="ieee", out_dtype=SUM)
    if PARTS == 2:
        sums = tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
    else:
        sums = (tile,)
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    store_tile(output, sums, token, column, SPLITS, WHOLE_N)
