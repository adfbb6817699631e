"""The sum of the parts of a split-k product, and its epilogue."""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.tile_masks import bound


@triton.jit
def splitk_combine(
    partial_ptr,  # [SPLITS, M, N] in float32
    out_ptr,  # [M, N]
    extra_ptrs,  # the other operands of the epilogue, as LOAD_EXTRAS takes them
    M,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    LOAD_EXTRAS: tl.constexpr,  # (extra_ptrs, token, columns, token mask, column mask) -> tuple
    EPILOGUE: tl.constexpr,  # (sums of each part, extras) -> float32
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """BLOCK columns of one token."""
    wait_for_previous(DEPENDENT_LAUNCH)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = bound(column, N, N % BLOCK == 0)
    extras = LOAD_EXTRAS(extra_ptrs, token, column, tl.full((), True, tl.int1), mask)
    total = tl.load(partial_ptr + (token * N + column), mask=mask)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + ((token + split * M) * N + column), mask=mask)
    out = EPILOGUE((total,), extras)
    tl.store(out_ptr + (token * N + column), out.to(out_ptr.dtype.element_ty), mask=mask)
