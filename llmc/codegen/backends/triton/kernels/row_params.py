"""The columns of a row's sampling parameters: PARAMS floats and PARAMS integers of the device row."""

import triton.language as tl

PARAMS = tl.constexpr(8)  # columns of the float and of the integer parameters
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
REPETITION_PENALTY = tl.constexpr(3)
PRESENCE_PENALTY = tl.constexpr(4)
FREQUENCY_PENALTY = tl.constexpr(5)
TOP_K = tl.constexpr(0)
SEED_LO = tl.constexpr(1)
SEED_HI = tl.constexpr(2)
PROMPT_LEN = tl.constexpr(3)
MIN_LEN = tl.constexpr(4)  # stop ids are masked until the row has this many tokens
WANT_LOGPROBS = tl.constexpr(5)
NUM_BIASES = tl.constexpr(6)
MASKED = tl.constexpr(7)  # nonzero: only ids in the row's bitmap `allowed` may be sampled
