"""Latent attention over pages: all heads share one key per token, whose first part is the value.

The pool is [pages, PAGE, LATENT + ROTARY]. A program computes a tile of query rows, which are tokens of one sequence
times heads. A tile of latents is loaded once, for both products; the rotary parts of queries and keys have a product of
their own, whose sums continue in the same logits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.decode_attention import find_row, key_range
from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import (
    LOG2_E,
    softmax_add_logits,
    softmax_lse,
    softmax_mean,
    softmax_start,
)
from llmc.codegen.backends.triton.kernels.paged_kv import load_pages, load_rows, store_rows, to_factor
from llmc.codegen.backends.triton.kernels.prefill_attention import find_tile


class LatentPool(NamedTuple):
    """The latents and rotary keys of one sequence."""

    pool_ptr: tl.tensor
    page_table_ptr: tl.tensor  # the sequence's row of the page table
    PAGE: tl.constexpr
    LATENT: tl.constexpr
    LATENT_PADDED: tl.constexpr
    ROTARY: tl.constexpr
    ROTARY_PADDED: tl.constexpr


@triton.jit
def attend_latents(
    query_ptr,
    rotary_ptr,
    head,
    exists,
    positions,
    pool: LatentPool,
    begin,
    end,
    SCALE: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the softmax state of query rows of one sequence after the keys from `begin` to `end`.

    `head` [ROWS] are the numbers of the rows (token * HEADS + head), `exists` is false for padding, and `positions`
    are those of the rows' tokens. A query attends to the keys up to its position.
    """
    LATENT: tl.constexpr = pool.LATENT
    ROTARY: tl.constexpr = pool.ROTARY
    query = to_factor(load_rows(query_ptr + head * LATENT, exists, LATENT, pool.LATENT_PADDED), DOT_DTYPE)
    query_rotary = to_factor(load_rows(rotary_ptr + head * ROTARY, exists, ROTARY, pool.ROTARY_PADDED), DOT_DTYPE)
    if INTERPRET:  # the interpreter computes with numpy, which has no bfloat16
        query, query_rotary = query.to(tl.float32), query_rotary.to(tl.float32)
    state = softmax_start(query.shape[0], pool.LATENT_PADDED)
    pages = load_pages(pool.page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, pool.PAGE)
    for tile in range(begin, end, KEYS_PER_TILE):
        keys = tile + tl.arange(0, KEYS_PER_TILE)
        # Without this, Triton 3.6 copies rows of the pool 16 bytes at a time even if they are aligned to fewer.
        slot = tl.multiple_of(pages.to(tl.int64) * pool.PAGE + keys % pool.PAGE, 1)
        at = pool.pool_ptr + slot * (LATENT + ROTARY)
        pages = load_pages(pool.page_table_ptr, keys + KEYS_PER_TILE, end, pool.PAGE)
        loaded = keys < end
        latent = load_rows(at, loaded, LATENT, pool.LATENT_PADDED).to(DOT_DTYPE)
        rotary = load_rows(at + LATENT, loaded, ROTARY, pool.ROTARY_PADDED).to(DOT_DTYPE)
        if INTERPRET:
            latent, rotary = latent.to(tl.float32), rotary.to(tl.float32)
        logits = tl.dot(query, tl.trans(latent), input_precision="ieee")
        logits = tl.dot(query_rotary, tl.trans(rotary), logits, input_precision="ieee")
        visible = loaded[None, :] & (keys[None, :] <= positions[:, None])
        logits = tl.where(visible, logits * (SCALE * LOG2_E), float("-inf"))
        state = softmax_add_logits(state, logits, latent, DOT_DTYPE, INTERPRET)
    return state


@triton.jit
def latent_decode(
    query_ptr,  # [tokens, HEADS, LATENT]
    rotary_ptr,  # [tokens, HEADS, ROTARY]
    pool_ptr,  # [pages, PAGE, LATENT + ROTARY]
    page_table_ptr,  # [table rows, table_width]
    rows_ptr,  # [tokens]: rows of the page table, -1 for padding
    positions_ptr,  # [tokens]: the position of each token in its sequence
    partial_ptr,  # [tokens, HEADS, SPLITS, LATENT]: float32
    lse_ptr,  # [tokens, HEADS, SPLITS]: log of the sum of exp(logit), -inf for an empty part
    table_width,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,  # heads of a program
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    TABLES_SETTLED: tl.constexpr,  # the previous kernel writes neither page table, rows nor positions
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One part of the attention of QUERY_ROWS heads of one token; `combine_splits` combines the parts."""
    if not TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    token = tl.program_id(0)
    row, length = find_row(token, rows_ptr, None, positions_ptr, 0)
    begin, end = key_range(length, 0, PAGE, SPLITS)
    page_table_ptr += tl.maximum(row, 0).to(tl.int64) * table_width
    if TABLES_SETTLED:
        wait_for_previous(DEPENDENT_LAUNCH)
    member = tl.program_id(1) * QUERY_ROWS + tl.arange(0, QUERY_ROWS)
    exists = member < HEADS
    head = token.to(tl.int64) * HEADS + member
    state = attend_latents(
        query_ptr, rotary_ptr, head, exists, length - 1 + member * 0,
        LatentPool(pool_ptr, page_table_ptr, PAGE, LATENT, LATENT_PADDED, ROTARY, ROTARY_PADDED),
        begin, end, SCALE, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip
    part = head * SPLITS + tl.program_id(2)
    store_rows(partial_ptr + part * LATENT, softmax_mean(state), exists, LATENT, LATENT_PADDED)
    tl.store(lse_ptr + part, softmax_lse(state), mask=exists)


@triton.jit
def latent_prefill(
    query_ptr,  # [token_count, HEADS, LATENT]
    rotary_ptr,  # [token_count, HEADS, ROTARY]
    pool_ptr,  # [pages, PAGE, LATENT + ROTARY]
    page_table_ptr,  # [table rows, table_width]
    rows_ptr,  # [row_count]: rows of the page table, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each row
    positions_ptr,  # [token_count]: the position of each token in its sequence
    out_ptr,  # [token_count, HEADS, LATENT]
    row_count,
    token_count,
    table_width,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    TILE_HEADS: tl.constexpr,  # heads of a tile
    TILE_TOKENS: tl.constexpr,  # tokens of a tile
    QUERY_ROWS: tl.constexpr,  # rows of a tile: TILE_TOKENS * TILE_HEADS, and padding
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Attention of one tile of tokens and heads, for any mixture of rows and tokens."""
    wait_for_previous(DEPENDENT_LAUNCH)
    row, begin, stop = find_tile(rows_ptr, starts_ptr, row_count, token_count, TILE_TOKENS, 1)
    if begin >= stop:
        return
    page_table_ptr += tl.maximum(row, 0).to(tl.int64) * table_width
    member = tl.arange(0, QUERY_ROWS)
    token, query_head = begin + member // TILE_HEADS, tl.program_id(1) * TILE_HEADS + member % TILE_HEADS
    exists = (member < TILE_TOKENS * TILE_HEADS) & (token < stop) & (query_head < HEADS)
    position = tl.where(row >= 0, tl.load(positions_ptr + token, mask=exists, other=-1), -1)
    head = token.to(tl.int64) * HEADS + query_head
    state = attend_latents(
        query_ptr, rotary_ptr, head, exists, position,
        LatentPool(pool_ptr, page_table_ptr, PAGE, LATENT, LATENT_PADDED, ROTARY, ROTARY_PADDED),
        0, tl.max(position, 0) + 1, SCALE, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip
    store_rows(out_ptr + head * LATENT, softmax_mean(state), exists, LATENT, LATENT_PADDED)
