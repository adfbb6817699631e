"""The logits that a row samples from: biased, penalized and masked according to the row's parameters.

Sets of token ids are bitmaps: id i is bit i % 32 of the int32 word i // 32.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.row_params import (
    MASKED,
    MIN_LEN,
    NUM_BIASES,
    PARAMS,
    PROMPT_LEN,
    TEMPERATURE,
)
from llmc.codegen.backends.triton.kernels.sampling_rules import load_penalties, penalized, penalizes


class RowTables(NamedTuple):
    """The logits and the state of all rows: what the ids of a step are sampled from."""

    logits_ptr: tl.tensor  # [entries, VOCAB]: raw
    rows_ptr: tl.tensor  # [entries]: rows of the state, -1 for padding
    starts_ptr: tl.tensor  # [entries + 1]
    positions_ptr: tl.tensor  # [tokens]
    floats_ptr: tl.tensor  # [rows, PARAMS]
    ints_ptr: tl.tensor  # [rows, PARAMS]
    stops_ptr: tl.tensor  # [rows, STOPS]
    seen_ptr: tl.tensor  # [rows, WORDS]
    counts_ptr: tl.tensor  # [rows, VOCAB]
    bias_ids_ptr: tl.tensor  # [rows, BIASES]
    biases_ptr: tl.tensor  # [rows, BIASES]
    allowed_ptr: tl.tensor  # [rows, MASKS, WORDS]
    VOCAB: tl.constexpr
    WORDS: tl.constexpr
    MASKS: tl.constexpr
    STOPS: tl.constexpr
    BIASES: tl.constexpr


class RowLogits(NamedTuple):
    """The raw logits of one entry, and what its row changes in them."""

    logits_ptr: tl.tensor
    seen_ptr: tl.tensor
    counts_ptr: tl.tensor
    stops_ptr: tl.tensor
    num_stops: tl.tensor
    bias_ids_ptr: tl.tensor
    biases_ptr: tl.tensor
    allowed_ptr: tl.tensor
    has_penalties: tl.tensor
    masks_stops: tl.tensor
    num_biases: tl.tensor
    masked: tl.tensor
    penalties: tl.tuple


@triton.jit
def contains(word, ids):
    """Return whether the bit of each id is set; `word` is the word of the bitmap that contains the id."""
    return ((word >> (ids & 31)) & 1) != 0


@triton.jit
def bias(logits, bias_ids_ptr, biases_ptr, num_biases, ids):
    """Add the biases of the ids of one tile.

    The list of biased ids is ascending, so those within the tile are adjacent; a binary search finds the first.
    """
    lowest_id = tl.min(ids, 0)
    n = tl.full([], 0, tl.int32)
    end = n + num_biases
    while n < end:
        mid = (n + end) // 2
        below = tl.load(bias_ids_ptr + mid) < lowest_id
        n = tl.where(below, mid + 1, n)
        end = tl.where(below, end, mid)
    highest_id = tl.max(ids, 0)
    biased_id = tl.load(bias_ids_ptr + n, mask=n < num_biases, other=2147483647)
    while biased_id <= highest_id:
        logits += tl.where(ids == biased_id, tl.load(biases_ptr + n), 0.0)
        n += 1
        biased_id = tl.load(bias_ids_ptr + n, mask=n < num_biases, other=2147483647)
    return logits


@triton.jit
def penalize(logits, seen_ptr, counts_ptr, penalties, ids, exists, drafted=0):
    """Apply the penalties to the logits of one tile; `drafted` is added to the number of times that ids were output."""
    count = tl.load(counts_ptr + ids, mask=exists, other=0) + drafted
    word = tl.load(seen_ptr + (ids >> 5), mask=exists, other=0)
    return penalized(logits, count.to(tl.float32), contains(word, ids) | (count > 0), penalties)


@triton.jit
def change_logits(logits, row: RowLogits, ids, exists):
    """Apply all of the row's parameters to the raw logits of one tile."""
    if row.num_biases > 0:
        logits = bias(logits, row.bias_ids_ptr, row.biases_ptr, row.num_biases, ids)
    if row.has_penalties:
        logits = penalize(logits, row.seen_ptr, row.counts_ptr, row.penalties, ids, exists)
    if row.masks_stops:
        for stop in range(row.num_stops):
            logits = tl.where(ids == tl.load(row.stops_ptr + stop), float("-inf"), logits)
    if row.masked:
        word = tl.load(row.allowed_ptr + (ids >> 5), mask=exists, other=0)
        logits = tl.where(contains(word, ids), logits, float("-inf"))
    return logits


@triton.jit
def changed_logits(row: RowLogits, ids, exists):
    """Load the logits of one tile and apply the row's parameters."""
    return change_logits(tl.load(row.logits_ptr + ids, mask=exists, other=0.0).to(tl.float32), row, ids, exists)


@triton.jit
def plain_logits(logits_ptr, ids, exists):
    """Load the logits of one tile of a row to which all parameters have been applied."""
    return tl.load(logits_ptr + ids, mask=exists, other=0.0)


@triton.jit
def next_position(entry, starts_ptr, positions_ptr):
    """Return the position of the token that the entry samples."""
    return tl.load(positions_ptr + tl.maximum(tl.load(starts_ptr + entry + 1) - 1, 0)) + 1


@triton.jit
def bitmap_of(allowed_ptr, ints_ptr, live, position, MASKS: tl.constexpr, WORDS: tl.constexpr):
    """Return (whether the token at this position is masked, its bitmap).

    `ints_ptr` are the row's integers. A row with more bitmaps than the state has room for, MASKS, is not masked.
    """
    count = tl.load(ints_ptr + MASKED)
    slot = position % tl.maximum(count, 1)
    return (count > 0) & (count <= MASKS), allowed_ptr + live * (MASKS * WORDS) + slot * WORDS


@triton.jit
def load_row(tables: RowTables, entry, row):
    """Return (the `RowLogits` of an entry, its temperature, the position of the token to sample).

    Padding (row -1) reads row 0 and changes nothing.
    """
    live = tl.maximum(row, 0)
    floats_ptr = tables.floats_ptr + live * PARAMS
    ints_ptr = tables.ints_ptr + live * PARAMS
    temperature = tl.load(floats_ptr + TEMPERATURE)
    penalties = load_penalties(floats_ptr)
    position = next_position(entry, tables.starts_ptr, tables.positions_ptr)
    has_penalties = (row >= 0) & penalizes(penalties)
    masks_stops = (row >= 0) & (position < tl.load(ints_ptr + MIN_LEN))
    num_biases = tl.where(row >= 0, tl.load(ints_ptr + NUM_BIASES), 0)
    masked, allowed_ptr = bitmap_of(tables.allowed_ptr, ints_ptr, live, position, tables.MASKS, tables.WORDS)
    masked &= row >= 0
    changes = RowLogits(
        tables.logits_ptr + entry.to(tl.int64) * tables.VOCAB,
        tables.seen_ptr + live * tables.WORDS,
        tables.counts_ptr + live * tables.VOCAB,
        tables.stops_ptr + live * tables.STOPS,
        tables.STOPS,
        tables.bias_ids_ptr + live * tables.BIASES,
        tables.biases_ptr + live * tables.BIASES,
        allowed_ptr,
        has_penalties,
        masks_stops,
        num_biases,
        masked,
        penalties,
    )
    return changes, temperature, position


@triton.jit
def count_drafts(rows_ptr, starts_ptr, positions_ptr, history_ptr, prompt_length, entry, row, ids):
    """Count the drafted tokens of each id that precede the entry's new token.

    They are the last tokens of the row's entries after its first, up to this entry, after the prompt.
    """
    count = tl.zeros_like(ids)
    before = tl.load(rows_ptr + entry - 1, mask=entry > 0, other=-1)
    position = tl.load(positions_ptr + tl.load(starts_ptr + entry + 1) - 1)
    while (before == row) & (position >= prompt_length):
        count += (ids == tl.load(history_ptr + position)).to(tl.int32)
        entry -= 1
        before = tl.load(rows_ptr + entry - 1, mask=entry > 0, other=-1)
        position = tl.load(positions_ptr + tl.load(starts_ptr + entry + 1) - 1)
    return count


@triton.jit
def row_penalize(
    logits_ptr,  # [entries, VOCAB]
    rows_ptr,  # [entries]: rows of the state, -1 for padding
    floats_ptr,  # [rows, PARAMS]
    ints_ptr,  # [rows, PARAMS]
    seen_ptr,  # [rows, WORDS]: the set of the prompt's ids
    counts_ptr,  # [rows, VOCAB]: number of times that the row has emitted each id
    bias_ids_ptr,  # [rows, BIASES]
    biases_ptr,  # [rows, BIASES]
    starts_ptr,  # [entries + 1], or None if the step verifies no drafts, as the next two
    positions_ptr,  # [tokens]
    token_ids_ptr,  # [rows, max_length]
    out_ptr,  # [entries, VOCAB] in float32; may be logits_ptr
    max_length,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    MAY_BE_IN_PLACE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Apply biases and penalties to one block of a row. In place, rows without any are not touched."""
    entry = tl.program_id(1)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    floats_ptr += tl.maximum(row, 0) * PARAMS
    num_biases = tl.where(row >= 0, tl.load(ints_ptr + tl.maximum(row, 0) * PARAMS + NUM_BIASES), 0)
    penalties = load_penalties(floats_ptr)
    first = entry.to(tl.int64) * VOCAB
    has_penalties = (row >= 0) & penalizes(penalties)
    changes = True
    if MAY_BE_IN_PLACE:
        changes = has_penalties | (num_biases > 0) | (logits_ptr.to(tl.int64) != out_ptr.to(tl.int64))
    if changes:
        logits = tl.load(logits_ptr + first + ids, mask=ids < VOCAB, other=0.0).to(tl.float32)
        if num_biases > 0:
            logits = bias(logits, bias_ids_ptr + row * BIASES, biases_ptr + row * BIASES, num_biases, ids)
        if has_penalties:
            seen, counts = seen_ptr + row * WORDS, counts_ptr + row * VOCAB
            drafted = tl.zeros_like(ids)
            if token_ids_ptr is not None:
                prompt = tl.load(ints_ptr + row * PARAMS + PROMPT_LEN)
                history = token_ids_ptr + row * max_length
                drafted = count_drafts(rows_ptr, starts_ptr, positions_ptr, history, prompt, entry, row, ids)
            logits = penalize(logits, seen, counts, penalties, ids, ids < VOCAB, drafted)
        tl.store(out_ptr + first + ids, logits, mask=ids < VOCAB)


@triton.jit
def row_mask(
    logits_ptr,  # [entries, VOCAB] in float32
    rows_ptr,  # [entries]
    starts_ptr,  # [entries + 1]
    positions_ptr,  # [tokens]
    ints_ptr,  # [rows, PARAMS]
    stops_ptr,  # [rows, STOPS]: ids, -1 for none
    allowed_ptr,  # [rows, MASKS, WORDS]
    out_ptr,  # [entries, VOCAB]; may be logits_ptr
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    MASKS: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Set the logits of ids that the row must not sample to -inf; in place, only these are written."""
    entry = tl.program_id(0)
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    live = tl.maximum(row, 0)
    position = next_position(entry, starts_ptr, positions_ptr)
    masks_stops = (row >= 0) & (position < tl.load(ints_ptr + live * PARAMS + MIN_LEN))
    masked, allowed_ptr = bitmap_of(allowed_ptr, ints_ptr + live * PARAMS, live, position, MASKS, WORDS)
    masked &= row >= 0
    logits = logits_ptr + entry.to(tl.int64) * VOCAB
    out = out_ptr + entry.to(tl.int64) * VOCAB
    stop = tl.arange(0, STOPS_PADDED)
    stop_id = tl.load(stops_ptr + live * STOPS + stop, mask=masks_stops & (stop < STOPS), other=-1)
    if logits_ptr.to(tl.int64) != out_ptr.to(tl.int64):
        for at in range(0, VOCAB, TILE):
            ids = at + tl.arange(0, TILE)
            tl.store(out + ids, tl.load(logits + ids, mask=ids < VOCAB, other=0.0), mask=ids < VOCAB)
        tl.debug_barrier()  # below, other threads overwrite copied elements
    if masked:
        for at in range(0, VOCAB, TILE):
            ids = at + tl.arange(0, TILE)
            word = tl.load(allowed_ptr + (ids >> 5), mask=ids < VOCAB, other=-1)
            tl.store(out + ids, tl.full([TILE], float("-inf"), tl.float32), mask=contains(word, ids) == 0)
    tl.store(out + stop_id, tl.full([STOPS_PADDED], float("-inf"), tl.float32), mask=stop_id >= 0)
