"""Attention of chunks of prompts and of single tokens in one launch, so that the two kinds share multiprocessors.

Chunks are bound by products, single tokens by memory. A program computes a tile of a chunk (see `prefill_attention`) or
a single token, each for one key head.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.decode_attention import attend, key_range
from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import softmax_add_sink, softmax_mean
from llmc.codegen.backends.triton.kernels.paged_kv import (
    AttentionOptions,
    KeyPool,
    head_mask,
    head_scales,
    load_pages,
    to_factor,
)
from llmc.codegen.backends.triton.kernels.prefill_attention import attend_tile, row_of_tile


@triton.jit
def attend_token(
    query_ptr,
    kv_ptr,
    page_table_ptr,
    positions_ptr,
    scales_ptr,
    sinks_ptr,
    out_ptr,
    table_width,
    row,
    token,
    kv_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # HEADS // KV_HEADS, padded for tl.dot
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Store the attention of one token of `row`. For the arguments see `mixed_attention`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(positions_ptr + token) + 1
    begin, end = key_range(length, WINDOW, PAGE, 0)
    page_table_ptr += row.to(tl.int64) * table_width
    first_pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, PAGE)
    key_scale, value_scale = head_scales(scales_ptr, kv_head, KV_HEADS)
    member = tl.arange(0, QUERY_ROWS)
    mask = (member < GROUP)[:, None] & head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    offsets = kv_head * (GROUP * HEAD_DIM) + member[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM_PADDED)[None, :]
    offsets += token.to(tl.int64) * (HEADS * HEAD_DIM)
    query = to_factor(tl.load(query_ptr + offsets, mask=mask, other=0.0), DOT_DTYPE)
    state = attend(
        query, KeyPool(kv_ptr + kv_head * (PAGE * HEAD_DIM), page_table_ptr, KV_HEADS, PAGE, HEAD_DIM, HEAD_DIM_PADDED),
        AttentionOptions(SCALE * key_scale, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE, INTERPRET), first_pages, begin,
        end, length,
    )  # fmt: skip
    if sinks_ptr is not None:
        state = softmax_add_sink(state, tl.load(sinks_ptr + kv_head * GROUP + tl.minimum(member, GROUP - 1)))
    out = softmax_mean(state) * value_scale
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def mixed_attention(
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
    QUERY_ROWS: tl.constexpr,  # rows of a tile: tokens times HEADS // KV_HEADS, and padding
    KEYS_PER_TILE: tl.constexpr,
    SINGLE_ROWS: tl.constexpr,  # rows of a single token: HEADS // KV_HEADS, padded for tl.dot
    SINGLE_KEYS: tl.constexpr,  # keys of its tiles
    DOT_DTYPE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one tile of tokens, or of the one token that is left of a row, and one key head."""
    wait_for_previous(DEPENDENT_LAUNCH)
    kv_head = tl.program_id(0)
    # Decoding requests stand in front, prompts behind: programs take tiles from both ends.
    number = tl.program_id(1)
    tile = tl.where(number % 2 == 0, tl.num_programs(1) - 1 - number // 2, number // 2)
    TILE_TOKENS: tl.constexpr = QUERY_ROWS // (HEADS // KV_HEADS)
    row, begin, stop = row_of_tile(tile, rows_ptr, starts_ptr, row_count, token_count, TILE_TOKENS, 1)
    if begin >= stop:
        return
    if (stop - begin == 1) & (row >= 0):
        attend_token(
            query_ptr, kv_ptr, page_table_ptr, positions_ptr, scales_ptr, sinks_ptr, out_ptr, table_width, row, begin,
            kv_head, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, SCALE, WINDOW, SOFTCAP, SINGLE_ROWS,
            SINGLE_KEYS, DOT_DTYPE, INTERPRET,
        )  # fmt: skip
    else:
        attend_tile(
            query_ptr, kv_ptr, page_table_ptr, positions_ptr, scales_ptr, sinks_ptr, None, out_ptr, table_width, row,
            begin, stop, kv_head, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, SCALE, WINDOW, SOFTCAP, 0,
            QUERY_ROWS, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
        )  # fmt: skip
