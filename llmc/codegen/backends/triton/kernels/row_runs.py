"""Runs: the adjacent entries of a step that have the same device row.

The first entry of a run stands for it. The tokens of an entry without a row, and those after the last entry, are
padding, which counts as a run without a row.
"""

import triton
import triton.language as tl

NEARBY = tl.constexpr(32)  # entries that `find_run` compares at once
ENTRIES_PER_STEP = tl.constexpr(128)  # entries that `find_run_tile` compares at once


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


@triton.jit
def find_run_tile(rows_ptr, starts_ptr, row_count, TILE: tl.constexpr):
    """Return (entry, tile): the entry that begins the run of this program's tile, and the number of the tile in it.

    The first tile of a run that begins at entry i has the number starts[i] // TILE + i, so that the tiles of different
    runs never overlap; the last ones may be after the tokens of their run.
    """
    program = tl.program_id(0)
    entry = program * 0
    for first in range(0, row_count + 1, ENTRIES_PER_STEP):
        candidate = first + tl.arange(0, ENTRIES_PER_STEP)
        exists = candidate <= row_count
        row = tl.load(rows_ptr + candidate, mask=candidate < row_count, other=-1)
        before = tl.load(rows_ptr + candidate - 1, mask=exists & (candidate > 0), other=-1)
        starts = tl.load(starts_ptr + candidate, mask=exists, other=0)
        begun = exists & ((row < 0) | (row != before)) & (starts // TILE + candidate <= program)
        entry = tl.maximum(entry, tl.max(tl.where(begun, candidate, 0), 0))
    return entry, program - tl.load(starts_ptr + entry) // TILE - entry
