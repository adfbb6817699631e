"""The sampling parameters that are arithmetic: how they change a logit, and the smallest probability that they keep.

The C++ kernels have the same functions, translated by `llmc.codegen.backends.cpp.sampling_rules`. Therefore a function
of this module consists of assignments and a return; see there for the operations that it may use. `floats_ptr` points
to the float columns of one row. All values are float32, [] or a tile, except that comparisons and `repeated` are bool.
"""

import triton
import triton.language as tl
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS

MIN_P = tl.constexpr(FLOAT_COLUMNS.index("min_p"))
REPETITION_PENALTY = tl.constexpr(FLOAT_COLUMNS.index("repetition_penalty"))
PRESENCE_PENALTY = tl.constexpr(FLOAT_COLUMNS.index("presence_penalty"))
FREQUENCY_PENALTY = tl.constexpr(FLOAT_COLUMNS.index("frequency_penalty"))


@triton.jit
def load_penalties(floats_ptr):
    """Return the parameters of `penalized`."""
    repetition = tl.load(floats_ptr + REPETITION_PENALTY)
    presence = tl.load(floats_ptr + PRESENCE_PENALTY)
    frequency = tl.load(floats_ptr + FREQUENCY_PENALTY)
    return repetition, presence, frequency


@triton.jit
def penalizes(penalties):
    """Return whether `penalized` may change a logit."""
    repetition, presence, frequency = penalties
    return (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def penalized(logit, count, repeated, penalties):
    """Return the changed logit of an id that the output has `count` times; `repeated`: prompt or output have it."""
    repetition, presence, frequency = penalties
    logit = tl.where(repeated, tl.where(logit > 0.0, logit / repetition, logit * repetition), logit)
    return logit - frequency * count - tl.where(count > 0.0, presence, 0.0)


@triton.jit
def least_probability(floats_ptr):
    """Return the smallest probability that is kept, relative to that of the most likely id: 0 (all) to 1."""
    return tl.minimum(tl.maximum(tl.load(floats_ptr + MIN_P), 0.0), 1.0)
