"""Reads of the paged KV pool [pages, 2, KV_HEADS, PAGE, HEAD_DIM]: index 0 of its second axis has keys, index 1 values.

A row of the page table lists the pages of one sequence: token n is in page `table[n // PAGE]`, at place `n % PAGE`.
"""

import triton
import triton.language as tl


@triton.jit
def head_mask(HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Which columns of a padded head exist: [1, HEAD_DIM_PADDED], or [1, 1] if all of them do."""
    if HEAD_DIM == HEAD_DIM_PADDED:
        return tl.full([1, 1], 1, tl.int1)
    else:
        return (tl.arange(0, HEAD_DIM_PADDED) < HEAD_DIM)[None, :]


@triton.jit
def load_pages(page_table_ptr, tokens, end, PAGE: tl.constexpr):
    """The pages of the tokens [KEYS] of one sequence; page 0 for tokens at or behind `end`.

    Loops over tiles load the pages of the next tile in front of the keys of this one. The loads of keys and values
    then depend on no other load of their iteration, and the compiler can keep several tiles in flight.
    """
    return tl.load(page_table_ptr + tokens // PAGE, mask=tokens < end, other=0)


@triton.jit
def key_offsets(pages, tokens, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where the keys of the tokens [KEYS] in `pages` [KEYS] begin, in elements from the first key of the head."""
    return pages.to(tl.int64) * (2 * KV_HEADS * PAGE * HEAD_DIM) + tokens % PAGE * HEAD_DIM


@triton.jit
def load_keys_values(
    kv_ptr,
    offsets,
    wanted,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Keys and values [KEYS, HEAD_DIM_PADDED] at `offsets` [KEYS] from `kv_ptr`, the first key of the head.

    Zeros replace padding columns and the tokens where `wanted` [KEYS] is false: places that hold no token may hold NaN.
    None wants all tokens.
    """
    column = tl.arange(0, HEAD_DIM_PADDED)
    mask = head_mask(HEAD_DIM, HEAD_DIM_PADDED)
    if wanted is not None:
        mask = wanted[:, None] & mask
    key = tl.load(kv_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)
    offsets += KV_HEADS * PAGE * HEAD_DIM
    value = tl.load(kv_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)
    return key, value
