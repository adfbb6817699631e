"""Linear layers of few tokens as streams of quantised weight rows, multiplied in float32 without tensor cores.

out = epilogue(x @ w[0].T, .., x @ w[PARTS - 1].T, extras) with w = (code - zero) * scale. A tile of bytes is [CHUNKS,
BLOCK_N, CHUNK]: a thread multiplies whole chunks, and neighbouring threads have neighbouring chunks of a row. The sums
of a chunk are scaled with the zero points subtracted: sum((code - zero) * x) = sum((code + BASE) * x) - (zero + BASE) *
sum(x), where BASE is what the conversion of codes to float32 adds. The codes of the first step are loaded before the
wait for the previous kernel, and every step loads the codes of the next one. Sums over chunks are reduced once, at the
end.

Tuples have one element per part, or one per token and part at index `token * PARTS + part`.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.product_output import Output, store_product
from llmc.codegen.backends.triton.kernels.quantized_codes import WeightCodes, byte_floats, nibble_floats
from llmc.codegen.backends.triton.kernels.tile_masks import bound, clamp


@triton.jit
def load_codes(code_tiles, byte, at, LENGTH: tl.constexpr, STEP: tl.constexpr):
    """Load the bytes of every part from `at` on; zeros past the end. They are read only once: evict them first."""
    loaded = ()
    for part in tl.static_range(len(code_tiles)):
        mask = bound(byte, LENGTH - at, LENGTH % STEP == 0)
        loaded = loaded + (tl.load(code_tiles[part] + at, mask=mask, other=0, eviction_policy="evict_first"),)
    return loaded


@triton.jit
def block_values(codes: WeightCodes, row, column, inside, ROWS: tl.constexpr, BASE: tl.constexpr):
    """Return the scales of the blocks of `column`, and their zero points plus BASE, in float32."""
    at = column // codes.GROUP * ROWS + row
    scale = tl.load(codes.scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if codes.zero_ptr is None:
        return scale, codes.ZERO_POINT + BASE
    else:
        return scale, tl.load(codes.zero_ptr + at, mask=inside, other=0).to(tl.float32) + BASE


@triton.jit
def add_nibbles(
    codes: WeightCodes, sums, packed, x_rows, rows, at, byte, chunk, N: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Return the sums [CHUNKS, BLOCK_N] after the bytes from `at` on, each with two codes."""
    K: tl.constexpr = codes.K
    PARTS: tl.constexpr = codes.PARTS
    HALF: tl.constexpr = codes.HALF
    BASE: tl.constexpr = 128 if codes.ASSEMBLY else 0
    WHOLE: tl.constexpr = (K // 2) % STEP == 0
    JOINT: tl.constexpr = codes.GROUP % (2 * HALF) == 0  # both codes of a byte are in one block
    inside = bound(byte, K // 2 - at, WHOLE)
    column = (at + byte) + (at + byte) // HALF * HALF  # the bytes of earlier spans hold two columns each
    x_low, x_high, low_totals, high_totals = (), (), (), ()
    for row in tl.static_range(ROWS):
        low = tl.load(x_rows[row] + column, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(x_rows[row] + (column + HALF), mask=inside, other=0.0).to(tl.float32)
        x_low, x_high = x_low + (low,), x_high + (high,)
        if JOINT:
            low_totals = low_totals + (tl.sum(low + high, axis=2),)
        else:
            low_totals, high_totals = low_totals + (tl.sum(low, axis=2),), high_totals + (tl.sum(high, axis=2),)
    first = (at + chunk) + (at + chunk) // HALF * HALF
    exists = bound(chunk, K // 2 - at, WHOLE)
    factors = ()
    for part in tl.static_range(PARTS):
        values = block_values(codes, rows[part], first, exists, PARTS * N, BASE)
        if not JOINT:
            values = values + block_values(codes, rows[part], first + HALF, exists, PARTS * N, BASE)
        factors = factors + (nibble_floats(packed[part], codes.ASSEMBLY) + values,)
    added = ()
    for row in tl.static_range(ROWS):
        for part in tl.static_range(PARTS):
            w = factors[part]
            if JOINT:
                products = tl.sum(w[0] * x_low[row] + w[1] * x_high[row], axis=2)
                added = added + (sums[row * PARTS + part] + (products - w[3] * low_totals[row]) * w[2],)
            else:
                low = (tl.sum(w[0] * x_low[row], axis=2) - w[3] * low_totals[row]) * w[2]
                high = (tl.sum(w[1] * x_high[row], axis=2) - w[5] * high_totals[row]) * w[4]
                added = added + (sums[row * PARTS + part] + low + high,)
    return added


@triton.jit
def add_bytes(codes: WeightCodes, sums, packed, x_rows, at, byte, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Return the sums [CHUNKS, BLOCK_N] after the bytes from `at` on, each a signed code; without scales."""
    K: tl.constexpr = codes.K
    PARTS: tl.constexpr = codes.PARTS
    BASE: tl.constexpr = 32896.0 if codes.ASSEMBLY else 0.0
    factors = ()
    for part in tl.static_range(PARTS):
        factors = factors + (byte_floats(packed[part], codes.ASSEMBLY),)
    added = ()
    for row in tl.static_range(ROWS):
        mask = bound(byte, K - at, K % STEP == 0)
        x = tl.load(x_rows[row] + (at + byte), mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(x, axis=2) * BASE
        for part in tl.static_range(PARTS):
            added = added + (sums[row * PARTS + part] + (tl.sum(factors[part] * x, axis=2) - total),)
    return added


@triton.jit
def sum_rows(
    sums, scale_ptr, row, N: tl.constexpr, PARTS: tl.constexpr, NIBBLES: tl.constexpr, JOINT_SUM: tl.constexpr
):
    """Return the totals of all sums over their chunks; without NIBBLES, scaled. row: rows of a part."""
    if JOINT_SUM is not None:
        totals = JOINT_SUM(sums)
    else:
        totals = ()
        for i in tl.static_range(len(sums)):
            totals = totals + (tl.sum(sums[i], axis=0),)
    if NIBBLES:
        return totals
    else:
        scaled = ()
        for i in tl.static_range(len(sums)):
            scaled = scaled + (totals[i] * tl.load(scale_ptr + row + i % PARTS * N).to(tl.float32),)
        return scaled


@triton.jit
def rows_of_tokens(x_ptr, output: Output, K: tl.constexpr, ROWS: tl.constexpr):
    """Return pointers to the tokens of this program; those past the end are the last."""
    x_rows = ()
    for row in tl.static_range(ROWS):
        token = tl.cast(tl.program_id(1) * ROWS + row, tl.int64)
        x_rows = x_rows + (x_ptr + clamp(token, output.M, output.WHOLE_M) * K,)
    return x_rows


@triton.jit
def quantized_gemv(
    x_ptr,  # [M, K]
    codes: WeightCodes,
    output: Output,  # ROWS divides M if WHOLE_M
    ROWS: tl.constexpr,  # tokens of a program
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,  # bytes of a row in a step
    CHUNK: tl.constexpr,  # bytes of a chunk
    EARLY_WEIGHTS: tl.constexpr,  # no previous kernel writes the codes
    JOINT_SUM: tl.constexpr,  # (tuple of tiles) -> tuple of their sums over the first axis; or None
    DEPENDENT_LAUNCH: tl.constexpr,
):
    N: tl.constexpr = output.N
    K: tl.constexpr = codes.K
    PARTS: tl.constexpr = codes.PARTS
    WHOLE_N: tl.constexpr = N % BLOCK_N == 0
    LENGTH: tl.constexpr = K // 2 if codes.HALF else K  # bytes of a row
    CHUNKS: tl.constexpr = STEP // CHUNK
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = clamp(n, N, WHOLE_N)
    byte = tl.arange(0, CHUNKS)[:, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    chunk = tl.arange(0, CHUNKS)[:, None] * CHUNK
    code_tiles, rows, sums = (), (), ()
    for part in tl.static_range(PARTS):
        code_tiles = code_tiles + (codes.code_ptr + (near.to(tl.int64) + part * N)[None, :, None] * LENGTH + byte,)
        rows = rows + ((near + part * N)[None, :],)
    for _ in tl.static_range(ROWS * PARTS):
        sums = sums + (tl.zeros([CHUNKS, BLOCK_N], tl.float32),)
    x_rows = rows_of_tokens(x_ptr, output, K, ROWS)
    if not EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    packed = load_codes(code_tiles, byte, 0, LENGTH, STEP)
    if EARLY_WEIGHTS:
        wait_for_previous(DEPENDENT_LAUNCH)
    for at in tl.static_range(0, LENGTH, STEP):
        ahead = packed
        if at + STEP < LENGTH:
            ahead = load_codes(code_tiles, byte, at + STEP, LENGTH, STEP)
        if codes.HALF:
            sums = add_nibbles(codes, sums, packed, x_rows, rows, at, byte, chunk, N, ROWS, STEP)
        else:
            sums = add_bytes(codes, sums, packed, x_rows, at, byte, ROWS, STEP)
        packed = ahead
    totals = sum_rows(sums, codes.scale_ptr, near, N, PARTS, codes.HALF > 0, JOINT_SUM)
    for row in tl.static_range(ROWS):
        token = tl.cast(tl.program_id(1) * ROWS + row, tl.int64)
        store_product(output, totals[row * PARTS : (row + 1) * PARTS], token, n, WHOLE_N)
