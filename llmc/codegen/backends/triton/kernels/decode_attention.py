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
    KeyPool,
    PagedAttention,
    head_scales,
    key_offsets,
    load_keys_values,
    load_pages,
    load_rows,
    store_rows,
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
def attend(query, attention: PagedAttention, pool: KeyPool, scale, pages, begin, end, length, KEYS: tl.constexpr):
    """Return the softmax state of the last token of a sequence of `length` tokens after the keys from `begin` to `end`.

    `query` has one row per query head, `scale` is that of the logits, and `pages` are the pages of the first tile of
    KEYS keys.
    """
    state = softmax_start(query.shape[0], pool.HEAD_DIM_PADDED)
    for tile in range(begin, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        offsets = key_offsets(pool, pages, keys)
        pages = load_pages(pool.page_table_ptr, keys + KEYS, end, pool.PAGE)
        visible = keys < end
        if attention.WINDOW:
            visible = visible & (keys >= length - attention.WINDOW)
        key, value = load_keys_values(pool, offsets, visible)
        state = softmax_tile(
            query, key, value, visible[None, :], state, scale, attention.SOFTCAP, attention.DOT_DTYPE,
            attention.INTERPRET,
        )  # fmt: skip
    return state


@triton.jit
def query_heads(attention: PagedAttention, token, kv_head, ROWS: tl.constexpr):
    """Return token * HEADS + each query head that shares a key head, [ROWS], and whether it exists or is padding."""
    GROUP: tl.constexpr = attention.HEADS // attention.KV_HEADS
    member = tl.arange(0, ROWS)
    return token.to(tl.int64) * attention.HEADS + kv_head * GROUP + member, member < GROUP


@triton.jit
def attend_token(
    attention: PagedAttention, page_table_ptr, head, exists, kv_head, pages, begin, end, length, KEYS: tl.constexpr
):
    """Return `attend` for query heads of one token that share a key head, and the scale of the values.

    page_table_ptr: the row of the token's sequence. head: token * HEADS + the query head, [ROWS]; `exists` [ROWS] is
    false for padding.
    """
    HEAD_DIM: tl.constexpr = attention.HEAD_DIM
    key_scale, value_scale = head_scales(attention.scales_ptr, kv_head, attention.KV_HEADS)
    query = load_rows(attention.query_ptr + head * HEAD_DIM, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)
    state = attend(
        to_factor(query, attention.DOT_DTYPE), attention,
        KeyPool(
            attention.kv_ptr + kv_head * (attention.PAGE * HEAD_DIM), page_table_ptr, attention.KV_HEADS,
            attention.PAGE, HEAD_DIM, attention.HEAD_DIM_PADDED,
        ),
        attention.SCALE * key_scale, pages, begin, end, length, KEYS,
    )  # fmt: skip
    return state, value_scale


@triton.jit
def add_sinks(state, attention: PagedAttention, kv_head):
    """Return the state after the sinks of the query heads of a key head, if the attention has any."""
    if attention.sinks_ptr is not None:
        GROUP: tl.constexpr = attention.HEADS // attention.KV_HEADS
        member = tl.minimum(tl.arange(0, state.running_max.shape[0]), GROUP - 1)
        state = softmax_add_sink(state, tl.load(attention.sinks_ptr + kv_head * GROUP + member))
    return state


@triton.jit
def paged_decode(
    attention: PagedAttention,
    out_ptr,  # [tokens, HEADS, HEAD_DIM]; with SPLITS [tokens, HEADS, SPLITS, HEAD_DIM] in float32
    lse_ptr,  # [tokens, HEADS, SPLITS]: log of the sum of exp(logit), -inf for an empty part; None without SPLITS
    SPLITS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # HEADS // KV_HEADS, padded for tl.dot
    KEYS_PER_TILE: tl.constexpr,
    TABLES_SETTLED: tl.constexpr,  # the previous kernel writes neither page table, rows, starts nor positions
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Attention of one token and one key head, over all keys or one part of them."""
    if not TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    token, kv_head = tl.program_id(0), tl.program_id(1)
    row, length = find_row(
        token, attention.rows_ptr, attention.starts_ptr, attention.positions_ptr, attention.row_count
    )
    begin, end = key_range(length, attention.WINDOW, attention.PAGE, SPLITS)
    page_table_ptr = attention.page_table_ptr + tl.maximum(row, 0).to(tl.int64) * attention.table_width
    first_pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, attention.PAGE)
    if TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    HEAD_DIM: tl.constexpr = attention.HEAD_DIM
    head, exists = query_heads(attention, token, kv_head, QUERY_ROWS)
    state, value_scale = attend_token(
        attention, page_table_ptr, head, exists, kv_head, first_pages, begin, end, length, KEYS_PER_TILE
    )
    state = add_sinks(state, attention, kv_head)
    if SPLITS:
        head = head * SPLITS + tl.program_id(2)
    out = softmax_mean(state) * value_scale
    store_rows(out_ptr + head * HEAD_DIM, out, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)
    if SPLITS:
        tl.store(lse_ptr + head, softmax_lse(state), mask=exists)


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
