"""Attention of rows with one token in a batch whose longer rows are computed by another kernel.

A program computes one row and one key head. It runs while the previous kernel, which writes the outputs of the longer
rows, may still be running, and waits for it only before it stores.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.decode_attention import add_sinks, attend_token, key_range
from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import softmax_mean
from llmc.codegen.backends.triton.kernels.paged_kv import PagedAttention, load_pages, load_rows, store_rows


@triton.jit
def copy_longer(longer_ptr, out_ptr, begin, end, head, exists, attention: PagedAttention):
    """Copy the heads `head` [ROWS] of each token from `begin` to `end`."""
    HEAD_DIM: tl.constexpr = attention.HEAD_DIM
    for token in range(begin, end):
        at = (tl.cast(token, tl.int64) * attention.HEADS + head) * HEAD_DIM
        rows = load_rows(longer_ptr + at, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)
        store_rows(out_ptr + at, rows, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)


@triton.jit
def single_token_attention(
    attention: PagedAttention,
    longer_ptr,  # [token_count, HEADS, HEAD_DIM]: the outputs of the longer rows
    out_ptr,  # [token_count, HEADS, HEAD_DIM]; may be longer_ptr
    token_count,
    QUERY_ROWS: tl.constexpr,  # HEADS // KV_HEADS, padded for tl.dot
    KEYS_PER_TILE: tl.constexpr,
    INPUTS_SETTLED: tl.constexpr,  # the previous kernel writes no input except longer_ptr
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Attention of one row and one key head if the row has one token; longer rows are copied if necessary."""
    if not INPUTS_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    index, kv_head = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(attention.starts_ptr + index), tl.load(attention.starts_ptr + index + 1)
    row = tl.load(attention.rows_ptr + index)
    is_single = (stop - start == 1) & (row >= 0)
    length = tl.load(attention.positions_ptr + start, mask=is_single, other=-1) + 1
    begin, end = key_range(length, attention.WINDOW, attention.PAGE, 0)
    page_table_ptr = attention.page_table_ptr + tl.maximum(row, 0).to(tl.int64) * attention.table_width
    first_pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, attention.PAGE)
    GROUP: tl.constexpr = attention.HEADS // attention.KV_HEADS
    HEAD_DIM: tl.constexpr = attention.HEAD_DIM
    member = tl.arange(0, QUERY_ROWS)
    query_head, exists = kv_head * GROUP + member, member < GROUP
    head = start.to(tl.int64) * attention.HEADS + query_head
    state, value_scale = attend_token(
        attention, page_table_ptr, head, exists & is_single, kv_head, first_pages, begin, end, length, KEYS_PER_TILE
    )
    if INPUTS_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    out = softmax_mean(add_sinks(state, attention, kv_head)) * value_scale
    store_rows(out_ptr + head * HEAD_DIM, out, exists & is_single, HEAD_DIM, attention.HEAD_DIM_PADDED)
    if longer_ptr.to(tl.int64) != out_ptr.to(tl.int64):
        # The last row's programs also copy the padding.
        end = tl.where(index == attention.row_count - 1, token_count, stop)
        copy_longer(longer_ptr, out_ptr, tl.where(is_single, stop, start), end, query_head, exists, attention)
