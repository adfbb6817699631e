"""The sum of the parts of a split-k product, and its epilogue."""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.product_output import Output, load_extras_at, store_epilogue
from llmc.codegen.backends.triton.kernels.tile_masks import bound


@triton.jit
def splitk_combine(
    partial_ptr,  # [SPLITS, M, N] in float32
    output: Output,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """BLOCK columns of one token."""
    wait_for_previous(DEPENDENT_LAUNCH)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    N: tl.constexpr = output.N
    WHOLE_N: tl.constexpr = N % BLOCK == 0
    mask = bound(column, N, WHOLE_N)
    extras = load_extras_at(output, token, column, WHOLE_N)
    total = tl.load(partial_ptr + (token * N + column), mask=mask)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + ((token + split * output.M) * N + column), mask=mask)
    store_epilogue(output, (total,), extras, token, column, WHOLE_N)
