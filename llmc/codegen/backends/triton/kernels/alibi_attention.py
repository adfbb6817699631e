"""Attention whose logits have a bias by distance (ALiBi, Press et al. 2021, arXiv 2108.12409).

The bias of a key is the slope of the head times the position of the key minus that of the query. `paged_alibi` computes
prompts and single tokens, in any mixture, over paged keys; `packed_alibi` computes packed prompts without pages.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import LOG2_E, softmax_mean, softmax_start, widened
from llmc.codegen.backends.triton.kernels.packed_attention import find_sequences, load_head
from llmc.codegen.backends.triton.kernels.paged_kv import (
    head_mask,
    head_scales,
    key_offsets,
    load_keys_values,
    load_pages,
    to_factor,
)
from llmc.codegen.backends.triton.kernels.prefill_attention import find_tile

NOWHERE = tl.constexpr(1 << 30)  # larger than every token index


@triton.jit
def alibi_tile(
    query,
    key,
    value,
    distance,
    visible,
    slope,
    running_max,
    running_sum,
    acc,
    scale,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the softmax state after one more tile: query [ROWS, D], key [KEYS, D], value [KEYS, WIDTH].

    `distance` [ROWS, KEYS] is the position of the key minus that of the query, `slope` [ROWS] that of the query's head;
    `visible` [ROWS, KEYS] selects the keys that each query attends to. The products take operands of DOT_DTYPE.
    """
    value = widened(value, DOT_DTYPE)
    key = key.to(DOT_DTYPE)
    if INTERPRET:  # the interpreter computes with numpy, which has no bfloat16
        query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
    logits += distance.to(tl.float32) * (slope * LOG2_E)[:, None]
    logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(logits, 1))
    weights = tl.exp2(logits - new_max[:, None])
    rescale = tl.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(weights, 1)
    weights = weights.to(DOT_DTYPE)
    if INTERPRET:
        weights = weights.to(tl.float32)
    acc = tl.dot(weights, value, acc * rescale[:, None], input_precision="ieee")
    return new_max, running_sum, acc


@triton.jit
def paged_alibi(
    query_ptr,  # [token_count, HEADS, HEAD_DIM]
    kv_ptr,  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    page_table_ptr,  # [table rows, table_width]
    rows_ptr,  # [row_count]: rows of the page table, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each row
    positions_ptr,  # [token_count]: the position of each token in its sequence
    scales_ptr,  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats; None for other pools
    slopes_ptr,  # [HEADS]: float32
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
    QUERY_ROWS: tl.constexpr,  # rows of a tile: tokens times HEADS // KV_HEADS, and padding
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one tile of tokens of one row and one key head; a query attends to the keys up to its position."""
    wait_for_previous(DEPENDENT_LAUNCH)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE_TOKENS: tl.constexpr = QUERY_ROWS // GROUP
    kv_head = tl.program_id(1)
    row, begin, stop = find_tile(rows_ptr, starts_ptr, row_count, token_count, TILE_TOKENS, 1)
    if begin >= stop:
        return
    key_scale, value_scale = head_scales(scales_ptr, kv_head, KV_HEADS)
    page_table_ptr += tl.maximum(row, 0).to(tl.int64) * table_width
    kv_ptr += kv_head * (PAGE * HEAD_DIM)
    member = tl.arange(0, QUERY_ROWS)
    token, query_head = begin + member // GROUP, kv_head * GROUP + member % GROUP
    exists = (member < TILE_TOKENS * GROUP) & (token < stop)
    position = tl.where(row >= 0, tl.load(positions_ptr + token, mask=exists, other=-1), -1)
    slope = tl.load(slopes_ptr + query_head)
    head = token.to(tl.int64) * HEADS + query_head
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = exists[:, None] & head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    query = to_factor(tl.load(query_ptr + (head * HEAD_DIM)[:, None] + column, mask=mask, other=0.0), DOT_DTYPE)
    end = tl.max(position, 0) + 1
    running_max, running_sum, acc = softmax_start(QUERY_ROWS, HEAD_DIM_PADDED)
    pages = load_pages(page_table_ptr, tl.arange(0, KEYS_PER_TILE), end, PAGE)
    for tile in range(0, end, KEYS_PER_TILE):
        keys = tile + tl.arange(0, KEYS_PER_TILE)
        offsets = key_offsets(pages, keys, KV_HEADS, PAGE, HEAD_DIM)
        pages = load_pages(page_table_ptr, keys + KEYS_PER_TILE, end, PAGE)
        key, value = load_keys_values(kv_ptr, offsets, keys < end, KV_HEADS, PAGE, HEAD_DIM, HEAD_DIM_PADDED)
        distance = keys[None, :] - position[:, None]
        running_max, running_sum, acc = alibi_tile(
            query, key, value, distance, distance <= 0, slope, running_max, running_sum, acc, SCALE * key_scale,
            DOT_DTYPE, INTERPRET,
        )  # fmt: skip
    out = softmax_mean(running_sum, acc) * value_scale
    tl.store(out_ptr + (head * HEAD_DIM)[:, None] + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def packed_alibi(
    query_ptr,  # [token_count, HEADS, HEAD_DIM]
    key_ptr,  # [token_count, KV_HEADS, HEAD_DIM]
    value_ptr,  # [token_count, KV_HEADS, VALUE_DIM]
    positions_ptr,  # [token_count]
    slopes_ptr,  # [HEADS]: float32
    out_ptr,  # [token_count, HEADS, VALUE_DIM]
    token_count,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    SCALE: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one tile of tokens, which may belong to several sequences, and one head."""
    wait_for_previous(DEPENDENT_LAUNCH)
    begin, head = tl.program_id(0) * QUERY_ROWS, tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    tokens = begin + tl.arange(0, QUERY_ROWS)
    exists = tokens < token_count
    first, _ = find_sequences(tokens, positions_ptr, token_count, True)
    first_key = tl.min(tl.where(exists, first, NOWHERE), 0)
    last_key = tl.minimum(begin + QUERY_ROWS, token_count)
    place = tokens.to(tl.int64) * HEADS + head
    query = load_head(query_ptr, tokens, exists, head, HEADS, HEAD_DIM, HEAD_DIM_PADDED).to(DOT_DTYPE)
    slope = tl.load(slopes_ptr + head + tokens * 0)
    running_max, running_sum, acc = softmax_start(QUERY_ROWS, VALUE_DIM_PADDED)
    for tile in range(first_key // KEYS_PER_TILE * KEYS_PER_TILE, last_key, KEYS_PER_TILE):
        keys = tile + tl.arange(0, KEYS_PER_TILE)
        key = load_head(key_ptr, keys, keys < token_count, kv_head, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED)
        value = load_head(value_ptr, keys, keys < token_count, kv_head, KV_HEADS, VALUE_DIM, VALUE_DIM_PADDED)
        distance = keys[None, :] - tokens[:, None]
        visible = (distance <= 0) & (keys[None, :] >= first[:, None])
        running_max, running_sum, acc = alibi_tile(
            query, key, value, distance, visible, slope, running_max, running_sum, acc, SCALE, DOT_DTYPE, INTERPRET
        )
    column = tl.arange(0, VALUE_DIM_PADDED)[None, :]
    mask = exists[:, None] & (column < VALUE_DIM)
    out = softmax_mean(running_sum, acc).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (place * VALUE_DIM)[:, None] + column, out, mask=mask)
