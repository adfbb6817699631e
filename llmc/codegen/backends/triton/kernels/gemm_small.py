"""Linear layers on tensor cores for few tokens: out = epilogue(x @ weight[0].T, .., x @ weight[PARTS - 1].T, extras).

Each program computes BLOCK_N rows of every part for BLOCK_M tokens. Its tile is [BLOCK_N, BLOCK_M], the transpose of
what it stores, because tensor-core instructions have many rows but may have few columns. With SLICES, every step is a
batch of SLICES products over different columns, so that warps multiply independently; their sums are added at the end.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import launch_after_loads, wait_before_loads
from llmc.codegen.backends.triton.kernels.l2_prefetch import prefetch
from llmc.codegen.backends.triton.kernels.product_output import Output, load_extras_at, store_epilogue
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def step_columns(BLOCK_K: tl.constexpr, SLICES: tl.constexpr, LEFT: tl.constexpr):
    """Return the columns of a step, shaped for the LEFT factor [.., rows, columns] or the right [.., columns, rows]."""
    column = tl.arange(0, BLOCK_K // SLICES)
    if SLICES == 1:
        return column[None, :] if LEFT else column[:, None]
    else:
        first = tl.arange(0, SLICES)[:, None, None] * (BLOCK_K // SLICES)
        return first + (column[None, None, :] if LEFT else column[None, :, None])


@triton.jit
def tile_pointers(ptr, row, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, LEFT: tl.constexpr):
    """Return pointers to the first step of a factor; `row` are the offsets of its rows."""
    if SLICES == 1:
        first = ptr + (row[:, None] if LEFT else row[None, :])
    else:
        first = ptr + (row[None, :, None] if LEFT else row[None, None, :])
    return first + step_columns(BLOCK_K, SLICES, LEFT)


@triton.jit
def load_weights(tile, k, K: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """Load the columns of the weights from k on. They are read only once, so they are evicted first."""
    mask = bound(step_columns(BLOCK_K, SLICES, True), K - k, K % BLOCK_K == 0)
    return tl.load(tile + k, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_tokens(tile, exists, k, K: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, WHOLE_M: tl.constexpr):
    """Load the columns of the tokens from k on; zeros for tokens that do not exist, which are not read.

    Reading an existing token in their place, in all programs at once, takes longer than reading as many tokens.
    """
    mask = bound(step_columns(BLOCK_K, SLICES, False), K - k, K % BLOCK_K == 0)
    if not WHOLE_M:
        mask = mask & exists
    return tl.load(tile + k, mask=mask, other=0.0)


@triton.jit
def weight_rows(column_tile, column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, JOINED: tl.constexpr):
    """Return offsets of a tile's weight rows: BLOCK_N rows of one part or, if JOINED, of both parts."""
    WHOLE_N: tl.constexpr = N % BLOCK_N == 0
    if JOINED:
        row = tl.arange(0, 2 * BLOCK_N)
        first = clamp(column_tile * BLOCK_N + row % BLOCK_N, N, WHOLE_N)
        return (first + row // BLOCK_N * N).to(tl.int64) * K
    else:
        return clamp(column, N, WHOLE_N).to(tl.int64) * K


@triton.jit
def multiply(
    x_tile,
    exists,
    weight_tiles,
    K: tl.constexpr,
    JOINED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE_M: tl.constexpr,
    FLOAT32_FACTORS: tl.constexpr,
    SUM: tl.constexpr,
):
    """Return the products [BLOCK_N, BLOCK_M] of each part, from pointers to the first step of the factors.

    exists: the tokens that exist, shaped as a row of the right factor.
    """
    TILES: tl.constexpr = 1 if JOINED else PARTS
    HEIGHT: tl.constexpr = 2 * BLOCK_N if JOINED else BLOCK_N
    sums = ()
    for _ in tl.static_range(TILES):
        if SLICES == 1:
            sums = sums + (tl.zeros([HEIGHT, BLOCK_M], SUM),)
        else:
            sums = sums + (tl.zeros([SLICES, HEIGHT, BLOCK_M], SUM),)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = load_tokens(x_tile, exists, k, K, BLOCK_K, SLICES, WHOLE_M)
        if FLOAT32_FACTORS:
            x = x.to(tl.float32)
        added = ()
        for part in tl.static_range(TILES):
            w = load_weights(weight_tiles[part], k, K, BLOCK_K, SLICES)
            if FLOAT32_FACTORS:
                w = w.to(tl.float32)
            added = added + (tl.dot(w, x, sums[part], input_precision="ieee", out_dtype=SUM),)
        sums = added
    if SLICES > 1:
        added = ()
        for part in tl.static_range(TILES):
            added = added + (tl.sum(sums[part], axis=0),)
        sums = added
    if JOINED:
        sums = tl.split(tl.permute(tl.reshape(sums[0], (2, BLOCK_N, BLOCK_M)), (1, 2, 0)))
    return sums


@triton.jit
def gemm_small(
    x_ptr,  # [M, K]
    weight_ptr,  # [PARTS, N, K]
    output: Output,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,  # the rows of both parts form one tile, so that fewer rows of each fill an instruction
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_LINE: tl.constexpr,  # elements of a cache line
    PREFETCH_LINES: tl.constexpr,  # lines of each weight row to prefetch before the wait
    EARLY_EXTRAS: tl.constexpr,  # load the extras before the product; they need few registers
    FLOAT32_FACTORS: tl.constexpr,  # convert both factors to float32 before the product
    SUM: tl.constexpr,  # dtype of the sums
    DEPENDENT_LAUNCH: tl.constexpr,
    LATE_LAUNCH: tl.constexpr,
):
    N: tl.constexpr = output.N
    WHOLE_N: tl.constexpr = N % BLOCK_N == 0
    TILES: tl.constexpr = 1 if JOINED else PARTS
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)  # programs that share weights are adjacent
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    weight_row = weight_rows(column_tile, column, N, K, BLOCK_N, JOINED)
    x_row = clamp(token, output.M, output.WHOLE_M) * K
    weight_tiles = ()
    for part in tl.static_range(TILES):
        weight_tiles = weight_tiles + (tile_pointers(weight_ptr + part * N * K, weight_row, BLOCK_K, SLICES, True),)
    x_tile = tile_pointers(x_ptr, x_row, BLOCK_K, SLICES, False)
    exists = bound(token, output.M, output.WHOLE_M)
    exists = exists[None, :] if SLICES == 1 else exists[None, None, :]
    if PREFETCH_LINES:
        for part in tl.static_range(TILES):
            prefetch(weight_ptr + part * N * K, weight_row, K, PREFETCH_LINE, PREFETCH_LINES)
    wait_before_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)

    tokens, columns = token[None, :], column[:, None]
    if EARLY_EXTRAS:
        extras = load_extras_at(output, tokens, columns, WHOLE_N)
    sums = multiply(
        x_tile, exists, weight_tiles, K, JOINED, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, SLICES, STAGES, output.WHOLE_M,
        FLOAT32_FACTORS, SUM,
    )  # fmt: skip
    launch_after_loads(DEPENDENT_LAUNCH, LATE_LAUNCH)
    if not EARLY_EXTRAS:
        extras = load_extras_at(output, tokens, columns, WHOLE_N)
    store_epilogue(output, sums, extras, tokens, columns, WHOLE_N)
