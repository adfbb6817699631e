"""Attention of many tokens over paged keys: chunks of prompts and single tokens, in any mixture.

A program computes a tile of queries of one row and one key head: the rows of its tensor-core products are TILE_TOKENS
tokens times the query heads that share the key head. It iterates over the keys with an online softmax (Dao et al. 2022,
arXiv 2205.14135).
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import (
    softmax_add_part,
    softmax_add_sink,
    softmax_mean,
    softmax_part,
    softmax_start,
    softmax_tile,
)
from llmc.codegen.backends.triton.kernels.paged_kv import (
    head_mask,
    head_scales,
    key_offsets,
    load_keys_values,
    load_pages,
    to_factor,
)

FAR = tl.constexpr(1 << 30)  # larger than every token index
ROWS_PER_STEP = tl.constexpr(128)  # rows that `find_tile` compares at once


@triton.jit
def find_tile(rows_ptr, starts_ptr, row_count, token_count, TILE_TOKENS: tl.constexpr, MIN_TOKENS: tl.constexpr):
    """Return (row of the page table, first token, end of the row's tokens) of this program's tile.

    The first tile of row i has the number starts[i] // TILE_TOKENS + i, so that the tiles of different rows never
    overlap; a program whose tile is behind its row's tokens returns at once. The padding after the last row counts as
    one more row, with the value -1, which is also the value for rows of fewer than MIN_TOKENS tokens. The last tiles,
    whose queries attend to the most keys, run first.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    index = tile * 0 - 1
    for first in range(0, row_count + 1, ROWS_PER_STEP):
        candidate = first + tl.arange(0, ROWS_PER_STEP)
        starts = tl.load(starts_ptr + candidate, mask=candidate <= row_count, other=FAR)
        begun = (starts // TILE_TOKENS + candidate <= tile) & (candidate <= row_count)
        index += tl.sum(begun.to(tl.int32))
    start = tl.load(starts_ptr + index)
    row = tl.load(rows_ptr + index, mask=index < row_count, other=-1)
    stop = tl.load(starts_ptr + 1 + index, mask=index < row_count, other=0)
    if MIN_TOKENS > 1:
        row = tl.where(stop - start < MIN_TOKENS, -1, row)
    stop = tl.where(index < row_count, stop, token_count)
    begin = start + (tile - start // TILE_TOKENS - index) * TILE_TOKENS
    return row, begin, stop


@triton.jit
def attend_range(
    query,
    kv_ptr,
    page_table_ptr,
    begin,
    end,
    keys_end,
    lowest,
    positions,
    running_max,
    running_sum,
    acc,
    pages,
    scale,
    MASKED: tl.constexpr,
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
    """Return the softmax state after the keys from `begin` to `end`, and the pages of the tile at `end`.

    All queries attend to all of these keys if not MASKED. Otherwise a query attends to the keys up to its position,
    within its window, and keys are loaded from `lowest` to `keys_end`.
    """
    for tile in range(begin, end, KEYS_PER_TILE):
        keys = tile + tl.arange(0, KEYS_PER_TILE)
        offsets = key_offsets(pages, keys, KV_HEADS, PAGE, HEAD_DIM)
        pages = load_pages(page_table_ptr, keys + KEYS_PER_TILE, keys_end, PAGE)
        wanted = None
        if MASKED:
            wanted = keys < keys_end
            if WINDOW:
                wanted = wanted & (keys >= lowest)
        key, value = load_keys_values(kv_ptr, offsets, wanted, KV_HEADS, PAGE, HEAD_DIM, HEAD_DIM_PADDED)
        visible = None
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        running_max, running_sum, acc = softmax_tile(
            query, key, value, visible, running_max, running_sum, acc, scale, SOFTCAP, DOT_DTYPE, INTERPRET
        )
    return running_max, running_sum, acc, pages


@triton.jit
def key_bounds(positions, exists, WINDOW: tl.constexpr, KEYS_PER_TILE: tl.constexpr):
    """Return bounds of the keys of query rows: begin, end of the tiles that need no mask, end, lowest key of a window.

    `begin` and the end of the tiles without masks are multiples of a tile. Without a window, all queries attend to the
    first tiles, which therefore need no masks.
    """
    end = tl.max(positions, 0) + 1
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(tl.min(tl.where(positions >= 0, positions, FAR), 0) - (WINDOW - 1), 0)
    begin = lowest // KEYS_PER_TILE * KEYS_PER_TILE
    whole = begin
    if not WINDOW:
        whole = (tl.min(tl.where(exists, positions, FAR), 0) + 1) // KEYS_PER_TILE * KEYS_PER_TILE
    return begin, whole, end, lowest


@triton.jit
def attend_causal(
    query,
    kv_ptr,
    page_table_ptr,
    positions,
    begin,
    whole,
    stop,
    end,
    lowest,
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
    """Return the softmax state of query rows at `positions` [ROWS] of one sequence (-1: attends to no key), after the
    keys from `begin` to `stop`.

    Tiles up to `whole` need no masks; `end` and `lowest` are those of `key_bounds`.
    """
    running_max, running_sum, acc = softmax_start(query.shape[0], HEAD_DIM_PADDED)
    pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, PAGE)
    if not WINDOW:
        running_max, running_sum, acc, pages = attend_range(
            query, kv_ptr, page_table_ptr, begin, whole, end, lowest, positions, running_max, running_sum, acc, pages,
            scale, False, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE,
            INTERPRET,
        )  # fmt: skip
    running_max, running_sum, acc, pages = attend_range(
        query, kv_ptr, page_table_ptr, whole, stop, end, lowest, positions, running_max, running_sum, acc, pages,
        scale, True, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE,
        INTERPRET,
    )  # fmt: skip
    return running_max, running_sum, acc


@triton.jit
def attend_part(
    query,
    kv_ptr,
    page_table_ptr,
    positions,
    first,
    begin,
    whole,
    end,
    lowest,
    scale,
    value_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PART: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the attention of query rows over the keys from `first` to `first` + PART, and its lse (see softmax_part).

    The bounds are those of `key_bounds`.
    """
    start, stop = tl.maximum(first, begin), tl.minimum(first + PART, end)
    running_max, running_sum, acc = attend_causal(
        query, kv_ptr, page_table_ptr, positions, start, tl.minimum(tl.maximum(whole, start), stop), stop, end, lowest,
        scale, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip
    return softmax_part(running_max, running_sum, acc, value_scale)


@triton.jit
def attend_keys(
    query,
    kv_ptr,
    page_table_ptr,
    positions,
    exists,
    scale,
    value_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PART: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the softmax state of query rows at `positions` [ROWS] of one sequence (-1: attends to no key).

    `exists` [ROWS] is false for the padding of the tile. With PART, every part of so many keys has its own softmax,
    and the parts, whose means are multiplied by `value_scale`, are added from the first to the last.
    """
    begin, whole, end, lowest = key_bounds(positions, exists, WINDOW, KEYS_PER_TILE)
    if PART:
        running_max, running_sum, acc = softmax_start(query.shape[0], HEAD_DIM_PADDED)
        for first in range(begin // PART * PART, end, PART):
            mean, lse = attend_part(
                query, kv_ptr, page_table_ptr, positions, first, begin, whole, end, lowest, scale, value_scale,
                KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, PART, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
            )  # fmt: skip
            running_max, running_sum, acc = softmax_add_part(running_max, running_sum, acc, mean, lse)
    else:
        running_max, running_sum, acc = attend_causal(
            query, kv_ptr, page_table_ptr, positions, begin, whole, end, end, lowest, scale,
            KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
        )  # fmt: skip
    return running_max, running_sum, acc


@triton.jit
def paged_prefill(
    query_ptr,  # [token_count, HEADS, HEAD_DIM]
    kv_ptr,  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    page_table_ptr,  # [table rows, table_width]
    rows_ptr,  # [row_count]: rows of the page table, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each row
    positions_ptr,  # [token_count]: the position of each token in its sequence
    scales_ptr,  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats; None for other pools
    sinks_ptr,  # [HEADS], or None
    out_ptr,  # [token_count, HEADS, HEAD_DIM]
    row_count,
    token_count,
    table_width,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query attends to, including its own; 0: all
    SOFTCAP: tl.constexpr,
    MIN_TOKENS: tl.constexpr,  # the result of rows with fewer tokens is zero
    PART: tl.constexpr,  # keys of a part with a softmax of its own, a multiple of KEYS_PER_TILE; 0: one softmax
    QUERY_ROWS: tl.constexpr,  # rows of a tile: tokens times HEADS // KV_HEADS, and padding
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one tile of tokens and one key head."""
    wait_for_previous(DEPENDENT_LAUNCH)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE_TOKENS: tl.constexpr = QUERY_ROWS // GROUP
    kv_head = tl.program_id(1)
    row, begin, stop = find_tile(rows_ptr, starts_ptr, row_count, token_count, TILE_TOKENS, MIN_TOKENS)
    if begin >= stop:
        return
    key_scale, value_scale = head_scales(scales_ptr, kv_head, KV_HEADS)
    page_table_ptr += tl.maximum(row, 0).to(tl.int64) * table_width
    kv_ptr += kv_head * (PAGE * HEAD_DIM)
    member = tl.arange(0, QUERY_ROWS)
    token, query_head = begin + member // GROUP, kv_head * GROUP + member % GROUP
    exists = (member < TILE_TOKENS * GROUP) & (token < stop)
    position = tl.where(row >= 0, tl.load(positions_ptr + token, mask=exists, other=-1), -1)
    head = token.to(tl.int64) * HEADS + query_head
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = exists[:, None] & head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    query = tl.load(query_ptr + (head * HEAD_DIM)[:, None] + column, mask=mask, other=0.0)
    running_max, running_sum, acc = attend_keys(
        to_factor(query, DOT_DTYPE), kv_ptr, page_table_ptr, position, exists, SCALE * key_scale, value_scale,
        KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, WINDOW, SOFTCAP, PART, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + query_head)
        running_max, running_sum, acc = softmax_add_sink(running_max, running_sum, acc, sink)
    out = softmax_mean(running_sum, acc)
    if not PART:
        out *= value_scale
    tl.store(out_ptr + (head * HEAD_DIM)[:, None] + column, out.to(out_ptr.dtype.element_ty), mask=mask)
