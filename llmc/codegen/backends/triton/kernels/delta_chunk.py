"""Chunks of tokens of linear recurrences as matrix products (Yang et al. 2024, arXiv 2412.06464, section 3.3).

With G[i] the sum of the decays of a chunk up to token i, the values u that the chunk adds to the state S solve
(I + L) u = beta (v - exp(G) S^T k), where L[i, j] = beta[i] exp(G[i] - G[j]) (k[i] . k[j]) for j < i. Without the
delta rule, u = v. `chunk_factors` computes, for all chunks at once, the factors of u in the results, and the inverse of
I + L with its columns times beta; `add_chunk` is one step of a run.

Its products have fewer than 64 rows, so that they use mma instructions also on Hopper. With the 64 wgmma instructions
of a chunk of 64 tokens, descriptors in uniform registers were wrong in some programs (ptxas 12.8, H200).
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.row_runs import find_run, find_run_tile


@triton.jit
def unit_inverse(lower, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Return the inverse of I + lower for a strictly lower triangular matrix [SIZE, SIZE], SIZE = 2 ** LEVELS.

    Invariant: `inverse` is the inverse of the blocks on the diagonal, whose size doubles in each step. Its entries are
    those of the result, so that no large numbers cancel each other, as powers of `lower` would.
    """
    i = tl.arange(0, SIZE)[:, None]
    j = tl.arange(0, SIZE)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in range(1, LEVELS):
        below = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        inverse -= tl.dot(inverse, tl.dot(tl.where(below, lower, 0.0), inverse))
    return inverse


@triton.jit
def chunk_factors(
    q_ptr,  # [token_count, KEY_HEADS, KEY_DIM]
    k_ptr,  # [token_count, KEY_HEADS, KEY_DIM]
    decay_ptr,  # [token_count, VALUE_HEADS]: logarithms
    beta_ptr,  # [token_count, VALUE_HEADS], or None without the delta rule
    rows_ptr,  # [row_count]: the device row of each entry, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each entry
    out_ptr,  # [token_count, VALUE_HEADS, MATRICES, CHUNK]
    row_count,
    token_count,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    MATRICES: tl.constexpr,  # 2 with the delta rule, else 1
    CHUNK: tl.constexpr,  # a power of two
    CHUNK_LEVELS: tl.constexpr,  # the logarithm of CHUNK
    LEAST: tl.constexpr,  # tokens of a run that is computed in chunks
    DOT_DTYPE: tl.constexpr,  # dtype of queries and keys in products with each other
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Compute the matrices of one chunk of a run, for one value head; shorter runs and padding have zeros."""
    wait_for_previous(DEPENDENT_LAUNCH)
    entry, tile = find_run_tile(rows_ptr, starts_ptr, row_count, CHUNK)
    row, begin, end = find_run(rows_ptr, starts_ptr, row_count, token_count, entry)
    if begin + tile * CHUNK >= end:
        return
    head = tl.program_id(1)
    index = tl.arange(0, CHUNK)
    token = begin + tile * CHUNK + index
    live = token < end
    at = token.to(tl.int64)[:, None] * (VALUE_HEADS * MATRICES * CHUNK) + index[None, :]
    out_ptr += head * (MATRICES * CHUNK)
    if (row < 0) | (end - begin < LEAST):
        for matrix in tl.static_range(MATRICES):
            tl.store(out_ptr + matrix * CHUNK + at, tl.zeros([CHUNK, CHUNK], tl.float32), mask=live[:, None])
        return
    d = tl.arange(0, KEY_PADDED)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    key_at = token.to(tl.int64)[:, None] * (KEY_HEADS * KEY_DIM) + (key_head * KEY_DIM + d)[None, :]
    key_mask = live[:, None] & (d < KEY_DIM)[None, :]
    q = tl.load(q_ptr + key_at, mask=key_mask, other=0.0).to(DOT_DTYPE)
    k = tl.load(k_ptr + key_at, mask=key_mask, other=0.0).to(DOT_DTYPE)
    scalar_at = token.to(tl.int64) * VALUE_HEADS + head
    since = tl.cumsum(tl.load(decay_ptr + scalar_at, mask=live, other=0.0), 0)
    visible = index[:, None] >= index[None, :]
    between = tl.where(visible, tl.exp(tl.where(visible, since[:, None] - since[None, :], 0.0)), 0.0)
    tl.store(out_ptr + at, tl.dot(q, tl.trans(k)) * between, mask=live[:, None])
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + scalar_at, mask=live, other=0.0)
        similar = tl.dot(k, tl.trans(k)) * between * beta[:, None]
        below = index[:, None] > index[None, :]
        inverse = unit_inverse(tl.where(below, similar, 0.0), CHUNK, CHUNK_LEVELS)
        tl.store(out_ptr + CHUNK + at, inverse * beta[None, :], mask=live[:, None])


@triton.jit
def times(a, b, DOT_DTYPE: tl.constexpr):
    """Return the product of `a`, whose elements DOT_DTYPE holds exactly, and the float32 matrix `b`.

    With bfloat16, `b` is the sum of two factors, which have 16 bits together; else tensor cores round it to TF32.
    """
    if DOT_DTYPE == tl.bfloat16:
        high = b.to(tl.bfloat16)
        low = (b - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(a, low, tl.dot(a, high))
    else:
        return tl.dot(a.to(tl.float32), b)


@triton.jit
def times_exact(a, b, DOT_DTYPE: tl.constexpr):
    """Return the product of the float32 matrix `a` and `b`, whose elements DOT_DTYPE holds exactly; see `times`."""
    if DOT_DTYPE == tl.bfloat16:
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, b, tl.dot(high, b))
    else:
        return tl.dot(a, b.to(tl.float32))


@triton.jit
def add_chunk(state, head, factors_ptr, column, begin, end, CHUNK: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Return the state [KEY_PADDED, VALUE_BLOCK] after CHUNK tokens or those up to `end`, and store their results.

    head: see `row_recurrence.Head`. factors_ptr: of the run's head, see `chunk_factors`. Tokens from `end` on have
    keys, values and decays of zero.
    """
    MATRICES: tl.constexpr = 1 if head.beta_ptr is None else 2
    index = tl.arange(0, CHUNK)
    token = begin + index
    live = token < end
    row = tl.arange(0, head.KEY_PADDED)
    key_at = token.to(tl.int64)[:, None] * (head.KEY_HEADS * head.KEY_DIM) + row[None, :]
    key_mask = live[:, None] & (row < head.KEY_DIM)[None, :]
    value_at = token.to(tl.int64)[:, None] * (head.VALUE_HEADS * head.VALUE_DIM) + column[None, :]
    value_mask = live[:, None] & (column < head.VALUE_DIM)[None, :]
    factor_at = token.to(tl.int64)[:, None] * (head.VALUE_HEADS * MATRICES * CHUNK) + index[None, :]
    k = tl.load(head.k_ptr + key_at, mask=key_mask, other=0.0).to(DOT_DTYPE)
    q = tl.load(head.q_ptr + key_at, mask=key_mask, other=0.0).to(DOT_DTYPE)
    u = tl.load(head.v_ptr + value_at, mask=value_mask, other=0.0).to(tl.float32)
    decay = tl.load(head.decay_ptr + token.to(tl.int64) * head.VALUE_HEADS, mask=live, other=0.0)
    since = tl.cumsum(decay, 0)
    total = tl.sum(decay, 0)
    if head.beta_ptr is not None:
        inverse = tl.load(factors_ptr + CHUNK + factor_at, mask=live[:, None], other=0.0)
        u = tl.dot(inverse, u - tl.exp(since)[:, None] * times(k, state, DOT_DTYPE))
    similar = tl.load(factors_ptr + factor_at, mask=live[:, None], other=0.0)
    y = tl.dot(similar, u, tl.exp(since)[:, None] * times(q, state, DOT_DTYPE))
    tl.store(head.out_ptr + value_at, y.to(head.out_ptr.dtype.element_ty), mask=value_mask)
    added = times_exact(tl.trans(u * tl.exp(total - since)[:, None]), k, DOT_DTYPE)
    return state * tl.exp(total) + tl.trans(added)
