"""Attention of many tokens over paged keys: chunks of prompts and single tokens, in any mixture.

A program computes a tile of queries of one row and one key head: the rows of its tensor-core products are TILE_TOKENS
tokens times the query heads that share the key head. It iterates over the keys with an online softmax (Dao et al. 2022,
arXiv 2205.14135). Logits may have a bias by distance (ALiBi, Press et al. 2021, arXiv 2108.12409): the slope of the
head times the position of the key minus that of the query.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import (
    LOG2_E,
    softmax_add_part,
    softmax_add_sink,
    softmax_mean,
    softmax_part,
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

FAR = tl.constexpr(1 << 30)  # larger than every token index
ROWS_PER_STEP = tl.constexpr(128)  # rows that `find_tile` compares at once


class Queries(NamedTuple):
    """The query rows of a tile, all of one sequence."""

    query: tl.tensor  # [ROWS, HEAD_DIM_PADDED], as factors
    positions: tl.tensor  # [ROWS]; -1: attends to no key
    exists: tl.tensor  # [ROWS]: false for the padding of the tile
    slopes: tl.tensor  # [ROWS]: of the bias by distance; None without bias
    scale: tl.tensor  # factor of the logits


class KeyBounds(NamedTuple):
    """Which keys the queries of a tile attend to. `begin` and `whole` are multiples of a tile of keys."""

    begin: tl.tensor
    whole: tl.tensor  # all queries attend to all keys from `begin` to `whole`
    end: tl.tensor
    lowest: tl.tensor  # the first key of a window


@triton.jit
def row_of_tile(
    tile, rows_ptr, starts_ptr, row_count, token_count, TILE_TOKENS: tl.constexpr, MIN_TOKENS: tl.constexpr
):
    """Return (row of the page table, first token, end of the row's tokens) of a tile.

    The first tile of row i has the number starts[i] // TILE_TOKENS + i, so that the tiles of different rows never
    overlap; a program whose tile is after its row's tokens returns at once. The padding after the last row counts as
    one more row, with the value -1, which is also the value for rows of fewer than MIN_TOKENS tokens.
    """
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
def find_tile(
    rows_ptr,
    starts_ptr,
    row_count,
    token_count,
    TILE_TOKENS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    AXIS: tl.constexpr = 0,
):
    """Return `row_of_tile` of this program's tile, by its AXIS. The last tiles, whose queries attend to the most keys,
    run first.
    """
    tile = tl.num_programs(AXIS) - 1 - tl.program_id(AXIS)
    return row_of_tile(tile, rows_ptr, starts_ptr, row_count, token_count, TILE_TOKENS, MIN_TOKENS)


@triton.jit
def attend_range(
    queries: Queries,
    attention: PagedAttention,
    pool: KeyPool,
    bounds: KeyBounds,
    begin,
    end,
    state,
    pages,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the softmax state after the keys from `begin` to `end`, and the pages of the tile at `end`.

    A tile has KEYS keys. All queries attend to all of these keys if not MASKED. Otherwise a query attends to the keys
    up to its position, within its window, and keys are loaded from `bounds.lowest` to `bounds.end`.
    """
    for tile in range(begin, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        offsets = key_offsets(pool, pages, keys)
        pages = load_pages(pool.page_table_ptr, keys + KEYS, bounds.end, pool.PAGE)
        key_mask = None
        if MASKED:
            key_mask = keys < bounds.end
            if attention.WINDOW:
                key_mask = key_mask & (keys >= bounds.lowest)
        key, value = load_keys_values(pool, offsets, key_mask)
        visible = None
        if MASKED:
            visible = keys[None, :] <= queries.positions[:, None]
            if attention.WINDOW:
                visible = visible & (keys[None, :] > queries.positions[:, None] - attention.WINDOW)
        bias = None
        if queries.slopes is not None:
            distance = keys[None, :] - queries.positions[:, None]
            bias = distance.to(tl.float32) * (queries.slopes * LOG2_E)[:, None]
        state = softmax_tile(
            queries.query, key, value, visible, state, queries.scale, attention.SOFTCAP, attention.DOT_DTYPE,
            attention.INTERPRET, bias,
        )  # fmt: skip
    return state, pages


@triton.jit
def key_bounds(positions, exists, WINDOW: tl.constexpr, KEYS_PER_TILE: tl.constexpr):
    """Return the bounds of the keys of query rows.

    Without a window, all queries attend to the first tiles, which therefore need no masks.
    """
    end = tl.max(positions, 0) + 1
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(tl.min(tl.where(positions >= 0, positions, FAR), 0) - (WINDOW - 1), 0)
    begin = lowest // KEYS_PER_TILE * KEYS_PER_TILE
    whole = begin
    if not WINDOW:
        whole = (tl.min(tl.where(exists, positions, FAR), 0) + 1) // KEYS_PER_TILE * KEYS_PER_TILE
    return KeyBounds(begin, whole, end, lowest)


@triton.jit
def attend_causal(
    queries: Queries, attention: PagedAttention, pool: KeyPool, bounds: KeyBounds, begin, whole, stop,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Return the softmax state after the keys from `begin` to `stop`, of which those up to `whole` need no masks."""
    state = softmax_start(queries.query.shape[0], pool.HEAD_DIM_PADDED)
    pages = load_pages(pool.page_table_ptr, begin + tl.arange(0, KEYS), bounds.end, pool.PAGE)
    if not attention.WINDOW:
        state, pages = attend_range(queries, attention, pool, bounds, begin, whole, state, pages, KEYS, False)
    state, pages = attend_range(queries, attention, pool, bounds, whole, stop, state, pages, KEYS, True)
    return state


@triton.jit
def attend_part(
    queries: Queries,
    attention: PagedAttention,
    pool: KeyPool,
    bounds: KeyBounds,
    first,
    value_scale,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the attention over the keys from `first` to `first` + PART, and its lse (see `softmax_part`)."""
    start, stop = tl.maximum(first, bounds.begin), tl.minimum(first + PART, bounds.end)
    whole = tl.minimum(tl.maximum(bounds.whole, start), stop)
    state = attend_causal(queries, attention, pool, bounds, start, whole, stop, KEYS)
    return softmax_part(state, value_scale)


@triton.jit
def attend_keys(
    queries: Queries, attention: PagedAttention, pool: KeyPool, value_scale, PART: tl.constexpr, KEYS: tl.constexpr
):
    """Return the softmax state after all keys.

    With PART, every part of so many keys has its own softmax, and the parts, whose means are multiplied by
    `value_scale`, are added from the first to the last.
    """
    bounds = key_bounds(queries.positions, queries.exists, attention.WINDOW, KEYS)
    if PART:
        state = softmax_start(queries.query.shape[0], pool.HEAD_DIM_PADDED)
        for first in range(bounds.begin // PART * PART, bounds.end, PART):
            mean, lse = attend_part(queries, attention, pool, bounds, first, value_scale, PART, KEYS)
            state = softmax_add_part(state, mean, lse)
    else:
        state = attend_causal(queries, attention, pool, bounds, bounds.begin, bounds.whole, bounds.end, KEYS)
    return state


@triton.jit
def attend_tile(
    attention: PagedAttention,
    slopes_ptr,
    out_ptr,
    row,
    begin,
    stop,
    kv_head,
    PART: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the attention of the tile of `row` that begins with the token `begin`. For the arguments see
    `paged_prefill`."""
    GROUP: tl.constexpr = attention.HEADS // attention.KV_HEADS
    TILE_TOKENS: tl.constexpr = QUERY_ROWS // GROUP
    HEAD_DIM: tl.constexpr = attention.HEAD_DIM
    key_scale, value_scale = head_scales(attention.scales_ptr, kv_head, attention.KV_HEADS)
    page_table_ptr = attention.page_table_ptr + tl.maximum(row, 0).to(tl.int64) * attention.table_width
    member = tl.arange(0, QUERY_ROWS)
    token, query_head = begin + member // GROUP, kv_head * GROUP + member % GROUP
    exists = (member < TILE_TOKENS * GROUP) & (token < stop)
    position = tl.where(row >= 0, tl.load(attention.positions_ptr + token, mask=exists, other=-1), -1)
    slopes = tl.load(slopes_ptr + query_head) if slopes_ptr is not None else None
    head = token.to(tl.int64) * attention.HEADS + query_head
    query = load_rows(attention.query_ptr + head * HEAD_DIM, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)
    state = attend_keys(
        Queries(to_factor(query, attention.DOT_DTYPE), position, exists, slopes, attention.SCALE * key_scale),
        attention,
        KeyPool(
            attention.kv_ptr + kv_head * (attention.PAGE * HEAD_DIM), page_table_ptr, attention.KV_HEADS,
            attention.PAGE, HEAD_DIM, attention.HEAD_DIM_PADDED,
        ),
        value_scale, PART, KEYS,
    )  # fmt: skip
    if attention.sinks_ptr is not None:
        state = softmax_add_sink(state, tl.load(attention.sinks_ptr + query_head))
    out = softmax_mean(state)
    if not PART:
        out *= value_scale
    store_rows(out_ptr + head * HEAD_DIM, out, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)


@triton.jit
def paged_prefill(
    attention: PagedAttention,
    slopes_ptr,  # [HEADS]: float32, of the bias by distance; None without bias
    out_ptr,  # [token_count, HEADS, HEAD_DIM]
    token_count,
    MIN_TOKENS: tl.constexpr,  # the result of rows with fewer tokens is zero
    PART: tl.constexpr,  # keys of a part with a softmax of its own, a multiple of KEYS_PER_TILE; 0: one softmax
    QUERY_ROWS: tl.constexpr,  # rows of a tile: tokens times HEADS // KV_HEADS, and padding
    KEYS_PER_TILE: tl.constexpr,
    TILE_AXIS: tl.constexpr,  # grid axis of the tiles; the other axis enumerates the key heads
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Attention of one tile of tokens and one key head."""
    wait_for_previous(DEPENDENT_LAUNCH)
    TILE_TOKENS: tl.constexpr = QUERY_ROWS // (attention.HEADS // attention.KV_HEADS)
    kv_head = tl.program_id(1 - TILE_AXIS)
    row, begin, stop = find_tile(
        attention.rows_ptr, attention.starts_ptr, attention.row_count, token_count, TILE_TOKENS, MIN_TOKENS, TILE_AXIS
    )
    if begin >= stop:
        return
    attend_tile(attention, slopes_ptr, out_ptr, row, begin, stop, kv_head, PART, QUERY_ROWS, KEYS_PER_TILE)
