"""Decode attention from a QKV product: norms, rotation, the append to the KV pool and attention in one launch.

A program computes one token and one key head, as in `decode_attention`. It rotates the query heads that share the key
head, and its new key and value, itself. The program whose keys include the token's own position appends these to the
pool, and attends to them from registers; no program reads them from the pool. The first tile of keys and values is
loaded before the token is used, so that both latencies overlap.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.decode_attention import attend, find_row, key_range, store_heads
from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import softmax_add_key, softmax_start, softmax_tile
from llmc.codegen.backends.triton.kernels.paged_kv import (
    head_mask,
    head_scales,
    key_offsets,
    load_keys_values,
    load_pages,
    to_factor,
    to_pool,
)
from llmc.codegen.backends.triton.kernels.rope import rounded


@triton.jit
def rotated_heads(
    heads,
    exists,
    gain_ptr,
    cos_ptr,
    sin_ptr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPS: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
):
    """Load the heads at the pointers `heads` [ROWS], normalized and rotated: [ROWS, HEAD_DIM_PADDED] in float32.

    Heads for which the mask `exists` [ROWS] is false are zeros. cos_ptr and sin_ptr point to the token's angles
    [PAIRS]; without them nothing is rotated, and without gain_ptr [HEAD_DIM] nothing is normalized. Every column is
    loaded with its partner, the other column of its pair.
    """
    column = tl.arange(0, HEAD_DIM_PADDED)
    mask = exists[:, None] & head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    paired = column < 2 * PAIRS
    if INTERLEAVED:
        first = column % 2 == 0
        pair, partner = column // 2, column + tl.where(first, 1, -1)
    else:
        first = column < PAIRS
        pair, partner = tl.where(first, column, column - PAIRS), tl.where(first, column + PAIRS, column - PAIRS)
    partner = tl.where(paired, partner, column)
    x = tl.load(heads[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(heads[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        inside = column < HEAD_DIM
        gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
        other_gain = tl.load(gain_ptr + partner, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) * (1 / HEAD_DIM) + EPS)[:, None]
        x = rounded(x * scale * gain[None, :], ROUND_DTYPE)
        other = rounded(other * scale * other_gain[None, :], ROUND_DTYPE)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + pair, mask=paired, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + pair, mask=paired, other=0.0).to(tl.float32)
        x = x * cos[None, :] + other * tl.where(first, -sin, sin)[None, :]
    return rounded(x, ROUND_DTYPE)


@triton.jit
def load_token(
    qkv_ptr,
    token,
    kv_head,
    query_gain_ptr,
    key_gain_ptr,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EPS: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
):
    """Return the token's queries [QUERY_ROWS, HEAD_DIM_PADDED] of a key head, its key and its value, each [1, ..]."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    member, one = tl.arange(0, QUERY_ROWS), tl.arange(0, 1)
    heads = qkv_ptr + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    if cos_ptr is not None:
        cos_ptr += token * PAIRS
        sin_ptr += token * PAIRS
    query = rotated_heads(
        heads + (kv_head * GROUP + member) * HEAD_DIM, member < GROUP, query_gain_ptr, cos_ptr, sin_ptr,
        HEAD_DIM, HEAD_DIM_PADDED, PAIRS, INTERLEAVED, EPS, ROUND_DTYPE,
    )  # fmt: skip
    key = rotated_heads(
        heads + (HEADS + kv_head + one) * HEAD_DIM, one == 0, key_gain_ptr, cos_ptr, sin_ptr,
        HEAD_DIM, HEAD_DIM_PADDED, PAIRS, INTERLEAVED, EPS, ROUND_DTYPE,
    )  # fmt: skip
    value = rotated_heads(
        heads + (HEADS + KV_HEADS + kv_head + one) * HEAD_DIM, one == 0, None, None, None,
        HEAD_DIM, HEAD_DIM_PADDED, 0, False, EPS, ROUND_DTYPE,
    )  # fmt: skip
    return query, key, value


@triton.jit
def in_pool(key, value, scales_ptr, key_scale, value_scale, DTYPE: tl.constexpr):
    """Return a key and a value as the pool, whose dtype is DTYPE, holds them."""
    if scales_ptr is not None:
        key, value = to_pool(key, tl.div_rn(1.0, key_scale)), to_pool(value, tl.div_rn(1.0, value_scale))
    return key.to(DTYPE), value.to(DTYPE)


@triton.jit
def append_head(
    kv_ptr,
    page_table_ptr,
    position,
    key,
    value,
    wanted,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Store a key and a value [1, HEAD_DIM_PADDED] at `position` of a sequence, if the scalar `wanted` is true.

    `kv_ptr` points to the key head in page 0, `page_table_ptr` to the sequence's row.
    """
    page = tl.load(page_table_ptr + tl.maximum(position, 0) // PAGE, mask=wanted, other=0).to(tl.int64)
    at = kv_ptr + page * (2 * KV_HEADS * PAGE * HEAD_DIM) + tl.maximum(position, 0) % PAGE * HEAD_DIM
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = wanted & head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(at + column, key, mask=mask)
    tl.store(at + KV_HEADS * PAGE * HEAD_DIM + column, value, mask=mask)


@triton.jit
def attend_from_first(
    query,
    first_key,
    first_value,
    kv_ptr,
    page_table_ptr,
    pages,
    begin,
    end,
    length,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the softmax state after the keys from `begin` to `end`, of which the first tile is loaded.

    `pages` are those of the second tile. The other arguments are those of `attend`.
    """
    keys = begin + tl.arange(0, KEYS_PER_TILE)
    visible = keys < end
    if WINDOW:
        visible = visible & (keys >= length - WINDOW)
    running_max, running_sum, acc = softmax_start(query.shape[0], HEAD_DIM_PADDED)
    state = softmax_tile(
        query, first_key, first_value, visible[None, :], running_max, running_sum, acc, scale, SOFTCAP, DOT_DTYPE,
        INTERPRET,
    )  # fmt: skip
    return attend(
        query, state, kv_ptr, page_table_ptr, pages, begin + KEYS_PER_TILE, end, length, scale,
        KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip


@triton.jit
def rope_attention(
    qkv_ptr,  # [tokens, HEADS + 2 * KV_HEADS, HEAD_DIM]: query heads, key heads, value heads
    page_table_ptr,  # [table rows, table_width]
    rows_ptr,  # [tokens]: rows of the page table, -1 for padding
    positions_ptr,  # [tokens]: the position of each token in its sequence
    scales_ptr,  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats; None for other pools
    cos_ptr,  # [tokens, PAIRS], or None
    sin_ptr,  # [tokens, PAIRS], or None
    query_gain_ptr,  # [HEAD_DIM], or None: no norms
    key_gain_ptr,  # [HEAD_DIM], or None
    out_ptr,  # [tokens, HEADS, HEAD_DIM]; with SPLITS [tokens, HEADS, SPLITS, HEAD_DIM] in float32
    lse_ptr,  # [tokens, HEADS, SPLITS]: log of the sum of exp(logit), -inf for an empty part; None without SPLITS
    kv_ptr,  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # pairs are adjacent columns; otherwise they are PAIRS columns apart
    EPS: tl.constexpr,
    ROUND_DTYPE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query attends to, including its own; 0: all
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # HEADS // KV_HEADS, padded for tl.dot
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    TABLES_SETTLED: tl.constexpr,  # the previous kernel writes neither page table, rows nor positions
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one token and one key head, over all keys or one part of them, after the append of the token."""
    if not TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    token, kv_head = tl.program_id(0), tl.program_id(1)
    row, length = find_row(token, rows_ptr, None, positions_ptr, 0)
    begin, end = key_range(length, WINDOW, PAGE, SPLITS)
    own = (begin < end) & (end == length)  # whether this program's keys include the token's own
    stored = tl.minimum(end, length - 1)  # the end of those in the pool
    page_table_ptr += tl.maximum(row, 0).to(tl.int64) * table_width
    kv_ptr += kv_head * (PAGE * HEAD_DIM)
    keys = begin + tl.arange(0, KEYS_PER_TILE)
    pages = load_pages(page_table_ptr, keys, stored, PAGE)
    next_pages = load_pages(page_table_ptr, keys + KEYS_PER_TILE, stored, PAGE)
    if TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    first_key, first_value = load_keys_values(
        kv_ptr, key_offsets(pages, keys, KV_HEADS, PAGE, HEAD_DIM), keys < stored, KV_HEADS, PAGE, HEAD_DIM,
        HEAD_DIM_PADDED,
    )  # fmt: skip
    key_scale, value_scale = head_scales(scales_ptr, kv_head, KV_HEADS)
    query, key, value = load_token(
        qkv_ptr, token, kv_head, query_gain_ptr, key_gain_ptr, cos_ptr, sin_ptr,
        HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, QUERY_ROWS, PAIRS, INTERLEAVED, EPS, ROUND_DTYPE,
    )  # fmt: skip
    query = to_factor(query.to(qkv_ptr.dtype.element_ty), DOT_DTYPE)
    state = attend_from_first(
        query, first_key, first_value, kv_ptr, page_table_ptr, next_pages, begin, stored, length, SCALE * key_scale,
        KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip
    key, value = in_pool(key, value, scales_ptr, key_scale, value_scale, kv_ptr.dtype.element_ty)
    running_max, running_sum, acc = softmax_add_key(query, key, value, own, state, SCALE * key_scale, SOFTCAP)
    store_heads(
        out_ptr, lse_ptr, token, kv_head, running_max, running_sum, acc, value_scale,
        HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, SPLITS, QUERY_ROWS,
    )  # fmt: skip
    append_head(kv_ptr, page_table_ptr, length - 1, key, value, own, KV_HEADS, PAGE, HEAD_DIM, HEAD_DIM_PADDED)
