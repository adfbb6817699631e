"""Runs: the adjacent entries of a step that have the same device row.

The first entry of a run stands for it. The tokens of an entry without a row, and those after the last entry, are
padding, which counts as a run without a row.
"""

import triton
import triton.language as tl

NEARBY = tl.constexpr(32)  # entries that are compared at once


@triton.jit
def find_run(rows_ptr, starts_ptr, row_count, token_count, entry):
    """Return (row, first token, end of the tokens) of the run that begins at an entry; `row_count` is the last padding.

    The row is -1 for padding. A run that began before the entry has no tokens here. The loads of the nearest entries do
    not depend on each other.
    """
    row = tl.load(rows_ptr + entry, mask=entry < row_count, other=-1)
    before = tl.load(rows_ptr + entry - 1, mask=(entry > 0) & (entry < row_count), other=-1)
    begin = tl.load(starts_ptr + entry)
    index = tl.arange(0, NEARBY)
    follower = entry + 1 + index
    others = tl.load(rows_ptr + follower, mask=follower < row_count, other=-1) != row
    ends = tl.load(starts_ptr + follower, mask=follower <= row_count, other=0)
    length = tl.min(tl.where(others, index, NEARBY), 0)
    end = tl.sum(tl.where(index == length, ends, 0), 0)
    if row < 0:
        end = tl.load(starts_ptr + entry + 1, mask=entry < row_count, other=token_count)
    elif before == row:
        end = begin
    elif length == NEARBY:
        last = entry + NEARBY
        while length == NEARBY:
            follower = last + 1 + index
            others = tl.load(rows_ptr + follower, mask=follower < row_count, other=-1) != row
            length = tl.min(tl.where(others, index, NEARBY), 0)
            last += length
        end = tl.load(starts_ptr + last + 1)
    return row, begin, end
