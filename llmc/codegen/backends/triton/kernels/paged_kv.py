"""The paged KV pool [pages, 2, KV_HEADS, PAGE, HEAD_DIM]; on its second axis, 0 is keys and 1 is values.

A row of the page table lists the pages of one sequence: token n is at index `n % PAGE` of page `table[n // PAGE]`.
A pool of 8-bit floats has scales [2 * KV_HEADS] by which its keys, then its values, are multiplied.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LARGEST_HALF = tl.constexpr(65504.0)


class KeyPool(NamedTuple):
    """The keys and values of one KV head and one sequence."""

    kv_ptr: tl.tensor  # the first key of the head in page 0
    page_table_ptr: tl.tensor  # the sequence's row of the page table
    KV_HEADS: tl.constexpr
    PAGE: tl.constexpr
    HEAD_DIM: tl.constexpr
    HEAD_DIM_PADDED: tl.constexpr


class PagedAttention(NamedTuple):
    """The parameters that all kernels of paged attention share; pointers to operands that a node lacks are None."""

    query_ptr: tl.tensor  # [tokens, HEADS, HEAD_DIM]
    kv_ptr: tl.tensor  # [pages, 2, KV_HEADS, PAGE, HEAD_DIM]
    page_table_ptr: tl.tensor  # [table rows, table_width]
    rows_ptr: tl.tensor  # [row_count]: rows of the page table, -1 for padding; [tokens] without starts
    starts_ptr: tl.tensor  # [row_count + 1]: the first token of each row
    positions_ptr: tl.tensor  # [tokens]: the position of each token in its sequence
    scales_ptr: tl.tensor  # [2 * KV_HEADS]: of the keys and values of a pool of 8-bit floats
    sinks_ptr: tl.tensor  # [HEADS]: see `softmax_add_sink`
    row_count: tl.tensor  # None without starts
    table_width: tl.tensor
    HEADS: tl.constexpr
    KV_HEADS: tl.constexpr
    HEAD_DIM: tl.constexpr
    HEAD_DIM_PADDED: tl.constexpr
    PAGE: tl.constexpr
    SCALE: tl.constexpr
    WINDOW: tl.constexpr  # keys that a query attends to, including its own; 0: all
    SOFTCAP: tl.constexpr  # see `softmax_tile`
    DOT_DTYPE: tl.constexpr
    INTERPRET: tl.constexpr


@triton.jit
def head_scales(scales_ptr, kv_head, KV_HEADS: tl.constexpr):
    """Return the scales (of keys, of values) of a KV head; 1 if the pool has none (scales_ptr is None)."""
    if scales_ptr is None:
        key_scale = tl.full([], 1.0, tl.float32)
        value_scale = tl.full([], 1.0, tl.float32)
    else:
        key_scale = tl.load(scales_ptr + kv_head)
        value_scale = tl.load(scales_ptr + KV_HEADS + kv_head)
    return key_scale, value_scale


@triton.jit
def to_pool(x, inverse_scale, POOL_DTYPE: tl.constexpr):
    """Return keys or values as a pool of 8-bit floats holds them, in float32: what is too large saturates."""
    LARGEST: tl.constexpr = 240.0 if POOL_DTYPE == tl.float8e4b8 else 448.0
    return tl.clamp(x * inverse_scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_factor(query, DOT_DTYPE: tl.constexpr):
    """Return queries as factors of a product; what is too large for float16 saturates."""
    if query.dtype != DOT_DTYPE:
        query = query.to(tl.float32)
        if DOT_DTYPE == tl.float16:
            query = tl.clamp(query, -LARGEST_HALF, LARGEST_HALF, propagate_nan=tl.PropagateNan.ALL)
    return query.to(DOT_DTYPE)


@triton.jit
def head_mask(HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Return the mask of the columns of a padded head: [1, HEAD_DIM_PADDED], or [1, 1] if there is no padding."""
    if HEAD_DIM == HEAD_DIM_PADDED:
        return tl.full([1, 1], 1, tl.int1)
    else:
        return (tl.arange(0, HEAD_DIM_PADDED) < HEAD_DIM)[None, :]


@triton.jit
def load_rows(pointers, exists, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load SIZE columns [ROWS, PADDED] of rows at `pointers` [ROWS]; zeros as padding, and for rows not in `exists`."""
    mask = exists[:, None] & head_mask(SIZE, PADDED)
    return tl.load(pointers[:, None] + tl.arange(0, PADDED)[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointers, rows, exists, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store the first SIZE columns of the rows [ROWS, PADDED] that are in `exists` at `pointers` [ROWS]."""
    mask = exists[:, None] & head_mask(SIZE, PADDED)
    tl.store(pointers[:, None] + tl.arange(0, PADDED)[None, :], rows.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def load_pages(page_table_ptr, tokens, end, PAGE: tl.constexpr):
    """Load the pages of the tokens [KEYS] of one sequence; page 0 for tokens from `end` on.

    Loops over tiles load the pages of the next tile before the keys of the current one. The loads of keys and values
    then depend on no other load of their iteration, and the compiler can keep several tiles in flight.
    """
    return tl.load(page_table_ptr + tokens // PAGE, mask=tokens < end, other=0)


@triton.jit
def key_offsets(pool: KeyPool, pages, tokens):
    """Return the offsets of the keys of tokens [KEYS] in `pages` [KEYS], in elements from the head's first key."""
    page_size: tl.constexpr = 2 * pool.KV_HEADS * pool.PAGE * pool.HEAD_DIM
    return pages.to(tl.int64) * page_size + tokens % pool.PAGE * pool.HEAD_DIM


@triton.jit
def load_keys_values(pool: KeyPool, offsets, key_mask):
    """Load keys and values [KEYS, HEAD_DIM_PADDED] at `offsets` [KEYS], which `key_offsets` returns.

    Padding columns, and tokens for which `key_mask` [KEYS] is false, are zeros; None selects all tokens. Unused
    slots of the pool must be masked, because they may contain NaN.
    """
    column = tl.arange(0, pool.HEAD_DIM_PADDED)
    mask = head_mask(pool.HEAD_DIM, pool.HEAD_DIM_PADDED)
    if key_mask is not None:
        mask = key_mask[:, None] & mask
    key = tl.load(pool.kv_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)
    offsets += pool.KV_HEADS * pool.PAGE * pool.HEAD_DIM
    value = tl.load(pool.kv_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)
    return key, value
