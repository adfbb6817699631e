"""Decode attention: every query token attends to the paged keys of its sequence.

A program computes one token and one key head. The query heads that share the key head are the rows of its tensor-core
products. With SPLITS, a program processes one of SPLITS parts of the keys, and `combine_splits` combines the parts, as
in flash decoding (Dao et al. 2023).
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous, wait_or_launch
from llmc.codegen.backends.triton.kernels.online_softmax import (
    LOG2_E,
    LOWEST,
    softmax_add_sink,
    softmax_lse,
    softmax_mean,
    softmax_start,
    softmax_tile,
)
from llmc.codegen.backends.triton.kernels.paged_kv import (
    AttentionOptions,
    KeyPool,
    head_mask,
    head_scales,
    key_offsets,
    load_keys_values,
    load_pages,
    to_factor,
)

NEVER = tl.constexpr(2**31 - 1)
ROWS_PER_STEP = tl.constexpr(128)  # rows that `find_row` compares at once


@triton.jit
def find_row(token, rows_ptr, starts_ptr, positions_ptr, row_count):
    """Return (row of the page table, number of keys) of `token`; padding has row -1 and no keys.

    If starts_ptr is None, rows_ptr contains the row of each token. Otherwise row i of the batch has the tokens from
    starts[i] to starts[i + 1], so the index of the token's row is the number of rows that end at or before the token.
    """
    if starts_ptr is None:
        row = tl.load(rows_ptr + token)
        position = tl.load(positions_ptr + token)
    else:
        position = tl.load(positions_ptr + token)  # loaded before the search, which hides the latency
        index = token * 0
        for first in range(0, row_count, ROWS_PER_STEP):
            candidate = first + tl.arange(0, ROWS_PER_STEP)
            ends = tl.load(starts_ptr + 1 + candidate, mask=candidate < row_count, other=NEVER)
            index += tl.sum((ends <= token).to(tl.int32))
        row = tl.load(rows_ptr + index, mask=index < row_count, other=-1)
    return row, tl.where(row >= 0, position + 1, 0)


@triton.jit
def key_range(length, WINDOW: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr):
    """Return (begin, end) of this program's keys in a sequence of `length` tokens; `begin` is the start of a page.

    A sequence is split into parts of whole pages; the last parts may be empty.
    """
    first_page = 0
    if WINDOW:
        first_page = tl.maximum(length - WINDOW, 0) // PAGE
    end = length
    if SPLITS:
        pages_per_split = ((length + (PAGE - 1)) // PAGE - first_page + (SPLITS - 1)) // SPLITS
        first_page = first_page + tl.program_id(2) * pages_per_split
        end = tl.minimum(length, (first_page + pages_per_split) * PAGE)
    return first_page * PAGE, end


@triton.jit
def attend(query, pool: KeyPool, options: AttentionOptions, pages, begin, end, length):
    """Return the softmax state of the last token of a sequence of `length` tokens after the keys from `begin` to `end`.

    `query` has one row per query head, and `pages` are the pages of the first tile.
    """
    state = softmax_start(query.shape[0], pool.HEAD_DIM_PADDED)
    for tile in range(begin, end, options.KEYS_PER_TILE):
        keys = tile + tl.arange(0, options.KEYS_PER_TILE)
        offsets = key_offsets(pool, pages, keys)
        pages = load_pages(pool.page_table_ptr, keys + options.KEYS_PER_TILE, end, pool.PAGE)
        visible = keys < end
        if options.WINDOW:
            visible = visible & (keys >= length - options.WINDOW)
        key, value = load_keys_values(pool, offsets, visible)
        state = softmax_tile(
            query, key, value, visible[None, :], state, options.scale, options.SOFTCAP, options.DOT_DTYPE,
            options.INTERPRET,
        )  # fmt: skip
    return state


@triton.jit
def paged_decode(
    query_ptr,  # [tokens, HEADS, HEAD_DIM]
    kv_ptr,  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    page_table_ptr,  # [table rows, table_width]
    rows_ptr,  # [row_count]: rows of the page table, -1 for padding; with SPLITS [tokens]
    starts_ptr,  # [row_count + 1]: the first token of each row; None with SPLITS
    positions_ptr,  # [tokens]: the position of each token in its sequence
    scales_ptr,  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats; None for other pools
    sinks_ptr,  # [HEADS], or None
    out_ptr,  # [tokens, HEADS, HEAD_DIM]; with SPLITS [tokens, HEADS, SPLITS, HEAD_DIM] in float32
    lse_ptr,  # [tokens, HEADS, SPLITS]: log of the sum of exp(logit), -inf for an empty part; None without SPLITS
    row_count,
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query attends to, including its own; 0: all
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # HEADS // KV_HEADS, padded for tl.dot
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    TABLES_SETTLED: tl.constexpr,  # the previous kernel writes neither page table, rows, starts nor positions
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one token and one key head, over all keys or one part of them."""
    if not TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    token, kv_head = tl.program_id(0), tl.program_id(1)
    row, length = find_row(token, rows_ptr, starts_ptr, positions_ptr, row_count)
    begin, end = key_range(length, WINDOW, PAGE, SPLITS)
    page_table_ptr += tl.maximum(row, 0).to(tl.int64) * table_width
    first_pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, PAGE)
    if TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    key_scale, value_scale = head_scales(scales_ptr, kv_head, KV_HEADS)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_ptr += kv_head * (PAGE * HEAD_DIM)
    member = tl.arange(0, QUERY_ROWS)
    head = token.to(tl.int64) * HEADS + kv_head * GROUP + member
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (member < GROUP)[:, None] & head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    query = tl.load(query_ptr + (head * HEAD_DIM)[:, None] + column, mask=mask, other=0.0)
    state = attend(
        to_factor(query, DOT_DTYPE), KeyPool(kv_ptr, page_table_ptr, KV_HEADS, PAGE, HEAD_DIM, HEAD_DIM_PADDED),
        AttentionOptions(SCALE * key_scale, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE, INTERPRET), first_pages, begin,
        end, length,
    )  # fmt: skip
    if sinks_ptr is not None:
        state = softmax_add_sink(state, tl.load(sinks_ptr + kv_head * GROUP + tl.minimum(member, GROUP - 1)))
    if SPLITS:
        head = head * SPLITS + tl.program_id(2)
    out = softmax_mean(state) * value_scale
    tl.store(out_ptr + (head * HEAD_DIM)[:, None] + column, out.to(out_ptr.dtype.element_ty), mask=mask)
    if SPLITS:
        tl.store(lse_ptr + head, softmax_lse(state), mask=member < GROUP)


@triton.jit
def combine_splits(
    partial_ptr,  # [tokens, HEADS, SPLITS, HEAD_DIM]: float32
    lse_ptr,  # [tokens, HEADS, SPLITS]: float32
    sinks_ptr,  # [HEADS], or None
    out_ptr,  # [tokens, HEADS, HEAD_DIM]
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    EAGER_LAUNCH: tl.constexpr,  # let the next kernel begin before the parts are complete
):
    """The attention of one head of one token: the mean of its parts, weighted by the sums of their softmaxes."""
    wait_or_launch(DEPENDENT_LAUNCH, EAGER_LAUNCH)
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split, column = tl.arange(0, SPLITS_PADDED), tl.arange(0, HEAD_DIM_PADDED)
    lse = tl.load(lse_ptr + head * SPLITS + split, mask=split < SPLITS, other=float("-inf")) * LOG2_E
    mask = (split < SPLITS)[:, None] & (column < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + (head * SPLITS + split)[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + tl.program_id(1)).to(tl.float32) * LOG2_E
        largest = tl.maximum(tl.max(lse, 0), sink)
    else:
        largest = tl.maximum(tl.max(lse, 0), LOWEST)
    weight = tl.exp2(lse - largest)
    total = tl.sum(weight, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - largest)
    out = tl.sum(partial * weight[:, None], 0) / tl.maximum(total, 1e-30)
    tl.store(out_ptr + head * HEAD_DIM + column, out.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)
