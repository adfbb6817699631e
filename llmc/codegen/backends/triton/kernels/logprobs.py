"""Log-probabilities of the drawn id and of the likeliest ids, one program per row."""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.logit_keys import LOWEST_KEY, key_of, packed, packed_id, packed_key, value_of
from llmc.codegen.backends.triton.kernels.row_params import PARAMS, WANT_LOGPROBS

NONE_LEFT = tl.constexpr(-(2**63))  # below every packed key


class LogprobResults(NamedTuple):
    """The results of `row_logprobs`, zeros for entries that did not request them."""

    logprob_ptr: tl.tensor  # [entries]: of the drawn id
    rank_ptr: tl.tensor  # [entries]: 1 for the likeliest id
    ids_ptr: tl.tensor  # [entries, COUNT]: the likeliest ids in descending order
    logprobs_ptr: tl.tensor  # [entries, COUNT]: their log-probabilities
    COUNT: tl.constexpr
    COUNT_PADDED: tl.constexpr


@triton.jit
def likeliest(
    logits_ptr,
    drawn,
    requested,
    VOCAB: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    """Return (log-probability and rank of `drawn`, the COUNT likeliest ids [COUNT_PADDED], their log-probabilities).

    All are zeros if not `requested`. Invariant: `best_of_lane` has, for each of TILE lanes, the best id of that lane
    (id % TILE) that is not returned yet. The next id returned is that of the best lane, which is then replaced by the
    next lower id of the same lane.
    """
    place = tl.arange(0, COUNT_PADDED)
    ids = tl.zeros([COUNT_PADDED], tl.int32)
    logprobs = tl.zeros([COUNT_PADDED], tl.float32)
    logprob = tl.zeros([], tl.float32)
    rank = tl.zeros([], tl.int32)
    if requested:
        drawn_logit = tl.load(logits_ptr + drawn).to(tl.float32)
        lanes = tl.arange(0, TILE)
        best_of_lane = tl.full([TILE], NONE_LEFT, tl.int64)
        larger = tl.zeros([TILE], tl.int32)
        for at in range(0, VOCAB, TILE):
            logit = tl.load(logits_ptr + at + lanes, mask=at + lanes < VOCAB, other=float("-inf")).to(tl.float32)
            pair = packed(tl.where(at + lanes < VOCAB, key_of(logit), LOWEST_KEY), at + lanes)
            best_of_lane = tl.maximum(best_of_lane, pair)
            larger += (logit > drawn_logit).to(tl.int32)
        top = value_of(packed_key(tl.max(best_of_lane, 0)))
        total = tl.zeros([TILE], tl.float64)
        for at in range(0, VOCAB, TILE):
            logit = tl.load(logits_ptr + at + lanes, mask=at + lanes < VOCAB, other=float("-inf")).to(tl.float32)
            total += tl.exp(logit - top).to(tl.float64)
        shift = tl.log(tl.sum(total, 0)).to(tl.float32)
        logprob = (drawn_logit - top) - shift
        rank = tl.sum(larger, 0) + 1
        for n in range(COUNT):
            best = tl.max(best_of_lane, 0)
            token_id = packed_id(best)
            ids = tl.where(place == n, token_id, ids)
            logprobs = tl.where(place == n, (value_of(packed_key(best)) - top) - shift, logprobs)
            same_lane = token_id % TILE + tl.arange(0, TILES_PADDED) * TILE
            logit = tl.load(logits_ptr + same_lane, mask=same_lane < VOCAB, other=0.0).to(tl.float32)
            pair = packed(key_of(logit), same_lane)
            pair = tl.where((same_lane < VOCAB) & (pair < best), pair, NONE_LEFT)
            best_of_lane = tl.where(lanes == token_id % TILE, tl.max(pair, 0), best_of_lane)
    return logprob, rank, ids, logprobs


@triton.jit
def store_likeliest(entry, ranking, results: LogprobResults):
    """Store what `likeliest` returned as row `entry` of the results."""
    logprob, rank, ids, logprobs = ranking
    place = tl.arange(0, results.COUNT_PADDED)
    exists = place < results.COUNT
    tl.store(results.logprob_ptr + entry, logprob)
    tl.store(results.rank_ptr + entry, rank)
    tl.store(results.ids_ptr + entry * results.COUNT + place, ids, mask=exists)
    tl.store(results.logprobs_ptr + entry * results.COUNT + place, logprobs, mask=exists)


@triton.jit
def row_logprobs(
    logits_ptr,  # [entries, VOCAB]
    drawn_ptr,  # [entries]: ids
    rows_ptr,  # [entries]: rows of the state, -1 for padding; None: all entries request log-probabilities
    ints_ptr,  # [rows, PARAMS], or None
    results: LogprobResults,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Log-probabilities of one row."""
    entry = tl.program_id(0)
    wait_for_previous(DEPENDENT_LAUNCH)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + entry).to(tl.int64)
        requested = (row >= 0) & (tl.load(ints_ptr + tl.maximum(row, 0) * PARAMS + WANT_LOGPROBS) != 0)
    else:
        requested = entry >= 0
    logits_ptr += entry.to(tl.int64) * VOCAB
    drawn = tl.load(drawn_ptr + entry)
    ranking = likeliest(logits_ptr, drawn, requested, VOCAB, results.COUNT, results.COUNT_PADDED, TILE, TILES_PADDED)
    store_likeliest(entry, ranking, results)
