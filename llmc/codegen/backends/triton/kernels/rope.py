"""Rotary embeddings (Su et al. 2021, arXiv 2104.09864), and the append of keys and values to the paged KV pool.

A program computes ROWS consecutive heads of one or more tokens, and each warp has whole heads, so that the norm of a
head needs no barrier. A head consists of three blocks of columns in float32: `first` and `second` of each rotated pair
[ROWS, PAIRS_PADDED], and `rest` [ROWS, REST_PADDED], the columns from 2 * PAIRS on, which are not rotated. Blocks
without columns are never stored. All loads are issued before the first result is used.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.paged_kv import to_pool


@triton.jit
def pair_columns(PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return (columns of the first of each pair, of the second, mask of the pairs), each [1, PAIRS_PADDED]."""
    pair = tl.arange(0, PAIRS_PADDED)[None, :]
    mask = pair < PAIRS
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1, mask
    else:
        return pair, pair + PAIRS, mask


@triton.jit
def load_head(
    heads,
    rows,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load the blocks of the heads at the pointers `heads` [ROWS] for which the mask `rows` [ROWS] is true."""
    REST: tl.constexpr = HEAD_DIM - 2 * PAIRS
    first = tl.zeros([1, 1], tl.float32)
    second = tl.zeros([1, 1], tl.float32)
    rest = tl.zeros([1, 1], tl.float32)
    if PAIRS:
        first_column, second_column, mask = pair_columns(PAIRS, PAIRS_PADDED, INTERLEAVED)
        mask = rows[:, None] & mask
        first = tl.load(heads[:, None] + first_column, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(heads[:, None] + second_column, mask=mask, other=0.0).to(tl.float32)
    if REST:
        column = tl.arange(0, REST_PADDED)[None, :]
        mask = rows[:, None] & (column < REST)
        rest = tl.load(heads[:, None] + (2 * PAIRS + column), mask=mask, other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def store_head(
    heads,
    first,
    second,
    rest,
    rows,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store the blocks of the heads at the pointers `heads` [ROWS] for which the mask `rows` [ROWS] is true."""
    REST: tl.constexpr = HEAD_DIM - 2 * PAIRS
    if PAIRS:
        first_column, second_column, mask = pair_columns(PAIRS, PAIRS_PADDED, INTERLEAVED)
        mask = rows[:, None] & mask
        tl.store(heads[:, None] + first_column, first.to(heads.dtype.element_ty), mask=mask)
        tl.store(heads[:, None] + second_column, second.to(heads.dtype.element_ty), mask=mask)
    if REST:
        column = tl.arange(0, REST_PADDED)[None, :]
        mask = rows[:, None] & (column < REST)
        tl.store(heads[:, None] + (2 * PAIRS + column), rest.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def load_table(table_ptr, token, rows, PAIRS: tl.constexpr, PAIRS_PADDED: tl.constexpr):
    """Load the rows `token` [ROWS] of a table [tokens, PAIRS] in float32; zeros if the mask `rows` [ROWS] is false."""
    pair = tl.arange(0, PAIRS_PADDED)[None, :]
    mask = rows[:, None] & (pair < PAIRS)
    return tl.load(table_ptr + (token * PAIRS)[:, None] + pair, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rounded(block, ROUND_DTYPE: tl.constexpr):
    """Round float32 values to ROUND_DTYPE; the result is float32."""
    return block.to(ROUND_DTYPE).to(tl.float32)


@triton.jit
def normalize(
    first,
    second,
    rest,
    gain_first,
    gain_second,
    gain_rest,
    rows,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    EPS: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
):
    """Apply the RMS norm, rounded to ROUND_DTYPE, to the heads for which the mask `rows` [ROWS] is true."""
    if PAIRS:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if HEAD_DIM > 2 * PAIRS:
            squares += tl.sum(rest * rest, 1)
    else:
        squares = tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares * (1 / HEAD_DIM) + EPS)[:, None]
    first = tl.where(rows[:, None], rounded(first * scale * gain_first, ROUND_DTYPE), first)
    second = tl.where(rows[:, None], rounded(second * scale * gain_second, ROUND_DTYPE), second)
    rest = tl.where(rows[:, None], rounded(rest * scale * gain_rest, ROUND_DTYPE), rest)
    return first, second, rest


@triton.jit
def rotate(first, second, cos, sin, rows):
    """Rotate the pairs of the heads for which the mask `rows` [ROWS] is true."""
    turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
    return tl.where(rows[:, None], turned_first, first), tl.where(rows[:, None], turned_second, second)


@triton.jit
def store_in_pool(
    kv_ptr,
    scales_ptr,
    head,
    slot,
    first,
    second,
    rest,
    rows,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Store the blocks of heads in their slots; `head` counts the heads of keys, then those of values."""
    if scales_ptr is not None:
        inverse = tl.div_rn(1.0, tl.load(scales_ptr + head, mask=rows, other=1.0))[:, None]
        first = to_pool(first, inverse, kv_ptr.dtype.element_ty)
        second = to_pool(second, inverse, kv_ptr.dtype.element_ty)
        rest = to_pool(rest, inverse, kv_ptr.dtype.element_ty)
    pool_row = ((slot // PAGE).to(tl.int64) * (2 * KV_HEADS) + head) * PAGE + slot % PAGE
    store_head(
        kv_ptr + pool_row * HEAD_DIM, first, second, rest, rows,
        HEAD_DIM, PAIRS, PAIRS_PADDED, REST_PADDED, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def rope_append(
    qkv_ptr,  # [token_count, HEADS + 2 * KV_HEADS, HEAD_DIM]: query heads, key heads, value heads
    slots_ptr,  # [token_count]: pool slots, page * PAGE + index in the page; negative: not stored
    scales_ptr,  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats; None for other pools
    cos_ptr,  # [token_count, PAIRS], or None
    sin_ptr,  # [token_count, PAIRS], or None
    query_gain_ptr,  # [HEAD_DIM], or None: no norms
    key_gain_ptr,  # [HEAD_DIM], or None
    query_out_ptr,  # [token_count, HEADS, HEAD_DIM]
    kv_ptr,  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    token_count,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # pairs are adjacent columns; otherwise they are PAIRS columns apart
    EPS: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    GAINS_SETTLED: tl.constexpr,  # the gains are weights, which no kernel writes
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Normalize and rotate the query and key heads; store queries in query_out_ptr, keys and values in the pool."""
    if not GAINS_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // (HEADS + 2 * KV_HEADS), row % (HEADS + 2 * KV_HEADS)
    exists = token < token_count
    rotated = head < HEADS + KV_HEADS  # queries and keys
    if query_gain_ptr is not None:
        gain_first, gain_second, gain_rest = load_head(
            tl.where(head < HEADS, query_gain_ptr, key_gain_ptr), exists & rotated,
            HEAD_DIM, PAIRS, PAIRS_PADDED, REST_PADDED, INTERLEAVED,
        )  # fmt: skip
    if GAINS_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    slot = tl.load(slots_ptr + token, mask=exists, other=-1)
    heads = qkv_ptr + row.to(tl.int64) * HEAD_DIM
    first, second, rest = load_head(heads, exists, HEAD_DIM, PAIRS, PAIRS_PADDED, REST_PADDED, INTERLEAVED)
    if cos_ptr is not None:
        cos = load_table(cos_ptr, token, exists & rotated, PAIRS, PAIRS_PADDED)
        sin = load_table(sin_ptr, token, exists & rotated, PAIRS, PAIRS_PADDED)
    if query_gain_ptr is not None:
        first, second, rest = normalize(
            first, second, rest, gain_first, gain_second, gain_rest, rotated, HEAD_DIM, PAIRS, EPS, ROUND_DTYPE
        )
    if cos_ptr is not None:
        first, second = rotate(first, second, cos, sin, rotated)
    first, second, rest = rounded(first, ROUND_DTYPE), rounded(second, ROUND_DTYPE), rounded(rest, ROUND_DTYPE)
    store_head(
        query_out_ptr + (token.to(tl.int64) * HEADS + head) * HEAD_DIM, first, second, rest, exists & (head < HEADS),
        HEAD_DIM, PAIRS, PAIRS_PADDED, REST_PADDED, INTERLEAVED,
    )  # fmt: skip
    store_in_pool(
        kv_ptr, scales_ptr, head - HEADS, slot, first, second, rest, exists & (head >= HEADS) & (slot >= 0),
        KV_HEADS, PAGE, HEAD_DIM, PAIRS, PAIRS_PADDED, REST_PADDED, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def rope(
    x_ptr,  # [token_count, HEADS, HEAD_DIM]
    cos_ptr,  # [token_count, PAIRS]
    sin_ptr,  # [token_count, PAIRS]
    out_ptr,  # [token_count, HEADS, HEAD_DIM]; may be x_ptr
    token_count,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Rotate all heads."""
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    exists = token < token_count
    offset = row.to(tl.int64) * HEAD_DIM
    first, second, rest = load_head(x_ptr + offset, exists, HEAD_DIM, PAIRS, PAIRS_PADDED, REST_PADDED, INTERLEAVED)
    cos = load_table(cos_ptr, token, exists, PAIRS, PAIRS_PADDED)
    sin = load_table(sin_ptr, token, exists, PAIRS, PAIRS_PADDED)
    first, second = rotate(first, second, cos, sin, exists)
    store_head(out_ptr + offset, first, second, rest, exists, HEAD_DIM, PAIRS, PAIRS_PADDED, REST_PADDED, INTERLEAVED)


@triton.jit
def kv_append(
    key_ptr,  # [token_count, KV_HEADS, HEAD_DIM]
    value_ptr,  # [token_count, KV_HEADS, HEAD_DIM]
    slots_ptr,  # [token_count]: pool slots, page * PAGE + index in the page; negative: not stored
    scales_ptr,  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats; None for other pools
    kv_ptr,  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    token_count,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Store keys and values in the pool."""
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // KV_HEADS, row % KV_HEADS
    exists = token < token_count
    slot = tl.load(slots_ptr + token, mask=exists, other=-1)
    pool_row = (slot // PAGE).to(tl.int64) * (2 * KV_HEADS * PAGE) + head * PAGE + slot % PAGE
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = exists[:, None] & (column < HEAD_DIM)
    stored = (exists & (slot >= 0))[:, None] & (column < HEAD_DIM)
    key = tl.load((key_ptr + row.to(tl.int64) * HEAD_DIM)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load((value_ptr + row.to(tl.int64) * HEAD_DIM)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    if scales_ptr is not None:
        key_scale = tl.load(scales_ptr + head, mask=exists, other=1.0)
        value_scale = tl.load(scales_ptr + KV_HEADS + head, mask=exists, other=1.0)
        key = to_pool(key, tl.div_rn(1.0, key_scale)[:, None], kv_ptr.dtype.element_ty)
        value = to_pool(value, tl.div_rn(1.0, value_scale)[:, None], kv_ptr.dtype.element_ty)
    keys_ptr = kv_ptr + pool_row * HEAD_DIM
    tl.store(keys_ptr[:, None] + column, key.to(kv_ptr.dtype.element_ty), mask=stored)
    values_ptr = kv_ptr + (pool_row + KV_HEADS * PAGE) * HEAD_DIM
    tl.store(values_ptr[:, None] + column, value.to(kv_ptr.dtype.element_ty), mask=stored)


@triton.jit
def rope_tables(
    frequencies_ptr,  # [PAIRS]
    positions_ptr,  # [token_count]
    cos_ptr,  # [token_count, PAIRS]
    sin_ptr,  # [token_count, PAIRS]
    pairs,
    elements,  # token_count * pairs
    SCALING: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """cos and sin of positions times frequencies, multiplied by SCALING. tl.cos reduces large angles exactly."""
    wait_for_previous(DEPENDENT_LAUNCH)
    element = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = element < elements
    position = tl.load(positions_ptr + element // pairs, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + element % pairs, mask=mask, other=0.0).to(tl.float32)
    tl.store(cos_ptr + element, (tl.cos(angle) * SCALING).to(cos_ptr.dtype.element_ty), mask=mask)
    tl.store(sin_ptr + element, (tl.sin(angle) * SCALING).to(sin_ptr.dtype.element_ty), mask=mask)
