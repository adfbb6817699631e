"""The result of a product [M, N], and the epilogue that computes it from the sums."""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.tile_masks import bound


class Output(NamedTuple):
    """The parameters that all products share: their result and its epilogue."""

    out_ptr: tl.tensor  # [M, N]
    extra_ptrs: tl.tensor  # a tuple of the other operands of the epilogue, as LOAD_EXTRAS takes them
    M: tl.tensor
    N: tl.constexpr
    WHOLE_M: tl.constexpr  # the rows of a tile divide M
    LOAD_EXTRAS: tl.constexpr  # (extra_ptrs, tokens, columns, token mask, column mask) -> tuple
    EPILOGUE: tl.constexpr  # (sums of each part, extras) -> float32


@triton.jit
def load_extras_at(output: Output, token, column, WHOLE_N: tl.constexpr):
    """Load the other operands of the epilogue at tokens and columns, of which a block divides N if WHOLE_N."""
    token_mask, column_mask = bound(token, output.M, output.WHOLE_M), bound(column, output.N, WHOLE_N)
    return output.LOAD_EXTRAS(output.extra_ptrs, token, column, token_mask, column_mask)


@triton.jit
def store_epilogue(output: Output, sums, extras, token, column, WHOLE_N: tl.constexpr):
    """Store the epilogue of the sums of each part at tokens and columns."""
    mask = bound(token, output.M, output.WHOLE_M) & bound(column, output.N, WHOLE_N)
    out = output.EPILOGUE(sums, extras)
    tl.store(output.out_ptr + (token * output.N + column), out.to(output.out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_product(output: Output, sums, token, column, WHOLE_N: tl.constexpr):
    """Load the other operands of the epilogue, and store it at tokens and columns."""
    extras = load_extras_at(output, token, column, WHOLE_N)
    store_epilogue(output, sums, extras, token, column, WHOLE_N)
