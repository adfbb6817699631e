"""Kernels over device rows: a step's flat token axis, token ids and pool slots, and the commit.

A row is the state of one sequence. An entry of a step has a row, or -1 for padding, and a number of new tokens; entries
of the same row are adjacent. All values are int32.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous


@triton.jit
def larger(a, b):
    """The combining function of a running maximum."""
    return tl.maximum(a, b)


@triton.jit
def lay_out_tokens(
    rows_ptr,
    counts_ptr,
    length_ptr,
    starts_ptr,
    entry_count,
    tokens,
    TOKENS_PER_PROGRAM: tl.constexpr,
    ENTRIES_PER_STEP: tl.constexpr,
):
    """Return (row, position) of the flat tokens [TOKENS_PER_PROGRAM], -1 for padding; the first program stores starts.

    Every program sums the counts of all entries, so that one launch suffices. Invariant of the loop: `before` is the
    number of tokens of the entries processed so far, and `row_start` the first token of the last entry's row.
    """
    token_row = tl.full([TOKENS_PER_PROGRAM], -1, tl.int32)
    position = tl.full([TOKENS_PER_PROGRAM], -1, tl.int32)
    before = tl.full([], 0, tl.int32)
    row_start = tl.full([], 0, tl.int32)
    for first in range(0, entry_count, ENTRIES_PER_STEP):
        entry = first + tl.arange(0, ENTRIES_PER_STEP)
        exists = entry < entry_count
        count = tl.load(counts_ptr + entry, mask=exists, other=0)
        row = tl.load(rows_ptr + entry, mask=exists, other=-1)
        length = tl.load(length_ptr + row, mask=row >= 0, other=0)
        ends = before + tl.cumsum(count, 0)
        begins = ends - count
        continues = (entry > 0) & (tl.load(rows_ptr + entry - 1, mask=(entry > 0) & exists, other=-1) == row)
        row_starts = tl.maximum(tl.associative_scan(tl.where(continues, 0, begins), 0, larger), row_start)
        if tl.program_id(0) == 0:
            tl.store(starts_ptr + 1 + entry, ends, mask=exists)
        is_inside = (begins[None, :] <= tokens[:, None]) & (tokens[:, None] < ends[None, :]) & (row >= 0)[None, :]
        token_row += tl.sum(tl.where(is_inside, row[None, :] + 1, 0), 1)
        position += tl.sum(tl.where(is_inside, (length - row_starts)[None, :] + tokens[:, None] + 1, 0), 1)
        before += tl.sum(count, 0)
        row_start = tl.max(row_starts, 0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr, 0)
    return token_row, position


@triton.jit
def store_ids(token_ids_ptr, out_ptr, tokens, token_row, position, token_count, max_length):
    """Look up the ids of tokens in the rows' history [rows, max_length]; 0 for tokens without a row."""
    live = (tokens < token_count) & (token_row >= 0)
    ids = tl.load(token_ids_ptr + token_row.to(tl.int64) * max_length + position, mask=live, other=0)
    tl.store(out_ptr + tokens, ids, mask=tokens < token_count)


@triton.jit
def store_slots(page_table_ptr, out_ptr, tokens, token_row, position, token_count, table_width, PAGE: tl.constexpr):
    """Look up the pool slots of tokens in the page table [rows, table_width]; -1 without a row or position."""
    live = (tokens < token_count) & (token_row >= 0) & (position >= 0)
    pages_ptr = page_table_ptr + token_row.to(tl.int64) * table_width
    slot = tl.load(pages_ptr + position // PAGE, mask=live, other=0) * PAGE + position % PAGE
    tl.store(out_ptr + tokens, tl.where(live, slot, -1), mask=tokens < token_count)


@triton.jit
def row_spans(
    rows_ptr,  # [entry_count]
    counts_ptr,  # [entry_count]: new tokens
    length_ptr,  # [rows]: number of computed tokens before the step
    starts_ptr,  # [entry_count + 1]: result, the first flat token of each entry
    token_row_ptr,  # [token_count]: result, the row of each token, -1 for padding
    positions_ptr,  # [token_count]: result, the position of each token in its row, -1 for padding
    entry_count,
    token_count,
    TOKENS_PER_PROGRAM: tl.constexpr,
    ENTRIES_PER_STEP: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Lay out the new tokens of all entries on one flat axis."""
    tokens = tl.program_id(0) * TOKENS_PER_PROGRAM + tl.arange(0, TOKENS_PER_PROGRAM)
    wait_for_previous(DEPENDENT_LAUNCH)
    token_row, position = lay_out_tokens(
        rows_ptr, counts_ptr, length_ptr, starts_ptr, entry_count, tokens, TOKENS_PER_PROGRAM, ENTRIES_PER_STEP
    )
    tl.store(token_row_ptr + tokens, token_row, mask=tokens < token_count)
    tl.store(positions_ptr + tokens, position, mask=tokens < token_count)


@triton.jit
def row_begin(
    rows_ptr,  # device row of each entry, as in row_spans
    counts_ptr,
    length_ptr,
    token_ids_ptr,  # [rows, max_length]
    page_table_ptr,  # [rows, table_width]
    starts_ptr,
    token_row_ptr,
    positions_ptr,
    ids_ptr,  # [token_count]: result
    slots_ptr,  # [token_count]: result
    entry_count,
    token_count,
    max_length,
    table_width,
    PAGE: tl.constexpr,
    TOKENS_PER_PROGRAM: tl.constexpr,
    ENTRIES_PER_STEP: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """row_spans, and the id and the pool slot of each token."""
    tokens = tl.program_id(0) * TOKENS_PER_PROGRAM + tl.arange(0, TOKENS_PER_PROGRAM)
    wait_for_previous(DEPENDENT_LAUNCH)
    token_row, position = lay_out_tokens(
        rows_ptr, counts_ptr, length_ptr, starts_ptr, entry_count, tokens, TOKENS_PER_PROGRAM, ENTRIES_PER_STEP
    )
    tl.store(token_row_ptr + tokens, token_row, mask=tokens < token_count)
    tl.store(positions_ptr + tokens, position, mask=tokens < token_count)
    store_ids(token_ids_ptr, ids_ptr, tokens, token_row, position, token_count, max_length)
    store_slots(page_table_ptr, slots_ptr, tokens, token_row, position, token_count, table_width, PAGE)


@triton.jit
def row_ids(
    token_ids_ptr,  # [rows, max_length]
    token_row_ptr,  # [token_count]
    positions_ptr,  # [token_count]
    out_ptr,  # [token_count]
    token_count,
    max_length,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The id of each token."""
    tokens = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    token_row = tl.load(token_row_ptr + tokens, mask=tokens < token_count, other=-1)
    position = tl.load(positions_ptr + tokens, mask=tokens < token_count, other=0)
    store_ids(token_ids_ptr, out_ptr, tokens, token_row, position, token_count, max_length)


@triton.jit
def row_slots(
    page_table_ptr,  # [rows, table_width]
    token_row_ptr,  # [token_count]
    positions_ptr,  # [token_count]
    out_ptr,  # [token_count]
    token_count,
    table_width,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The pool slot of each token."""
    tokens = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    token_row = tl.load(token_row_ptr + tokens, mask=tokens < token_count, other=-1)
    position = tl.load(positions_ptr + tokens, mask=tokens < token_count, other=0)
    store_slots(page_table_ptr, out_ptr, tokens, token_row, position, token_count, table_width, PAGE)


@triton.jit
def row_last(
    starts_ptr,  # [entry_count + 1]
    out_ptr,  # [entry_count]
    entry_count,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The last flat token of each entry; -1 for entries without tokens."""
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    start = tl.load(starts_ptr + entry, mask=entry < entry_count, other=0)
    end = tl.load(starts_ptr + entry + 1, mask=entry < entry_count, other=0)
    tl.store(out_ptr + entry, tl.where(end > start, end - 1, -1), mask=entry < entry_count)


@triton.jit
def row_commit(
    token_ids_ptr,  # [rows, max_length]: updated
    length_ptr,  # [rows]: updated
    counts_ptr,  # [rows, vocab]: updated, number of times that each row has emitted each id
    rows_ptr,  # [entry_count]
    starts_ptr,  # [entry_count + 1]
    positions_ptr,  # [tokens]
    emit_ptr,  # [entry_count]: nonzero if the sampled id is output
    sampled_ptr,  # [entry_count]: ids
    entry_count,
    max_length,
    vocab,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Append the sampled ids to their rows. Of the entries of one row only the last one writes."""
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    exists = entry < entry_count
    row = tl.load(rows_ptr + entry, mask=exists, other=-1)
    start = tl.load(starts_ptr + entry, mask=exists, other=0)
    end = tl.load(starts_ptr + entry + 1, mask=exists, other=0)
    emits = tl.load(emit_ptr + entry, mask=exists, other=0) != 0
    sampled = tl.load(sampled_ptr + entry, mask=exists, other=0)
    next_row = tl.load(rows_ptr + entry + 1, mask=entry + 1 < entry_count, other=-1)
    writes = (row >= 0) & (start < end) & (next_row != row)
    length = tl.load(positions_ptr + end - 1, mask=writes, other=0) + 1
    count_ptr = counts_ptr + (row.to(tl.int64) * vocab + sampled)
    count = tl.load(count_ptr, mask=writes & emits, other=0)
    tl.store(length_ptr + row, length, mask=writes)
    fits = writes & emits & (length < max_length)
    tl.store(token_ids_ptr + row.to(tl.int64) * max_length + length, sampled, mask=fits)
    tl.store(count_ptr, count + 1, mask=writes & emits)
