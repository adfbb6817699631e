"""The online softmax that the attention kernels share.

Keys are processed tile by tile; a `SoftmaxState` summarizes the tiles so far, for each query row (Milakov and
Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Logits are multiplied by log2(e), so that exp2
replaces exp.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # below every logit, but finite: the difference of two running maxima is never NaN


@triton.jit
def widened(value, DTYPE: tl.constexpr):
    """Convert values to DTYPE.

    8-bit floats are converted before they take the layout of a factor, in which a thread has no two adjacent columns
    and would load them one by one: the compiler moves no conversion of layouts across the pairs.
    """
    if value.dtype.primitive_bitwidth == 8:
        pairs: tl.constexpr = value.shape[1] // 2
        first, second = tl.split(tl.reshape(value.to(DTYPE), [value.shape[0], pairs, 2]))
        return tl.reshape(tl.join(first, second), [value.shape[0], 2 * pairs])
    else:
        return value.to(DTYPE)


class SoftmaxState(NamedTuple):
    """The summary of the tiles so far, in float32."""

    running_max: tl.tensor  # [ROWS]: the largest logit
    running_sum: tl.tensor  # [ROWS]: the sum of exp2(logit - running_max)
    acc: tl.tensor  # [ROWS, WIDTH]: the sum of the values, each weighted by the same term


@triton.jit
def softmax_start(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the state before the first tile."""
    running_max = tl.full([ROWS], LOWEST, tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    return SoftmaxState(running_max, running_sum, tl.zeros([ROWS, WIDTH], tl.float32))


@triton.jit
def softmax_add_logits(state: SoftmaxState, logits, value, DOT_DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """Return the state after a tile of logits [ROWS, KEYS] times log2(e) and value [KEYS, WIDTH], a factor."""
    new_max = tl.maximum(state.running_max, tl.max(logits, 1))
    weights = tl.exp2(logits - new_max[:, None])
    rescale = tl.exp2(state.running_max - new_max)
    running_sum = state.running_sum * rescale + tl.sum(weights, 1)
    weights = weights.to(DOT_DTYPE)
    if INTERPRET:
        weights = weights.to(tl.float32)
    acc = tl.dot(weights, value, state.acc * rescale[:, None], input_precision="ieee")
    return SoftmaxState(new_max, running_sum, acc)


@triton.jit
def softmax_tile(
    query,
    key,
    value,
    visible,
    state: SoftmaxState,
    scale,
    SOFTCAP: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr,
    bias=None,
):
    """Return the state after one more tile: query [ROWS, D], key [KEYS, D], value [KEYS, WIDTH].

    `visible` [ROWS, KEYS] or [1, KEYS] selects the keys that each query attends to; None selects all of them.
    The products take operands of DOT_DTYPE; logits are multiplied by `scale`. SOFTCAP is 0, or the bound c of logits
    c * tanh(logit / c). `bias` [ROWS, KEYS], if any, is added to the logits, and is a multiple of log2(e) as they are.
    """
    value = widened(value, DOT_DTYPE)
    key = key.to(DOT_DTYPE)
    if INTERPRET:  # the interpreter computes with numpy, which has no bfloat16
        query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    logits = tl.dot(query, tl.trans(key), input_precision="ieee")
    if SOFTCAP != 0:  # tanh(x) = 2 * sigmoid(2 * x) - 1
        logits = tl.sigmoid(logits * (2 * scale / SOFTCAP))
        logits = (2 * logits - 1) * (SOFTCAP * LOG2_E)
    else:
        logits = logits * (scale * LOG2_E)
    if bias is not None:
        logits += bias
    if visible is not None:
        logits = tl.where(visible, logits, float("-inf"))
    return softmax_add_logits(state, logits, value, DOT_DTYPE, INTERPRET)


@triton.jit
def softmax_add_sink(state: SoftmaxState, sink):
    """Return the state after a sink [ROWS], a logit that is added to the sum but has no value."""
    sink = sink.to(tl.float32) * LOG2_E
    new_max = tl.maximum(state.running_max, sink)
    rescale = tl.exp2(state.running_max - new_max)
    running_sum = state.running_sum * rescale + tl.exp2(sink - new_max)
    return SoftmaxState(new_max, running_sum, state.acc * rescale[:, None])


@triton.jit
def softmax_part(state: SoftmaxState, value_scale):
    """Return the mean of a part [ROWS, WIDTH] times `value_scale`, zeros if it has no keys, and its lse [ROWS]."""
    mean = state.acc * (value_scale / tl.maximum(state.running_sum, 1e-30))[:, None]
    return mean, softmax_lse(state)


@triton.jit
def softmax_add_part(state: SoftmaxState, mean, lse):
    """Return the state after one more part, whose mean has the weight exp(lse); a part without keys changes no bit."""
    lse = lse * LOG2_E
    new_max = tl.maximum(state.running_max, lse)
    rescale, weight = tl.exp2(state.running_max - new_max), tl.exp2(lse - new_max)
    running_sum = state.running_sum * rescale + weight
    return SoftmaxState(new_max, running_sum, state.acc * rescale[:, None] + mean * weight[:, None])


@triton.jit
def softmax_mean(state: SoftmaxState):
    """Return the weighted mean of the values [ROWS, WIDTH]; zeros for queries that attend to no key."""
    return state.acc / tl.maximum(state.running_sum, 1e-30)[:, None]


@triton.jit
def softmax_lse(state: SoftmaxState):
    """Return log(sum(exp(logit))) [ROWS] (natural logarithm); -inf for queries that attend to no key."""
    lse = (state.running_max + tl.log2(tl.maximum(state.running_sum, 1e-30))) * LN_2
    return tl.where(state.running_sum > 0, lse, float("-inf"))
