"""Decode attention in parts of a fixed number of keys, which are combined in one order.

Tiles, products and the order of the parts are those of `prefill_attention` with the same PART, so both give a token the
same bits: there, one program computes all parts of a row.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import (
    softmax_add_part,
    softmax_add_sink,
    softmax_mean,
    softmax_start,
)
from llmc.codegen.backends.triton.kernels.paged_kv import (
    KeyPool,
    PagedAttention,
    head_mask,
    head_scales,
    load_rows,
    store_rows,
    to_factor,
)
from llmc.codegen.backends.triton.kernels.prefill_attention import Queries, attend_part, key_bounds


@triton.jit
def attention_parts(
    attention: PagedAttention,
    partial_ptr,  # [tokens, HEADS, PARTS, HEAD_DIM]: float32
    lse_ptr,  # [tokens, HEADS, PARTS]: log of the sum of exp(logit), -inf for an empty part
    PART: tl.constexpr,  # keys of a part
    PARTS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # rows of a tile: HEADS // KV_HEADS, and padding
    KEYS_PER_TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One part of the keys of one token and one key head."""
    wait_for_previous(DEPENDENT_LAUNCH)
    GROUP: tl.constexpr = attention.HEADS // attention.KV_HEADS
    HEAD_DIM: tl.constexpr = attention.HEAD_DIM
    token, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(attention.rows_ptr + token)
    member = tl.arange(0, QUERY_ROWS)
    exists = member < GROUP
    position = tl.where(exists & (row >= 0), tl.load(attention.positions_ptr + token), -1)
    key_scale, value_scale = head_scales(attention.scales_ptr, kv_head, attention.KV_HEADS)
    page_table_ptr = attention.page_table_ptr + tl.maximum(row, 0).to(tl.int64) * attention.table_width
    head = token.to(tl.int64) * attention.HEADS + kv_head * GROUP + member
    query = load_rows(attention.query_ptr + head * HEAD_DIM, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)
    mean, lse = attend_part(
        Queries(to_factor(query, attention.DOT_DTYPE), position, exists, None, attention.SCALE * key_scale),
        attention,
        KeyPool(
            attention.kv_ptr + kv_head * (attention.PAGE * HEAD_DIM), page_table_ptr, attention.KV_HEADS,
            attention.PAGE, HEAD_DIM, attention.HEAD_DIM_PADDED,
        ),
        key_bounds(position, exists, attention.WINDOW, KEYS_PER_TILE), part * PART, value_scale, PART, KEYS_PER_TILE,
    )  # fmt: skip
    head = head * PARTS + part
    store_rows(partial_ptr + head * HEAD_DIM, mean, exists, HEAD_DIM, attention.HEAD_DIM_PADDED)
    tl.store(lse_ptr + head, lse, mask=exists)


@triton.jit
def join_parts(
    partial_ptr,  # [tokens, HEADS, PARTS, HEAD_DIM]: float32
    lse_ptr,  # [tokens, HEADS, PARTS]: float32
    sinks_ptr,  # [HEADS], or None
    out_ptr,  # [tokens, HEADS, HEAD_DIM]
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The attention of one head of one token: its parts, added from the first to the last."""
    wait_for_previous(DEPENDENT_LAUNCH)
    element = tl.arange(0, 1)
    head = (tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)) * PARTS + element
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    in_head = head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    state = softmax_start(1, HEAD_DIM_PADDED)
    for part in tl.static_range(PARTS):
        lse = tl.load(lse_ptr + head + part)
        mean = tl.load(partial_ptr + ((head + part) * HEAD_DIM)[:, None] + column, mask=in_head, other=0.0)
        state = softmax_add_part(state, mean, lse)
    if sinks_ptr is not None:
        state = softmax_add_sink(state, tl.load(sinks_ptr + tl.program_id(1) + element))
    out = softmax_mean(state)
    at = out_ptr + (head // PARTS * HEAD_DIM)[:, None] + column
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_head)
