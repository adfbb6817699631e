"""take_norm in Triton: a program takes and normalizes one row."""

import triton
import triton.language as tl

from llmc.extend.device_functions import wait_for_previous


@triton.jit
def take_norm_row(
    x_ptr,  # [rows of x, WIDTH]
    rows_ptr,  # [programs]: the row of x to take; a negative index yields zeros
    weight_ptr,  # [WIDTH]
    out_ptr,  # [programs, WIDTH]
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,  # WIDTH rounded up to a power of two
    EPS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Normalize one row of x in float32."""
    wait_for_previous(DEPENDENT_LAUNCH)
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + program).to(tl.int64)
    column = tl.arange(0, WIDTH_PADDED)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside & (row >= 0), other=0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x) / WIDTH + EPS)
    weight = tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)
    tl.store(out_ptr + program * WIDTH + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)
