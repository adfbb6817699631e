"""Attention of chunks of prompts and of single tokens in one launch, so that the two kinds share multiprocessors.

Chunks are bound by products, single tokens by memory. A program computes a tile of a chunk (see `prefill_attention`) or
a single token, each for one key head.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.decode_attention import add_sinks, attend_token, key_range, query_heads
from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import softmax_mean
from llmc.codegen.backends.triton.kernels.paged_kv import PagedAttention, load_pages, store_rows
from llmc.codegen.backends.triton.kernels.prefill_attention import attend_tile, row_of_tile


@triton.jit
def attend_single(attention: PagedAttention, out_ptr, row, token, kv_head, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Store the attention of one token of `row` and one key head, with ROWS rows of queries and tiles of KEYS keys."""
    length = tl.load(attention.positions_ptr + token) + 1
    begin, end = key_range(length, attention.WINDOW, attention.PAGE, 0)
    page_table_ptr = attention.page_table_ptr + row.to(tl.int64) * attention.table_width
    first_pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS), end, attention.PAGE)
    HEAD_DIM: tl.constexpr = attention.HEAD_DIM
    head, exists = query_heads(attention, token, kv_head, ROWS)
    state, value_scale = attend_token(
        attention, page_table_ptr, head, exists, kv_head, first_pages, begin, end, length, KEYS
    )
    out = softmax_mean(add_sinks(state, attention, kv_head)) * value_scale
    store_rows(out_ptr + head * HEAD_DIM, out, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)


@triton.jit
def mixed_attention(
    attention: PagedAttention,
    out_ptr,  # [token_count, HEADS, HEAD_DIM]
    token_count,
    QUERY_ROWS: tl.constexpr,  # rows of a tile: tokens times HEADS // KV_HEADS, and padding
    KEYS_PER_TILE: tl.constexpr,
    SINGLE_ROWS: tl.constexpr,  # rows of a single token: HEADS // KV_HEADS, padded for tl.dot
    SINGLE_KEYS: tl.constexpr,  # keys of its tiles
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Attention of one tile of tokens, or of the one token that is left of a row, and one key head."""
    wait_for_previous(DEPENDENT_LAUNCH)
    kv_head = tl.program_id(0)
    # Decoding requests come first, prompts last: programs take tiles from both ends.
    number = tl.program_id(1)
    tile = tl.where(number % 2 == 0, tl.num_programs(1) - 1 - number // 2, number // 2)
    TILE_TOKENS: tl.constexpr = QUERY_ROWS // (attention.HEADS // attention.KV_HEADS)
    row, begin, stop = row_of_tile(
        tile, attention.rows_ptr, attention.starts_ptr, attention.row_count, token_count, TILE_TOKENS, 1
    )
    if begin >= stop:
        return
    if (stop - begin == 1) & (row >= 0):
        attend_single(attention, out_ptr, row, begin, kv_head, SINGLE_ROWS, SINGLE_KEYS)
    else:
        attend_tile(attention, None, out_ptr, row, begin, stop, kv_head, 0, QUERY_ROWS, KEYS_PER_TILE)
