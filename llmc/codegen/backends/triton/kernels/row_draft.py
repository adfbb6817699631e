"""Speculative decoding: accepting drafted tokens, drafting by prompt lookup, appending drafts. All values are int32.

The drafts of a row are in its history after its last token. A step verifies them with one entry per token.
"""

import triton
import triton.language as tl
from llmc_runtime.format.row_abi import DRAFT_COLUMNS, DRAFT_WIDTH

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous

DRAFTS = tl.constexpr(DRAFT_WIDTH)
NUM_DRAFTS = tl.constexpr(DRAFT_COLUMNS.index("num_drafts"))
MAX_DRAFTS = tl.constexpr(DRAFT_COLUMNS.index("max_drafts"))
MIN_NGRAM = tl.constexpr(DRAFT_COLUMNS.index("min_ngram"))
MAX_NGRAM = tl.constexpr(DRAFT_COLUMNS.index("max_ngram"))


@triton.jit
def load_entry(rows_ptr, starts_ptr, emit_ptr, entry, exists):
    """Return (row, end, filled, emits) of entries: end is the flat index after the last token; row -1 for padding."""
    row = tl.load(rows_ptr + entry, mask=exists, other=-1)
    start = tl.load(starts_ptr + entry, mask=exists, other=0)
    end = tl.load(starts_ptr + entry + 1, mask=exists, other=0)
    filled = (row >= 0) & (start < end)
    return row, end, filled, filled & (tl.load(emit_ptr + entry, mask=exists, other=0) != 0)


@triton.jit
def row_accept(
    token_ids_ptr,  # [rows, max_length]: updated
    length_ptr,  # [rows]: updated
    counts_ptr,  # [rows, vocab]: updated, number of times that each row has emitted each id
    rows_ptr,  # [entry_count]
    starts_ptr,  # [entry_count + 1]
    positions_ptr,  # [tokens]
    emit_ptr,  # [entry_count]: nonzero if the sampled id may be output
    sampled_ptr,  # [entry_count]: ids
    taken_ptr,  # [entry_count]: result, the ids that are output, -1 for entries that give none
    entry_count,
    max_length,
    vocab,
    LIMIT: tl.constexpr,  # tokens that may be verified per row
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Append the sampled ids to their rows as long as the tokens that follow are the drafted ones.

    One lane per entry. The lane of a row's first entry that emits walks over the entries that follow it; only that lane
    writes the row and the results of its entries.
    """
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    exists = entry < entry_count
    row, end, filled, emits = load_entry(rows_ptr, starts_ptr, emit_ptr, entry, exists)
    before = load_entry(rows_ptr, starts_ptr, emit_ptr, entry - 1, exists & (entry > 0))
    continues = before[3] & (before[0] == row)
    next_row = tl.load(rows_ptr + entry + 1, mask=entry + 1 < entry_count, other=-1)
    tl.store(taken_ptr + entry, -1, mask=exists & ~(emits & continues))
    length = tl.load(positions_ptr + end - 1, mask=filled, other=0) + 1
    tl.store(length_ptr + row, length, mask=filled & ~emits & ~continues & (next_row != row))

    leads = emits & ~continues
    history_ptr = token_ids_ptr + row.to(tl.int64) * max_length
    takes = leads
    for step in tl.static_range(LIMIT + 1):
        at = entry + step
        in_row, end, _, emitting = load_entry(rows_ptr, starts_ptr, emit_ptr, at, leads & (at < entry_count))
        verifies = emitting & (in_row == row)
        sampled = tl.load(sampled_ptr + at, mask=verifies, other=0)
        takes = takes & verifies
        tl.store(taken_ptr + at, tl.where(takes, sampled, -1), mask=leads & verifies)
        length = tl.load(positions_ptr + end - 1, mask=takes, other=0) + 1
        tl.atomic_add(counts_ptr + (row.to(tl.int64) * vocab + sampled), 1, mask=takes)
        tl.store(length_ptr + row, length, mask=takes)
        # An accepted draft is the id that is stored here already.
        drafted = tl.load(history_ptr + length, mask=takes & (length < max_length), other=-1)
        tl.store(history_ptr + length, sampled, mask=takes & (length < max_length))
        takes = takes & (drafted == sampled)


@triton.jit
def row_propose(
    token_ids_ptr,  # [rows, max_length]: updated
    drafts_ptr,  # [rows, DRAFTS]: updated
    length_ptr,  # [rows]
    rows_ptr,  # [entry_count]
    starts_ptr,  # [entry_count + 1]
    emit_ptr,  # [entry_count]
    proposed_ptr,  # [entry_count]: result
    entry_count,
    max_length,
    BLOCK: tl.constexpr,  # tokens of the history that are searched at once
    LANES: tl.constexpr,  # drafts that are written at once
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Draft what followed the latest earlier occurrence of the longest suffix of a row; one program per entry.

    Invariant of the search: `best` is the largest n * max_length + e so far, for suffixes of n tokens that also end
    before index e; 0 if there is none.
    """
    entry = tl.program_id(0)
    wait_for_previous(DEPENDENT_LAUNCH)
    row, _, _, emits = load_entry(rows_ptr, starts_ptr, emit_ptr, entry, entry < entry_count)
    next_row = tl.load(rows_ptr + entry + 1, mask=entry + 1 < entry_count, other=-1)
    tl.store(proposed_ptr + entry, 0)
    if emits & (next_row != row):
        drafts_ptr += row * DRAFTS
        known = tl.load(length_ptr + row) + 1
        room = tl.minimum(tl.load(drafts_ptr + MAX_DRAFTS), max_length - known)
        tl.store(drafts_ptr + NUM_DRAFTS, 0)
        if room > 0:
            history_ptr = token_ids_ptr + row.to(tl.int64) * max_length
            shortest = tl.maximum(tl.load(drafts_ptr + MIN_NGRAM), 1)
            longest = tl.load(drafts_ptr + MAX_NGRAM)
            best = tl.full([], 0, tl.int64)
            for first in range(1, known, BLOCK):
                ends = first + tl.arange(0, BLOCK)
                matches = ends < known
                count = tl.full([BLOCK], 0, tl.int32)
                for back in range(1, longest + 1):
                    last_token = tl.load(history_ptr + known - back, mask=known >= back, other=-1)
                    earlier_token = tl.load(history_ptr + ends - back, mask=matches & (ends >= back), other=-1)
                    matches = matches & (ends >= back) & (earlier_token == last_token)
                    count += matches.to(tl.int32)
                score = tl.where(count >= shortest, count.to(tl.int64) * max_length + ends, 0)
                best = tl.maximum(best, tl.max(score, 0))
            has_match = best > 0
            source = tl.where(has_match, (best % max_length).to(tl.int32), known - 1)
            for first in range(0, room, LANES):
                index = first + tl.arange(0, LANES)
                drafted = tl.load(history_ptr + source + index % (known - source), mask=index < room, other=0)
                tl.store(history_ptr + known + index, drafted, mask=index < room)
            proposed = tl.where(has_match, room, 0)
            tl.store(drafts_ptr + NUM_DRAFTS, proposed)
            tl.store(proposed_ptr + entry, proposed)


@triton.jit
def row_rewind(
    reach_ptr,  # [rows]: updated
    length_ptr,  # [rows]
    rows_ptr,  # [entry_count]
    entry_count,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Place the draft model one token before the last computed one of each row. Entries of a row write the same."""
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.load(rows_ptr + entry, mask=entry < entry_count, other=-1)
    length = tl.load(length_ptr + row, mask=row >= 0, other=0)
    tl.store(reach_ptr + row, tl.maximum(length - 1, 0), mask=row >= 0)


@triton.jit
def row_extend(
    token_ids_ptr,  # [rows, max_length]: updated
    reach_ptr,  # [rows]: updated, number of tokens whose KV the draft model has
    rows_ptr,  # [entry_count]
    starts_ptr,  # [entry_count + 1]
    positions_ptr,  # [tokens]
    emit_ptr,  # [entry_count]: nonzero if the sampled id is a draft
    sampled_ptr,  # [entry_count]: ids
    entry_count,
    max_length,
    LANES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Append the sampled ids to the drafts of their rows. Of the entries of one row only the last one writes."""
    entry = tl.program_id(0) * LANES + tl.arange(0, LANES)
    wait_for_previous(DEPENDENT_LAUNCH)
    exists = entry < entry_count
    row, end, filled, emits = load_entry(rows_ptr, starts_ptr, emit_ptr, entry, exists)
    next_row = tl.load(rows_ptr + entry + 1, mask=entry + 1 < entry_count, other=-1)
    writes = filled & (next_row != row)
    reach = tl.load(positions_ptr + end - 1, mask=writes, other=0) + 1
    tl.store(reach_ptr + row, reach, mask=writes)
    sampled = tl.load(sampled_ptr + entry, mask=writes & emits, other=0)
    tl.store(token_ids_ptr + row.to(tl.int64) * max_length + reach, sampled, mask=writes & emits & (reach < max_length))
