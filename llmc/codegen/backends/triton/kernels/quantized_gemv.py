"""Linear layers of few tokens as streams of quantised weight rows, multiplied in float32 without tensor cores.

out = epilogue(x @ w[0].T, .., x @ w[PARTS - 1].T, extras) with w = (code - zero) * scale. A tile of bytes is [BLOCK_N
rows, SPANS, WIDTH]: the bytes of a span share their scales. The codes of the first step are loaded before the wait for
the previous kernel, and every step loads the codes of the next one. Sums are reduced once, at the end.

Tuples have one element per part, or one per token and part at index `token * PARTS + part`.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.quantized_codes import high_codes, low_codes
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def load_codes(code_tiles, byte, at, LENGTH: tl.constexpr, PARTS: tl.constexpr):
    """Load the bytes of every part from `at` on; zeros past the end. They are read only once: evict them first."""
    loaded = ()
    for part in tl.static_range(PARTS):
        tile = tl.load(code_tiles[part] + at, mask=byte < LENGTH - at, other=0, eviction_policy="evict_first")
        loaded = loaded + (tile,)
    return loaded


@triton.jit
def scaled_codes(
    packed,
    scale_ptr,
    zero_ptr,
    row,
    first,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
):
    """Return the weights of a tile's low and high codes in float32. first: the first column of each span."""
    inside = first < K
    at = row + first // GROUP
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    zero = None if zero_ptr is None else tl.load(zero_ptr + at, mask=inside, other=0).to(tl.int8)
    low = low_codes(packed, zero, ZERO_POINT).to(tl.float32) * scale
    if GROUP % (2 * WIDTH) != 0:  # the high codes are in another block
        at = row + (first + WIDTH) // GROUP
        scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
        zero = None if zero_ptr is None else tl.load(zero_ptr + at, mask=inside, other=0).to(tl.int8)
    return low, high_codes(packed, zero, ZERO_POINT).to(tl.float32) * scale


@triton.jit
def add_tile(
    sums,
    packed,
    x_rows,
    scale_ptr,
    zero_ptr,
    rows,
    at,
    span,
    byte,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPANS: tl.constexpr,
    WIDTH: tl.constexpr,
    NIBBLES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO_POINT: tl.constexpr,
):
    """Return the sums after the bytes from `at` on."""
    first = 2 * (at + span * WIDTH)
    inside = byte < (K // 2 if NIBBLES else K) - at
    low, high = (), ()
    for part in tl.static_range(PARTS):
        if NIBBLES:
            a, b = scaled_codes(packed[part], scale_ptr, zero_ptr, rows[part], first, K, WIDTH, GROUP, ZERO_POINT)
            low, high = low + (a,), high + (b,)
        else:
            low = low + (packed[part].to(tl.float32),)
    added = ()
    for row in tl.static_range(ROWS):
        if NIBBLES:
            column = byte + span * WIDTH + 2 * at  # the bytes of earlier spans hold two columns each
            x = tl.load(x_rows[row] + column, mask=inside, other=0.0).to(tl.float32)
            x_high = tl.load(x_rows[row] + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_rows[row] + byte + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(PARTS):
            total = sums[row * PARTS + part] + low[part] * x
            if NIBBLES:
                total += high[part] * x_high
            added = added + (total,)
    return added


@triton.jit
def sum_rows(sums, scale_ptr, row, first: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, NIBBLES: tl.constexpr):
    """Return the totals of each part from the tiles `first` and on; without NIBBLES, scaled. row: rows of a part."""
    totals = ()
    for part in tl.static_range(PARTS):
        total = tl.sum(tl.sum(sums[first + part], axis=2), axis=1)
        if not NIBBLES:
            total *= tl.load(scale_ptr + row + part * N).to(tl.float32)
        totals = totals + (total,)
    return totals


@triton.jit
def quantized_gemv(
    x_ptr,  # [M, K]
    code_ptr,  # [PARTS, N, K], or bytes [PARTS, N, K // 2] with NIBBLES
    scale_ptr,  # [PARTS, N, BLOCKS]
    zero_ptr,  # [PARTS, N, BLOCKS]: the zero points; None: ZERO_POINT
    out_ptr,  # [M, N]
    extra_ptrs,  # the other operands of the epilogue, as LOAD_EXTRAS takes them
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a program
    NIBBLES: tl.constexpr,  # a byte holds the codes of two columns, WIDTH apart; else one, and a row has one scale
    GROUP: tl.constexpr,  # columns that share a scale
    BLOCKS: tl.constexpr,  # scales of a row
    ZERO_POINT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPANS: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE_M: tl.constexpr,  # ROWS divides M
    EARLY_WEIGHTS: tl.constexpr,  # no previous kernel writes the codes
    LOAD_EXTRAS: tl.constexpr,  # (extra_ptrs, token, columns, token mask, column mask) -> tuple
    EPILOGUE: tl.constexpr,  # (sums of each part, extras) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    WHOLE_N: tl.constexpr = N % BLOCK_N == 0
    LENGTH: tl.constexpr = K // 2 if NIBBLES else K  # bytes of a row
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = clamp(n, N, WHOLE_N).to(tl.int64)[:, None, None]
    span = tl.arange(0, SPANS)[None, :, None]
    byte = span * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    code_tiles, rows, sums, x_rows = (), (), (), ()
    for part in tl.static_range(PARTS):
        code_tiles = code_tiles + (code_ptr + (near + part * N) * LENGTH + byte,)
        rows = rows + ((near + part * N) * BLOCKS,)
    for row in tl.static_range(ROWS):
        token = tl.cast(tl.program_id(1) * ROWS + row, tl.int64)
        x_rows = x_rows + (x_ptr + clamp(token, M, WHOLE_M) * K,)
        for _ in tl.static_range(PARTS):
            sums = sums + (tl.zeros([BLOCK_N, SPANS, WIDTH], tl.float32),)
    if not EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    packed = load_codes(code_tiles, byte, 0, LENGTH, PARTS)
    if EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    for at in range(0, LENGTH, SPANS * WIDTH):
        ahead = load_codes(code_tiles, byte, at + SPANS * WIDTH, LENGTH, PARTS)
        sums = add_tile(
            sums, packed, x_rows, scale_ptr, zero_ptr, rows, at, span, byte, K, PARTS, ROWS, SPANS, WIDTH, NIBBLES,
            GROUP, ZERO_POINT,
        )  # fmt: skip
        packed = ahead
    near = clamp(n, N, WHOLE_N).to(tl.int64)
    for row in tl.static_range(ROWS):
        token = tl.cast(tl.program_id(1) * ROWS + row, tl.int64)
        token_mask, column_mask = bound(token, M, WHOLE_M), bound(n, N, WHOLE_N)
        extras = LOAD_EXTRAS(extra_ptrs, token, n, token_mask, column_mask)
        out = EPILOGUE(sum_rows(sums, scale_ptr, near, row * PARTS, N, PARTS, NIBBLES), extras)
        tl.store(out_ptr + (token * N + n), out.to(out_ptr.dtype.element_ty), mask=token_mask & column_mask)
