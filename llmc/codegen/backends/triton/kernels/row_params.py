"""The columns of the device row that sampling kernels read: PARAMS floats and PARAMS integers of a row.

`sampling_rules.py` has the columns of its parameters.
"""

import triton.language as tl
from llmc_runtime.format.row_abi import WIDTH
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS, INT_COLUMNS

PARAMS = tl.constexpr(WIDTH)  # columns of the float and of the integer parameters
TEMPERATURE = tl.constexpr(FLOAT_COLUMNS.index("temperature"))
TOP_P = tl.constexpr(FLOAT_COLUMNS.index("top_p"))
TOP_K = tl.constexpr(INT_COLUMNS.index("top_k"))
SEED_LO = tl.constexpr(INT_COLUMNS.index("seed_lo"))
SEED_HI = tl.constexpr(INT_COLUMNS.index("seed_hi"))
PROMPT_LEN = tl.constexpr(INT_COLUMNS.index("prompt_len"))
MIN_LEN = tl.constexpr(INT_COLUMNS.index("min_len"))  # stop ids are masked until the row has this many tokens
WANT_LOGPROBS = tl.constexpr(INT_COLUMNS.index("want_logprobs"))
NUM_BIASES = tl.constexpr(INT_COLUMNS.index("num_biases"))
MASKED = tl.constexpr(INT_COLUMNS.index("masked"))  # number of the row's bitmaps `allowed` (see row_mask)
