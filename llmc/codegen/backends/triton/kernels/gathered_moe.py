"""The products of a mixture's experts for few tokens, as streams of weight rows, without tensor cores and sorting.

Pair p is choice p % CHOICES of token p // CHOICES, and its expert is idx[p]. A program of the first product computes
BLOCK_N columns of both parts for one pair, as `gemv` does for one token. A program of the second one computes BLOCK_N
columns of a token's result: it streams the weights of all chosen experts one after the other into the same sums.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.gemv import load_weights, reduce_columns, scale_rows, stream
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def moe_gather_up(
    x_ptr,  # [tokens, K]
    idx_ptr,  # [tokens, CHOICES]
    weight_ptr,  # [EXPERTS, 2, N, K]: gate, up
    gain_ptr,  # [K]: the gain of the norm; None without EPS
    bias_ptr,  # [EXPERTS, 2, N], or None
    out_ptr,  # [tokens * CHOICES, N]
    CHOICES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # steps whose weights are loaded ahead
    EPS: tl.constexpr,  # epsilon of the norm; None: no norm
    JOINT_SUM: tl.constexpr,  # (tuple of tiles) -> tuple of their sums over the second axis; or None
    EPILOGUE: tl.constexpr,  # ((gate, up)) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """EPILOGUE of the first two products of one pair, BLOCK_N columns."""
    pair = tl.program_id(1).to(tl.int64)
    first_column = tl.program_id(0) * BLOCK_N
    n = first_column + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    place = clamp(n, N, N % BLOCK_N == 0)[:, None] * K + column[None, :]
    wait_for_previous(DEPENDENT_LAUNCH)
    expert = tl.load(idx_ptr + pair).to(tl.int64)
    rows = weight_ptr + expert * (2 * N * K) + place
    weights = (rows, rows + N * K)
    ahead = ()
    for step in tl.static_range(AHEAD):
        ahead = ahead + load_weights(weights, step * BLOCK_K, column, K, BLOCK_K, 2)
    gain_row = None
    squares = ()
    if EPS is not None:
        gain_row = gain_ptr + column
        squares = (tl.zeros([BLOCK_K], tl.float32),)
    x_rows = (x_ptr + pair // CHOICES * K + column,)
    sums, squares = stream(weights, ahead, x_rows, gain_row, squares, column, K, 2, 1, BLOCK_N, BLOCK_K, AHEAD, EPS)
    sums = reduce_columns(sums, JOINT_SUM)
    if EPS is not None:
        sums = scale_rows(sums, squares, K, 2, 1, EPS)
    gate, up = sums[0], sums[1]
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * N) + n
        gate += tl.load(bias, mask=n < N, other=0).to(tl.float32)
        up += tl.load(bias + N, mask=n < N, other=0).to(tl.float32)
    out = EPILOGUE((gate, up))
    tl.store(out_ptr + pair * N + n, out.to(out_ptr.dtype.element_ty), mask=bound(n, N, N % BLOCK_N == 0))


@triton.jit
def step_weights(
    weight_ptr, idx_ptr, place, step, column, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Load the weights [BLOCK_N, BLOCK_K] of a step; steps go through the choices, each along K."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    expert = tl.load(idx_ptr + step // STEPS).to(tl.int64)
    rows = weight_ptr + expert * (N * K) + place
    return load_weights((rows,), step % STEPS * BLOCK_K, column, K, BLOCK_K, 1)


@triton.jit
def step_factors(x_ptr, scale_ptr, step, column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load (x [BLOCK_K], the routing weight) of a step."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    choice, k = step // STEPS, step % STEPS * BLOCK_K
    x = tl.load(x_ptr + choice * K + k + column, mask=bound(column, K - k, K % BLOCK_K == 0), other=0.0)
    return (x, tl.load(scale_ptr + choice))


@triton.jit
def add_choice(sums, weights, x, scale):
    """Return the sums after a step."""
    factor = x.to(tl.float32) * scale.to(tl.float32)
    return sums + weights.to(tl.float32) * factor[None, :]


@triton.jit
def moe_gather_down(
    x_ptr,  # [tokens * CHOICES, K]
    idx_ptr,  # [tokens, CHOICES]
    weight_ptr,  # [EXPERTS, N, K]
    scale_ptr,  # [tokens, CHOICES]: the routing weight of each pair
    residual_ptr,  # [tokens, N]
    bias_ptr,  # [EXPERTS, N], or None
    out_ptr,  # [tokens, N]
    CHOICES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # steps whose factors are loaded ahead
    EARLY_WEIGHTS: tl.constexpr,  # the previous kernel writes neither the weights nor idx
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The residual and the weighted results of a token's experts, BLOCK_N columns."""
    TOTAL: tl.constexpr = CHOICES * ((K + BLOCK_K - 1) // BLOCK_K)
    token = tl.program_id(1).to(tl.int64)
    first_column = tl.program_id(0) * BLOCK_N
    n = first_column + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    inside = bound(n, N, N % BLOCK_N == 0)
    place = clamp(n, N, N % BLOCK_N == 0)[:, None] * K + column[None, :]
    x_ptr += token * (CHOICES * K)
    idx_ptr += token * CHOICES
    scale_ptr += token * CHOICES
    if not EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    weights, factors = (), ()
    for step in tl.static_range(AHEAD):
        weights = weights + step_weights(weight_ptr, idx_ptr, place, step, column, N, K, BLOCK_K)
    if EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    for step in tl.static_range(AHEAD):
        factors = factors + step_factors(x_ptr, scale_ptr, step, column, K, BLOCK_K)
    residual = tl.load(residual_ptr + token * N + n, mask=inside, other=0).to(tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in range(AHEAD, TOTAL):
        sums = add_choice(sums, weights[0], factors[0], factors[1])
        weights = weights[1:] + step_weights(weight_ptr, idx_ptr, place, step, column, N, K, BLOCK_K)
        factors = factors[2:] + step_factors(x_ptr, scale_ptr, step, column, K, BLOCK_K)
    for step in tl.static_range(AHEAD):
        sums = add_choice(sums, weights[step], factors[2 * step], factors[2 * step + 1])
    out = residual + tl.sum(sums, axis=1)
    if bias_ptr is not None:
        for choice in range(CHOICES):
            expert = tl.load(idx_ptr + choice).to(tl.int64)
            bias = tl.load(bias_ptr + expert * N + n, mask=inside, other=0).to(tl.float32)
            out += bias * tl.load(scale_ptr + choice).to(tl.float32)
    tl.store(out_ptr + token * N + n, out.to(out_ptr.dtype.element_ty), mask=inside)
