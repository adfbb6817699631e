"""Latent attention over pages: all heads share one key per token, whose first part is the value.

The pool is [pages, PAGE, LATENT + ROTARY]. A program computes a tile of query rows, which are tokens of one sequence
times heads. A tile of latents is loaded once, for both products; the rotary parts of queries and keys have a product of
their own, whose sums continue in the same logits.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.decode_attention import find_row, key_range
from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.online_softmax import LOG2_E, softmax_lse, softmax_mean, softmax_start
from llmc.codegen.backends.triton.kernels.paged_kv import head_mask, load_pages, to_factor
from llmc.codegen.backends.triton.kernels.prefill_attention import find_tile


@triton.jit
def load_part(pointers, exists, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load SIZE columns [ROWS, PADDED] of rows at `pointers` [ROWS]; zeros as padding, and for rows not in `exists`."""
    mask = exists[:, None] & head_mask(SIZE, PADDED)
    return tl.load(pointers[:, None] + tl.arange(0, PADDED)[None, :], mask=mask, other=0.0)


@triton.jit
def attend_latents(
    query,
    query_rotary,
    pool_ptr,
    page_table_ptr,
    positions,
    begin,
    end,
    SCALE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the softmax state of query rows at `positions` [ROWS] of one sequence, after the keys from `begin` to
    `end`; see kernels/online_softmax.py.

    A query attends to the keys up to its position. `page_table_ptr` points to the sequence's row.
    """
    running_max, running_sum, acc = softmax_start(query.shape[0], LATENT_PADDED)
    pages = load_pages(page_table_ptr, begin + tl.arange(0, KEYS_PER_TILE), end, PAGE)
    for tile in range(begin, end, KEYS_PER_TILE):
        keys = tile + tl.arange(0, KEYS_PER_TILE)
        # Without this, Triton 3.6 copies rows of the pool 16 bytes at a time even if they are aligned to fewer.
        slot = tl.multiple_of(pages.to(tl.int64) * PAGE + keys % PAGE, 1)
        at = pool_ptr + slot * (LATENT + ROTARY)
        pages = load_pages(page_table_ptr, keys + KEYS_PER_TILE, end, PAGE)
        exists = keys < end
        latent = load_part(at, exists, LATENT, LATENT_PADDED).to(DOT_DTYPE)
        rotary = load_part(at + LATENT, exists, ROTARY, ROTARY_PADDED).to(DOT_DTYPE)
        if INTERPRET:  # the interpreter computes with numpy, which has no bfloat16
            latent, rotary = latent.to(tl.float32), rotary.to(tl.float32)
        logits = tl.dot(query, tl.trans(latent), input_precision="ieee")
        logits = tl.dot(query_rotary, tl.trans(rotary), logits, input_precision="ieee")
        visible = exists[None, :] & (keys[None, :] <= positions[:, None])
        logits = tl.where(visible, logits * (SCALE * LOG2_E), float("-inf"))
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        weights = tl.exp2(logits - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        weights = weights.to(DOT_DTYPE)
        if INTERPRET:
            weights = weights.to(tl.float32)
        acc = tl.dot(weights, latent, acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return running_max, running_sum, acc


@triton.jit
def load_queries(
    query_ptr,
    rotary_ptr,
    head,
    exists,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the two parts of the queries [ROWS] with the numbers `head` (token * HEADS + head), zeros for padding."""
    query = to_factor(load_part(query_ptr + head * LATENT, exists, LATENT, LATENT_PADDED), DOT_DTYPE)
    rotary = to_factor(load_part(rotary_ptr + head * ROTARY, exists, ROTARY, ROTARY_PADDED), DOT_DTYPE)
    if INTERPRET:
        query, rotary = query.to(tl.float32), rotary.to(tl.float32)
    return query, rotary


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
    query, rotary = load_queries(
        query_ptr, rotary_ptr, head, exists, LATENT, LATENT_PADDED, ROTARY, ROTARY_PADDED, DOT_DTYPE, INTERPRET
    )
    positions = length - 1 + member * 0
    running_max, running_sum, acc = attend_latents(
        query, rotary, pool_ptr, page_table_ptr, positions, begin, end, SCALE,
        LATENT, LATENT_PADDED, ROTARY, ROTARY_PADDED, PAGE, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip
    part = head * SPLITS + tl.program_id(2)
    mask = exists[:, None] & head_mask(LATENT, LATENT_PADDED)
    out = partial_ptr + (part * LATENT)[:, None] + tl.arange(0, LATENT_PADDED)[None, :]
    tl.store(out, softmax_mean(running_sum, acc), mask=mask)
    tl.store(lse_ptr + part, softmax_lse(running_max, running_sum), mask=exists)


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
    query, rotary = load_queries(
        query_ptr, rotary_ptr, head, exists, LATENT, LATENT_PADDED, ROTARY, ROTARY_PADDED, DOT_DTYPE, INTERPRET
    )
    _, running_sum, acc = attend_latents(
        query, rotary, pool_ptr, page_table_ptr, position, 0, tl.max(position, 0) + 1, SCALE,
        LATENT, LATENT_PADDED, ROTARY, ROTARY_PADDED, PAGE, KEYS_PER_TILE, DOT_DTYPE, INTERPRET,
    )  # fmt: skip
    out = softmax_mean(running_sum, acc).to(out_ptr.dtype.element_ty)
    mask = exists[:, None] & head_mask(LATENT, LATENT_PADDED)
    tl.store(out_ptr + (head * LATENT)[:, None] + tl.arange(0, LATENT_PADDED)[None, :], out, mask=mask)
