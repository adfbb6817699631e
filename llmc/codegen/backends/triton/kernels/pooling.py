"""Kernels that pool prompts: first tokens, last positions, means, and the rows' new lengths.

Rows and entries are those of `row_state`: an entry of a step has a row, or -1 for padding, and a number of tokens.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous


@triton.jit
def row_first(
    starts_ptr,  # [entry_count + 1]
    out_ptr,  # [entry_count]
    entry_count,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The first flat token of each entry; -1 for entries without tokens."""
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    start = tl.load(starts_ptr + entry, mask=entry < entry_count, other=0)
    end = tl.load(starts_ptr + entry + 1, mask=entry < entry_count, other=0)
    tl.store(out_ptr + entry, tl.where(end > start, start, -1), mask=entry < entry_count)


@triton.jit
def row_reach(
    starts_ptr,  # [entry_count + 1]
    positions_ptr,  # [token_count]
    out_ptr,  # [token_count]
    entry_count,
    token_count,
    TOKENS_PER_PROGRAM: tl.constexpr,
    ENTRIES_PER_STEP: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """For each token the position of its entry's last token; -1 for padding."""
    token = tl.program_id(0) * TOKENS_PER_PROGRAM + tl.arange(0, TOKENS_PER_PROGRAM)
    wait_for_previous(DEPENDENT_LAUNCH)
    end = tl.full([TOKENS_PER_PROGRAM], 0, tl.int32)
    for first in range(0, entry_count, ENTRIES_PER_STEP):
        entry = first + tl.arange(0, ENTRIES_PER_STEP)
        begins = tl.load(starts_ptr + entry, mask=entry < entry_count, other=0)
        ends = tl.load(starts_ptr + entry + 1, mask=entry < entry_count, other=0)
        is_inside = (begins[None, :] <= token[:, None]) & (token[:, None] < ends[None, :])
        end += tl.sum(tl.where(is_inside, ends[None, :], 0), 1)
    position = tl.load(positions_ptr + token, mask=token < token_count, other=-1)
    last = tl.load(positions_ptr + end - 1, mask=(end > 0) & (position >= 0), other=-1)
    tl.store(out_ptr + token, last, mask=token < token_count)


@triton.jit
def row_mean(
    x_ptr,  # [tokens, columns]
    starts_ptr,  # [entries + 1]
    out_ptr,  # [entries, columns]
    columns,
    TOKENS_PER_TILE: tl.constexpr,
    COLUMNS_PER_PROGRAM: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The mean of the tokens of one entry, for a block of columns."""
    entry = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS_PER_PROGRAM + tl.arange(0, COLUMNS_PER_PROGRAM)
    wait_for_previous(DEPENDENT_LAUNCH)
    start = tl.load(starts_ptr + entry)
    end = tl.load(starts_ptr + entry + 1)
    total = tl.zeros([COLUMNS_PER_PROGRAM], tl.float32)
    for first in range(start, end, TOKENS_PER_TILE):
        token = first + tl.arange(0, TOKENS_PER_TILE)
        mask = (token < end)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + token.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    mean = total / tl.maximum(end - start, 1).to(tl.float32)
    tl.store(out_ptr + entry.to(tl.int64) * columns + column, mean, mask=column < columns)


@triton.jit
def row_advance(
    length_ptr,  # [rows]: updated
    rows_ptr,  # [entry_count]
    starts_ptr,  # [entry_count + 1]
    positions_ptr,  # [tokens]
    entry_count,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Set the length of each row to the number of computed tokens.

    Of the entries of one row only the last one writes.
    """
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.load(rows_ptr + entry, mask=entry < entry_count, other=-1)
    start = tl.load(starts_ptr + entry, mask=entry < entry_count, other=0)
    end = tl.load(starts_ptr + entry + 1, mask=entry < entry_count, other=0)
    next_row = tl.load(rows_ptr + entry + 1, mask=entry + 1 < entry_count, other=-1)
    writes = (row >= 0) & (start < end) & (next_row != row)
    length = tl.load(positions_ptr + end - 1, mask=writes, other=0) + 1
    tl.store(length_ptr + row, length, mask=writes)
