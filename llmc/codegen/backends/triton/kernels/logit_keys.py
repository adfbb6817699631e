"""Integer keys that order float32 logits, by themselves and packed with token ids.

Keys are int32 and have the order of the logits: NaN is the largest, and both zeros are equal.
"""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-2147483648)  # below the key of every logit; used for ids outside of the vocabulary
HIGHEST_KEY = tl.constexpr(2147483647)


@triton.jit
def key_of(logit):
    """Return the key of a logit. Flipping the lower bits of negative numbers makes integers compare like floats."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(logit == logit, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Return the logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(key, token_id):
    """Pack key and id into an int64 that orders by key, and puts the lower id first among equal keys."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def packed_key(pair):
    """Return the key of a packed pair."""
    return (pair >> 32).to(tl.int32)


@triton.jit
def packed_id(pair):
    """Return the token id of a packed pair."""
    return (0x7FFFFFFF - (pair & 0x7FFFFFFF)).to(tl.int32)
