"""Attention of rows with one token in a batch whose longer rows are computed by another kernel.

A program computes one row and one key head. It runs while the previous kernel, which writes the outputs of the longer
rows, may still be running, and waits for it only before it stores.
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


@triton.jit
def copy_longer(longer_ptr, out_ptr, begin, end, offsets, mask, TOKEN_SIZE: tl.constexpr):
    """Copy the elements at `offsets` of each token from `begin` to `end`; a token has TOKEN_SIZE elements."""
    for token in range(begin, end):
        place = tl.cast(token, tl.int64) * TOKEN_SIZE + offsets
        tl.store(out_ptr + place, tl.load(longer_ptr + place, mask=mask, other=0.0), mask=mask)


@triton.jit
def single_token_attention(
    query_ptr,  # [token_count, HEADS, HEAD_DIM]
    kv_ptr,  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    page_table_ptr,  # [table rows, table_width]
    rows_ptr,  # [row_count]: rows of the page table, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each row
    positions_ptr,  # [token_count]: the position of each token in its sequence
    longer_ptr,  # [token_count, HEADS, HEAD_DIM]: the outputs of the longer rows
    scales_ptr,  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats; None for other pools
    sinks_ptr,  # [HEADS], or None
    out_ptr,  # [token_count, HEADS, HEAD_DIM]; may be longer_ptr
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
    QUERY_ROWS: tl.constexpr,  # HEADS // KV_HEADS, padded for tl.dot
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INPUTS_SETTLED: tl.constexpr,  # the previous kernel writes no input except longer_ptr
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one row and one key head if the row has one token; longer rows are copied if necessary."""
    if not INPUTS_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index, kv_head = tl.program_id(0), tl.program_id(1)
    start, stop, row = tl.load(starts_ptr + index), tl.load(starts_ptr + index + 1), tl.load(rows_ptr + index)
    is_single = (stop - start == 1) & (row >= 0)
    length = tl.load(positions_ptr + start, mask=is_single, other=-1) + 1
    begin, end = key_range(length, WINDOW, PAGE, 0)
    page_table_ptr += tl.maximum(row, 0).to(tl.int64) * table_width
    first_pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, PAGE)
    key_scale, value_scale = head_scales(scales_ptr, kv_head, KV_HEADS)
    member = tl.arange(0, QUERY_ROWS)
    mask = (member < GROUP)[:, None] & head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    offsets = kv_head * (GROUP * HEAD_DIM) + member[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM_PADDED)[None, :]
    first_head = start.to(tl.int64) * (HEADS * HEAD_DIM)
    query = to_factor(tl.load(query_ptr + first_head + offsets, mask=mask & is_single, other=0.0), DOT_DTYPE)
    state = attend(
        query, KeyPool(kv_ptr + kv_head * (PAGE * HEAD_DIM), page_table_ptr, KV_HEADS, PAGE, HEAD_DIM, HEAD_DIM_PADDED),
        AttentionOptions(SCALE * key_scale, WINDOW, SOFTCAP, KEYS_PER_TILE, DOT_DTYPE, INTERPRET), first_pages, begin,
        end, length,
    )  # fmt: skip
    if INPUTS_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    if sinks_ptr is not None:
        state = softmax_add_sink(state, tl.load(sinks_ptr + kv_head * GROUP + tl.minimum(member, GROUP - 1)))
    out = softmax_mean(state) * value_scale
    tl.store(out_ptr + first_head + offsets, out.to(out_ptr.dtype.element_ty), mask=mask & is_single)
    if longer_ptr.to(tl.int64) != out_ptr.to(tl.int64):
        end = tl.where(index == row_count - 1, token_count, stop)  # the last row's programs also copy the padding
        copy_longer(longer_ptr, out_ptr, tl.where(is_single, stop, start), end, offsets, mask, HEADS * HEAD_DIM)
