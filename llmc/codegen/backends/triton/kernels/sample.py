"""Sampling: one token id for each entry of a step.

`row_sample` samples a row of masked logits with one program. The other kernels sample raw logits in two launches:
`row_block_max` summarizes blocks of ids with many programs, and `row_sample_blocks` samples from the summaries. In the
second launch, only rows with top_k, top_p or min_p read logits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.logit_keys import LOWEST_KEY, key_of, packed, packed_id, packed_key, value_of
from llmc.codegen.backends.triton.kernels.logprobs import LogprobResults, likeliest, store_likeliest
from llmc.codegen.backends.triton.kernels.row_logits import (
    RowLogits,
    RowTables,
    change_logits,
    changed_logits,
    load_row,
    next_position,
    plain_logits,
)
from llmc.codegen.backends.triton.kernels.row_params import (
    PARAMS,
    PROMPT_LEN,
    SEED_HI,
    SEED_LO,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANT_LOGPROBS,
)
from llmc.codegen.backends.triton.kernels.sampling_math import (
    Filters,
    RowScan,
    draw_filtered,
    draw_key,
    exponential,
)
from llmc.codegen.backends.triton.kernels.sampling_rules import least_probability


class BlockSummaries(NamedTuple):
    """What `row_block_max` finds out about blocks of ids; see the op."""

    best_ptr: tl.tensor  # [entries, BLOCKS]
    drawn_ptr: tl.tensor  # [entries, BLOCKS]
    scores_ptr: tl.tensor  # [entries, BLOCKS]
    BLOCKS: tl.constexpr


class DrawOptions(NamedTuple):
    """Constants of `draw_from_blocks`; see `RowScan`."""

    LOG_VOCAB: tl.constexpr
    BLOCKS_PADDED: tl.constexpr
    TILE: tl.constexpr
    TILES_PADDED: tl.constexpr


@triton.jit
def load_filters(floats_ptr, ints_ptr, row, VOCAB: tl.constexpr):
    """Return the filters of a row."""
    floats_ptr += row * PARAMS
    top_p = tl.load(floats_ptr + TOP_P)
    min_p = least_probability(floats_ptr)
    top_k = tl.load(ints_ptr + row * PARAMS + TOP_K)
    active = (top_p < 1.0) | (min_p > 0.0) | ((top_k > 0) & (top_k < VOCAB))
    return Filters(active, top_p, min_p, top_k)


@triton.jit
def load_draw(ints_ptr, row, position):
    """Return the key of a row's draw of the token at a position."""
    ints_ptr += row * PARAMS
    return draw_key(tl.load(ints_ptr + SEED_LO), tl.load(ints_ptr + SEED_HI), position)


@triton.jit
def row_sample(
    logits_ptr,  # [entries, VOCAB] in float32: biased, penalized and masked
    rows_ptr,  # [entries]: rows of the state, -1 for padding
    starts_ptr,  # [entries + 1]
    positions_ptr,  # [tokens]
    token_ids_ptr,  # [rows, max_length]
    floats_ptr,  # [rows, PARAMS]
    ints_ptr,  # [rows, PARAMS]
    out_ptr,  # [entries]
    max_length,
    VOCAB: tl.constexpr,
    LOG_VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Sample an id; rows that are still within their prompt get the prompt's next id."""
    entry = tl.program_id(0)
    logits_ptr += entry.to(tl.int64) * VOCAB
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    out = tl.zeros([], tl.int32)
    if row >= 0:
        t = tl.load(floats_ptr + row * PARAMS + TEMPERATURE)
        position = next_position(entry, starts_ptr, positions_ptr)
        best = tl.full([TILE], -9223372036854775808, tl.int64)
        for at in range(0, VOCAB, TILE):
            ids = at + tl.arange(0, TILE)
            key = tl.where(ids < VOCAB, key_of(plain_logits(logits_ptr, ids, ids < VOCAB)), LOWEST_KEY)
            best = tl.maximum(best, packed(key, ids))
        first = tl.max(best, 0)
        out = packed_id(first)
        in_prompt = position < tl.load(ints_ptr + row * PARAMS + PROMPT_LEN)
        if (t > 0) & (in_prompt == 0):
            filters = load_filters(floats_ptr, ints_ptr, row, VOCAB)
            draw = load_draw(ints_ptr, row, position)
            top = value_of(packed_key(first))
            out = draw_filtered(
                RowScan(logits_ptr, top, t, plain_logits, VOCAB, LOG_VOCAB, TILE, TILES_PADDED), filters, draw
            )
        prompt_id = tl.load(token_ids_ptr + row * max_length + position, mask=in_prompt, other=0)
        out = tl.where(in_prompt, prompt_id, out)
    tl.store(out_ptr + entry, out)


@triton.jit
def store_summary(
    entry, exists, row: RowLogits, t, draws, draw, block, raw, ids, out: BlockSummaries, VOCAB: tl.constexpr
):
    """Store the largest logit of a block, an id and its score; zeros for padding, which does not exist.

    `draws` is whether the row has a temperature and no filters, and `draw` is the key of its draw.
    """
    logits = change_logits(raw.to(tl.float32), row, ids, ids < VOCAB)
    pair = tl.max(packed(tl.where(ids < VOCAB, key_of(logits), LOWEST_KEY), ids), 0)
    best = value_of(packed_key(pair))
    score = tl.zeros([], tl.float32)
    if draws:
        scores = tl.exp(tl.where(logits == best, 0.0, logits - best) / t) / exponential(draw, ids)
        pair = tl.max(packed(tl.where(ids < VOCAB, key_of(scores), LOWEST_KEY), ids), 0)
        score = value_of(packed_key(pair))
    at = entry.to(tl.int64) * out.BLOCKS + block
    tl.store(out.best_ptr + at, tl.where(exists, best, 0.0))
    tl.store(out.drawn_ptr + at, tl.where(exists, packed_id(pair), 0))
    tl.store(out.scores_ptr + at, score)


@triton.jit
def row_block_max(
    tables: RowTables,
    summaries: BlockSummaries,  # result
    BLOCK: tl.constexpr,  # ids per block
    BLOCKS_PER_PROGRAM: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Summarize blocks of a row; the logits of the next block are loaded while one is processed."""
    VOCAB: tl.constexpr = tables.VOCAB
    entry = tl.program_id(1)
    first = tl.program_id(0) * BLOCKS_PER_PROGRAM
    lanes = tl.arange(0, BLOCK)
    logits_ptr = tables.logits_ptr + entry.to(tl.int64) * VOCAB
    wait_for_previous(DEPENDENT_LAUNCH)
    row = tl.load(tables.rows_ptr + entry).to(tl.int64)
    raw = tl.load(logits_ptr + first * BLOCK + lanes, mask=first * BLOCK + lanes < VOCAB, other=0.0)
    changes, t, position = load_row(tables, entry, row)
    live = tl.maximum(row, 0)
    filters = load_filters(tables.floats_ptr, tables.ints_ptr, live, VOCAB)
    draws = (row >= 0) & (t > 0) & (filters.active == 0)
    draw = load_draw(tables.ints_ptr, live, position)
    if BLOCKS_PER_PROGRAM == 1:
        ids = first * BLOCK + lanes
        store_summary(entry, row >= 0, changes, t, draws, draw, first, raw, ids, summaries, VOCAB)
    else:
        for block in range(first, tl.minimum(first + BLOCKS_PER_PROGRAM, summaries.BLOCKS)):
            ids = block * BLOCK + lanes
            this = raw
            more = (ids + BLOCK < VOCAB) & (block + 1 < first + BLOCKS_PER_PROGRAM)
            raw = tl.load(logits_ptr + ids + BLOCK, mask=more, other=0.0)
            store_summary(entry, row >= 0, changes, t, draws, draw, block, this, ids, summaries, VOCAB)


@triton.jit
def draw_from_blocks(
    entry, tables: RowTables, summaries: BlockSummaries, token_ids_ptr, max_length, options: DrawOptions
):
    """Return (sampled id, row, position) of an entry."""
    VOCAB: tl.constexpr = tables.VOCAB
    block = tl.arange(0, options.BLOCKS_PADDED)
    exists = block < summaries.BLOCKS
    at = entry.to(tl.int64) * summaries.BLOCKS + block
    row = tl.load(tables.rows_ptr + entry).to(tl.int64)
    best = tl.load(summaries.best_ptr + at, mask=exists, other=0.0)
    drawn = tl.load(summaries.drawn_ptr + at, mask=exists, other=0)
    changes, t, position = load_row(tables, entry, row)
    pair = tl.max(packed(tl.where(exists, key_of(best), LOWEST_KEY), drawn), 0)
    out = tl.where(row >= 0, packed_id(pair), 0)
    live = tl.maximum(row, 0)
    in_prompt = (row >= 0) & (position < tl.load(tables.ints_ptr + live * PARAMS + PROMPT_LEN))
    if (row >= 0) & (t > 0) & (in_prompt == 0):
        filters = load_filters(tables.floats_ptr, tables.ints_ptr, live, VOCAB)
        top = value_of(packed_key(pair))
        if filters.active:
            draw = load_draw(tables.ints_ptr, live, position)
            out = draw_filtered(
                RowScan(changes, top, t, changed_logits, VOCAB, options.LOG_VOCAB, options.TILE, options.TILES_PADDED),
                filters,
                draw,
            )
        else:
            score = tl.load(summaries.scores_ptr + at, mask=exists, other=0.0) * tl.exp((best - top) / t)
            out = packed_id(tl.max(packed(tl.where(exists, key_of(score), LOWEST_KEY), drawn), 0))
    prompt_id = tl.load(token_ids_ptr + live * max_length + position, mask=in_prompt, other=0)
    return tl.where(in_prompt, prompt_id, out), row, position


@triton.jit
def row_sample_blocks(
    tables: RowTables,
    summaries: BlockSummaries,
    token_ids_ptr,  # [rows, max_length]
    out_ptr,  # [entries]
    max_length,
    options: DrawOptions,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Sample an id from the summaries of the blocks and, if necessary, the logits."""
    entry = tl.program_id(0)
    wait_for_previous(DEPENDENT_LAUNCH)
    out, _, _ = draw_from_blocks(entry, tables, summaries, token_ids_ptr, max_length, options)
    tl.store(out_ptr + entry, out)


@triton.jit
def commit(entry, row, position, out, tables: RowTables, emit_ptr, token_ids_ptr, length_ptr, entry_count, max_length):
    """Append the id to its row. Of the entries of one row only the last one that has tokens writes."""
    emits = tl.load(emit_ptr + entry) != 0
    continues = tl.load(tables.rows_ptr + entry + 1, mask=entry + 1 < entry_count, other=-1) == row
    has_tokens = tl.load(tables.starts_ptr + entry) < tl.load(tables.starts_ptr + entry + 1)
    if (row >= 0) & (continues == 0) & has_tokens:
        tl.store(length_ptr + row, position)
        if emits:
            count_ptr = tables.counts_ptr + row * tables.VOCAB + out
            tl.store(count_ptr, tl.load(count_ptr) + 1)
            tl.store(token_ids_ptr + row * max_length + position, out, mask=position < max_length)


@triton.jit
def row_finish(
    tables: RowTables,  # counts: updated
    summaries: BlockSummaries,
    token_ids_ptr,  # [rows, max_length]: updated
    emit_ptr,  # [entries]: nonzero if the id is output
    out_ptr,  # [entries]: result
    logprobs: LogprobResults,
    length_ptr,  # [rows]: updated
    entry_count,
    max_length,
    options: DrawOptions,
    LOGPROBS_TILE: tl.constexpr,
    LOGPROBS_TILES_PADDED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """row_sample_blocks, row_logprobs of the raw logits and row_commit in one launch."""
    entry = tl.program_id(0)
    wait_for_previous(DEPENDENT_LAUNCH)
    out, row, position = draw_from_blocks(entry, tables, summaries, token_ids_ptr, max_length, options)
    tl.store(out_ptr + entry, out)
    requested = (row >= 0) & (tl.load(tables.ints_ptr + tl.maximum(row, 0) * PARAMS + WANT_LOGPROBS) != 0)
    logits_ptr = tables.logits_ptr + entry.to(tl.int64) * tables.VOCAB
    ranking = likeliest(
        logits_ptr, out, requested, tables.VOCAB, logprobs.COUNT, logprobs.COUNT_PADDED, LOGPROBS_TILE,
        LOGPROBS_TILES_PADDED,
    )  # fmt: skip
    store_likeliest(entry, ranking, logprobs)
    commit(entry, row, position, out, tables, emit_ptr, token_ids_ptr, length_ptr, entry_count, max_length)
