"""Linear layers of few tokens as streams of weight rows, multiplied in float32 registers without tensor cores.

out = epilogue(x @ weight[0].T, .., x @ weight[PARTS - 1].T, extras). Each program computes BLOCK_N rows of every part
for ROWS tokens. It accumulates one tile [BLOCK_N, BLOCK_K] per token and part, and reduces the tiles once, at the end.
The weights of the first AHEAD steps are loaded before the wait for the previous kernel, and every step loads the
weights of the step that is AHEAD steps later. With EPS, the kernel also computes the RMS norm of x: a program sums the
squares of its tokens while it streams weights, and divides its sums by the root at the end.

Tuples have one element per part, or one per token and part at index `row * PARTS + part`.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.product_output import Output, load_extras_at, store_epilogue
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def load_weights(weights, k, column, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    """Load the weights of every part for the step at k. They are read only once, so they are evicted first."""
    mask = bound(column[None, :], K - k, K % BLOCK_K == 0)
    loaded = ()
    for part in tl.static_range(PARTS):
        w = tl.load(weights[part] + k, mask=mask, other=0.0, eviction_policy="evict_first")
        loaded = loaded + (w,)
    return loaded


@triton.jit
def add_step(
    sums,
    squares,
    weights,
    x_rows,
    gain_row,
    k,
    column,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Return the sums and the sums of squares after the step at k, whose weights are `weights`."""
    mask = bound(column, K - k, K % BLOCK_K == 0)
    if EPS is not None:
        gain = tl.load(gain_row + k, mask=mask, other=0.0).to(tl.float32)
    factors = ()
    for part in tl.static_range(PARTS):
        factors = factors + (weights[part].to(tl.float32),)
    added, squared = (), ()
    for row in tl.static_range(ROWS):
        x = tl.load(x_rows[row] + k, mask=mask, other=0.0).to(tl.float32)
        if EPS is not None:
            squared = squared + (squares[row] + x * x,)
            x = x * gain
        for part in tl.static_range(PARTS):
            added = added + (sums[row * PARTS + part] + factors[part] * x[None, :],)
    return added, squared


@triton.jit
def reduce_columns(sums, JOINT_SUM: tl.constexpr):
    """Sum the tiles over their columns, in one pass through shared memory if JOINT_SUM is given."""
    if JOINT_SUM is not None:
        return JOINT_SUM(sums)
    else:
        reduced = ()
        for i in tl.static_range(len(sums)):
            reduced = reduced + (tl.sum(sums[i], axis=1),)
        return reduced


@triton.jit
def token_rows(x_ptr, column, M, K: tl.constexpr, ROWS: tl.constexpr, ONE_BLOCK: tl.constexpr, WHOLE_M: tl.constexpr):
    """Return (the tokens of this program, pointers to the first step of their rows)."""
    tokens, x_rows = (), ()
    for row in tl.static_range(ROWS):
        if ONE_BLOCK:
            token = tl.cast(row, tl.int64)
        else:
            token = tl.cast(tl.program_id(1) * ROWS + row, tl.int64)
        tokens = tokens + (token,)
        x_rows = x_rows + (x_ptr + clamp(token, M, WHOLE_M) * K + column,)
    return tokens, x_rows


@triton.jit
def stream(
    weights,
    ahead,
    x_rows,
    gain_row,
    squares,
    column,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    EPS: tl.constexpr,
):
    """Return the sums and the sums of squares after all steps; `ahead` are the weights of the first AHEAD steps."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    sums = ()
    for _ in tl.static_range(ROWS * PARTS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),)
    LAST: tl.constexpr = (STEPS - AHEAD) * BLOCK_K  # column of the step from which on all weights are loaded
    for k in range(0, LAST, BLOCK_K):
        sums, squares = add_step(
            sums, squares, ahead[:PARTS], x_rows, gain_row, k, column, K, BLOCK_K, PARTS, ROWS, EPS
        )  # fmt: skip
        ahead = ahead[PARTS:] + load_weights(weights, k + AHEAD * BLOCK_K, column, K, BLOCK_K, PARTS)
    for step in tl.static_range(AHEAD):
        sums, squares = add_step(
            sums, squares, ahead[step * PARTS :], x_rows, gain_row, LAST + step * BLOCK_K, column, K, BLOCK_K, PARTS,
            ROWS, EPS,
        )  # fmt: skip
    return sums, squares


@triton.jit
def scale_rows(sums, squares, K: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr):
    """Divide the sums of each token by the root of its mean square."""
    scaled, scales = (), ()
    for row in tl.static_range(ROWS):
        scales = scales + (tl.rsqrt(tl.sum(squares[row], axis=0) / K + EPS),)
    for row in tl.static_range(ROWS):
        for part in tl.static_range(PARTS):
            scaled = scaled + (sums[row * PARTS + part] * scales[row],)
    return scaled


@triton.jit
def gemv(
    x_ptr,  # [M, K]
    weight_ptr,  # [PARTS, N, K]
    gain_ptr,  # [K]: the gain of the norm; None without EPS
    output: Output,  # ROWS divides M if WHOLE_M
    K: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # steps whose weights are loaded ahead
    EPS: tl.constexpr,  # epsilon of the norm; None: no norm
    ONE_BLOCK: tl.constexpr,  # there are at most ROWS tokens
    EARLY_WEIGHTS: tl.constexpr,  # no previous kernel writes the weights
    JOINT_SUM: tl.constexpr,  # (tuple of tiles) -> tuple of their sums over the second axis; or None
    DEPENDENT_LAUNCH: tl.constexpr,
):
    N: tl.constexpr = output.N
    WHOLE_N: tl.constexpr = N % BLOCK_N == 0
    first_column = tl.program_id(0) * BLOCK_N
    n = first_column + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    near = clamp(n, N, WHOLE_N) - first_column
    weight_rows = weight_ptr + first_column.to(tl.int64) * K + near[:, None] * K + column[None, :]
    weights = ()
    for part in tl.static_range(PARTS):
        weights = weights + (weight_rows + part * N * K,)
    tokens, x_rows = token_rows(x_ptr, column, output.M, K, ROWS, ONE_BLOCK, output.WHOLE_M)
    gain_row = None
    squares = ()
    if EPS is not None:
        gain_row = gain_ptr + column
        for _ in tl.static_range(ROWS):
            squares = squares + (tl.zeros([BLOCK_K], tl.float32),)
    if not EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    ahead = ()
    for step in tl.static_range(AHEAD):
        ahead = ahead + load_weights(weights, step * BLOCK_K, column, K, BLOCK_K, PARTS)
    if EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    extras = ()
    for row in tl.static_range(ROWS):
        extras = extras + (load_extras_at(output, tokens[row], n, WHOLE_N),)
    sums, squares = stream(
        weights, ahead, x_rows, gain_row, squares, column, K, PARTS, ROWS, BLOCK_N, BLOCK_K, AHEAD, EPS
    )  # fmt: skip
    sums = reduce_columns(sums, JOINT_SUM)
    if EPS is not None:
        sums = scale_rows(sums, squares, K, PARTS, ROWS, EPS)
    for row in tl.static_range(ROWS):
        store_epilogue(output, sums[row * PARTS : (row + 1) * PARTS], extras[row], tokens[row], n, WHOLE_N)
