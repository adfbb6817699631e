"""A chunk of tokens of a linear recurrence as matrix products (Yang et al. 2024, arXiv 2412.06464, section 3.3).

With G[i] the sum of the decays up to token i, the values u that a chunk adds to the state S solve (I + L) u = r, where
r[i] = beta[i] (v[i] - exp(G[i]) S^T k[i]) and L[i, j] = beta[i] exp(G[i] - G[j]) (k[i] . k[j]) for j < i. Without the
delta rule, u = v. Factors that are float32 are rounded by tensor cores to TF32.
"""

import triton
import triton.language as tl


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
def add_chunk(
    state, head, column, begin, end, CHUNK: tl.constexpr, LEVELS: tl.constexpr, DOT_DTYPE: tl.constexpr
):  # fmt: skip
    """Return the state [KEY_PADDED, VALUE_BLOCK] after CHUNK tokens or those up to `end`, and store their results.

    head: see `row_recurrence.Head`. Tokens from `end` on have keys, values and decays of zero.
    """
    index = tl.arange(0, CHUNK)
    token = begin + index
    live = token < end
    row = tl.arange(0, head.KEY_PADDED)
    key_at = token.to(tl.int64)[:, None] * (head.KEY_HEADS * head.KEY_DIM) + row[None, :]
    key_mask = live[:, None] & (row < head.KEY_DIM)[None, :]
    value_at = token.to(tl.int64)[:, None] * (head.VALUE_HEADS * head.VALUE_DIM) + column[None, :]
    value_mask = live[:, None] & (column < head.VALUE_DIM)[None, :]
    scalar_at = token.to(tl.int64) * head.VALUE_HEADS
    k = tl.load(head.k_ptr + key_at, mask=key_mask, other=0.0).to(DOT_DTYPE)
    q = tl.load(head.q_ptr + key_at, mask=key_mask, other=0.0).to(DOT_DTYPE)
    u = tl.load(head.v_ptr + value_at, mask=value_mask, other=0.0).to(tl.float32)
    decay = tl.load(head.decay_ptr + scalar_at, mask=live, other=0.0)
    decays = tl.cumsum(decay, 0)
    since_begin = tl.exp(decays)[:, None]
    visible = index[:, None] >= index[None, :]
    between = tl.where(visible, tl.exp(tl.where(visible, decays[:, None] - decays[None, :], 0.0)), 0.0)
    if head.beta_ptr is not None:
        beta = tl.load(head.beta_ptr + scalar_at, mask=live, other=0.0)[:, None]
        similar = tl.dot(k, tl.trans(k)) * between * beta
        inverse = unit_inverse(tl.where(index[:, None] > index[None, :], similar, 0.0), CHUNK, LEVELS)
        u = tl.dot(inverse, beta * (u - since_begin * tl.dot(k.to(tl.float32), state)))
    y = tl.dot(tl.dot(q, tl.trans(k)) * between, u) + since_begin * tl.dot(q.to(tl.float32), state)
    tl.store(head.out_ptr + value_at, y.to(head.out_ptr.dtype.element_ty), mask=value_mask)
    all_decays = tl.sum(decay, 0)
    until_end = tl.exp(all_decays - decays)[:, None]
    return state * tl.exp(all_decays) + tl.dot(tl.trans(k.to(tl.float32) * until_end), u)
