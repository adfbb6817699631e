"""Integer keys that order float32 logits, alone and packed with token ids.

Keys are int32 and order as logits do: NaN above all, both zeros equal.
"""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-2147483648)  # below the key of every logit: stands for ids behind the vocabulary
HIGHEST_KEY = tl.constexpr(2147483647)


@triton.jit
def key_of(logit):
    """Flip the lower bits of negative numbers, so that integers compare as the floats do."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(logit == logit, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(key, token_id):
    """One int64 that orders by key, and among equal keys by the lower id."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def packed_key(pair):
    """The key of a packed pair."""
    return (pair >> 32).to(tl.int32)


@triton.jit
def packed_id(pair):
    """The token id of a packed pair."""
    return (0x7FFFFFFF - (pair & 0x7FFFFFFF)).to(tl.int32)
