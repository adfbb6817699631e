"""Attention of packed (concatenated) prompts, without pages or a cache.

A program computes one head of a tile of QUERY_ROWS tokens, which may belong to several sequences. A sequence starts at
every token whose position is not that of the previous token plus one. Logits may have a bias by distance, as in
`prefill_attention`.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import (
    LOG2_E,
    softmax_add_sink,
    softmax_mean,
    softmax_start,
    softmax_tile,
)

FAR = tl.constexpr(1 << 30)  # larger than every token index
TOKENS_PER_STEP = tl.constexpr(128)  # tokens that `find_sequences` reads at once


@triton.jit
def find_sequences(queries, positions_ptr, token_count, CAUSAL: tl.constexpr):
    """Return (first token, end) of the sequence of each query [ROWS]; if CAUSAL, the end is always `token_count`."""
    first = queries * 0
    end = queries * 0 + token_count
    for step in range(0, token_count, TOKENS_PER_STEP):
        tokens = step + tl.arange(0, TOKENS_PER_STEP)
        position = tl.load(positions_ptr + tokens, mask=tokens < token_count, other=0)
        before = tl.load(positions_ptr + tokens - 1, mask=(tokens > 0) & (tokens < token_count), other=0)
        starts = (tokens < token_count) & ((tokens == 0) | (position - before != 1))
        up_to_query = starts[None, :] & (tokens[None, :] <= queries[:, None])
        first = tl.maximum(first, tl.max(tl.where(up_to_query, tokens[None, :], 0), 1))
        if not CAUSAL:
            behind_query = starts[None, :] & (tokens[None, :] > queries[:, None])
            end = tl.minimum(end, tl.min(tl.where(behind_query, tokens[None, :], token_count), 1))
    return first, end


@triton.jit
def visible_keys(key, query, first, end, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return whether a query attends to a key; its sequence has the tokens from `first` to `end`."""
    if CAUSAL:
        visible = key <= query
    else:
        visible = key < end
    visible = visible & (key >= first)
    if WINDOW:
        visible = visible & (key > query - WINDOW)
    return visible


@triton.jit
def load_head(x_ptr, tokens, exists, head, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Load one head [TOKENS, DIM_PADDED] of x [tokens, HEADS, DIM]; zeros for padding and missing tokens."""
    column = tl.arange(0, DIM_PADDED)
    mask = exists[:, None] & (column < DIM)[None, :]
    offsets = (tokens.to(tl.int64) * HEADS + head) * DIM
    return tl.load(x_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def packed_attention(
    query_ptr,  # [token_count, HEADS, HEAD_DIM]
    key_ptr,  # [token_count, KV_HEADS, HEAD_DIM]
    value_ptr,  # [token_count, KV_HEADS, VALUE_DIM]
    positions_ptr,  # [token_count]
    sinks_ptr,  # [HEADS], or None
    slopes_ptr,  # [HEADS]: float32, of the bias by distance; None without bias
    out_ptr,  # [token_count, HEADS, VALUE_DIM]
    token_count,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # a query attends to keys that are less than WINDOW tokens before it; 0: all
    SOFTCAP: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one tile of tokens and one head."""
    wait_for_previous(DEPENDENT_LAUNCH)
    begin, head = tl.program_id(0) * QUERY_ROWS, tl.program_id(1)
    kv_head = head // (HEADS // KV_HEADS)
    tokens = begin + tl.arange(0, QUERY_ROWS)
    exists = tokens < token_count
    first, end = find_sequences(tokens, positions_ptr, token_count, CAUSAL)
    first_key = tl.min(tl.where(exists, first, FAR), 0)
    if WINDOW:
        first_key = tl.maximum(first_key, begin - (WINDOW - 1))
    if CAUSAL:
        last_key = tl.minimum(begin + QUERY_ROWS, token_count)
    else:
        last_key = tl.max(end, 0)

    place = tokens.to(tl.int64) * HEADS + head
    column = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = exists[:, None] & (column < HEAD_DIM)
    query = tl.load(query_ptr + (place * HEAD_DIM)[:, None] + column, mask=mask, other=0.0).to(DOT_DTYPE)
    state = softmax_start(QUERY_ROWS, VALUE_DIM_PADDED)
    for tile in range(first_key // KEYS_PER_TILE * KEYS_PER_TILE, last_key, KEYS_PER_TILE):
        keys = tile + tl.arange(0, KEYS_PER_TILE)
        key = load_head(key_ptr, keys, keys < token_count, kv_head, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED)
        value = load_head(value_ptr, keys, keys < token_count, kv_head, KV_HEADS, VALUE_DIM, VALUE_DIM_PADDED)
        visible = visible_keys(keys[None, :], tokens[:, None], first[:, None], end[:, None], CAUSAL, WINDOW)
        bias = None
        if slopes_ptr is not None:
            bias = (keys[None, :] - tokens[:, None]).to(tl.float32) * (tl.load(slopes_ptr + head) * LOG2_E)
        state = softmax_tile(query, key, value, visible, state, SCALE, SOFTCAP, DOT_DTYPE, INTERPRET, bias)
    if sinks_ptr is not None:
        state = softmax_add_sink(state, tl.load(sinks_ptr + head + tokens * 0))
    column = tl.arange(0, VALUE_DIM_PADDED)[None, :]
    mask = exists[:, None] & (column < VALUE_DIM)
    out = softmax_mean(state).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (place * VALUE_DIM)[:, None] + column, out, mask=mask)
