"""Sampling one token id: the cut by top_k, min_p and top_p, and the random draw among the ids that are kept.

A program samples a row of VOCAB logits. The mass of an id is exp((logit - top) / t). An id is kept if its key is above
`cut`, or if its key equals `cut` and the id is at most `until`. The draw is the kept id with the largest quotient of
its mass and its exponential random variable (see the op row_sample).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.logit_keys import HIGHEST_KEY, LOWEST_KEY, key_of, packed, packed_id, value_of


class RowScan(NamedTuple):
    """The logits of a row, which are read TILE at a time."""

    row: tl.tensor  # the first argument of LOGITS
    top: tl.tensor  # the largest logit
    t: tl.tensor  # the temperature
    LOGITS: tl.constexpr  # LOGITS(row, ids, mask) loads logits
    VOCAB: tl.constexpr
    LOG_VOCAB: tl.constexpr
    TILE: tl.constexpr
    TILES_PADDED: tl.constexpr


class Filters(NamedTuple):
    """Parameters that exclude ids. Each keeps the likeliest ids; top_p applies to those that the others keep."""

    active: tl.tensor  # whether ids may be excluded
    top_p: tl.tensor
    min_p: tl.tensor  # the smallest probability to keep, relative to the largest: 0 to 1
    top_k: tl.tensor


@triton.jit
def splitmix64(z):
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def draw_key(seed_low, seed_high, position):
    """Return the state of the SplitMix64 generator of a draw, as a uint64."""
    low = seed_low.to(tl.int64).to(tl.uint64) & 0xFFFFFFFF
    high = seed_high.to(tl.int64).to(tl.uint64) & 0xFFFFFFFF
    return splitmix64(splitmix64(low | (high << 32)) ^ position.to(tl.int64).to(tl.uint64))


@triton.jit
def exponential(key, ids):
    """Return the exponential random variables of token ids for a draw; see `exponentials` of llmc/ir/ops/sample.py.

    They are -log(1 - w), with w in (0, 1); a series where 1 - w would lose the lower bits of w.
    """
    high = (splitmix64(key + ids.to(tl.int64).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 32).to(tl.uint32)
    w = (high.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((high ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = w * (1.0 + w * (0.5 + w * (0.3333333333 + w * 0.25)))
    return tl.where(w < 0.00390625, series, -tl.log(rest))


@triton.jit
def scan_tile(scan: RowScan, at):
    """Return (ids, logits, keys) of the tile at `at`; ids from VOCAB on have the lowest key."""
    ids = at + tl.arange(0, scan.TILE)
    logit = scan.LOGITS(scan.row, ids, ids < scan.VOCAB)
    return ids, logit, tl.where(ids < scan.VOCAB, key_of(logit), LOWEST_KEY)


@triton.jit
def measure(scan: RowScan, mid):
    """Return (count, mass and lowest key of the keys from `mid` on; the highest key below `mid`)."""
    count = tl.zeros([scan.TILE], tl.int32)
    mass = tl.zeros([scan.TILE], tl.float64)
    above = tl.full([scan.TILE], HIGHEST_KEY, tl.int32)
    below = tl.full([scan.TILE], LOWEST_KEY, tl.int32)
    for at in range(0, scan.VOCAB, scan.TILE):
        _, logit, key = scan_tile(scan, at)
        inside = key >= mid
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp((logit - scan.top) / scan.t), 0.0).to(tl.float64)
        above = tl.minimum(above, tl.where(inside, key, HIGHEST_KEY))
        below = tl.maximum(below, tl.where(inside, LOWEST_KEY, key))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def search(scan: RowScan, low, limit, BY_COUNT: tl.constexpr):
    """Return the highest key such that the keys from it on reach the limit, and the count and mass of those above it.

    The limit is a count if BY_COUNT, else a mass. Invariant: the keys from `low` on reach the limit, those above `high`
    do not. Steps bisect the range of values and the range of keys in turn, because each converges fast if the other is
    slow.
    """
    high = key_of(scan.top)
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    step = tl.full([], 0, tl.int32)
    while low < high:
        mid = key_of((value_of(low) + value_of(high)) * 0.5)
        by_key = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        mid = tl.where((step % 2 == 1) | (mid > high) | (mid <= low), by_key, mid)
        n, m, above, below = measure(scan, mid)
        if BY_COUNT:
            reached = n >= limit
        else:
            reached = m >= limit
        low = tl.where(reached, above, low)
        high = tl.where(reached, high, below)
        count = tl.where(reached, count, n)
        mass = tl.where(reached, mass, m)
        low = tl.minimum(low, high)
        step += 1
    return high, count, mass


@triton.jit
def count_equal(scan: RowScan, cut, at):
    """Return 1 for each id of a tile whose key equals the cut, and 0 for the others."""
    _, _, key = scan_tile(scan, at)
    return (key == cut).to(tl.int32)


@triton.jit
def lane_of(counts, lanes, number):
    """Return the first lane at which the running sum of the counts reaches a number, and that sum before the lane."""
    lane = tl.min(tl.where(tl.cumsum(counts, 0) >= number, lanes, HIGHEST_KEY), 0)
    return lane, tl.sum(tl.where(lanes < lane, counts, 0), 0)


@triton.jit
def last_equal(scan: RowScan, cut, number):
    """Return the `number`-th id, in ascending order, of those whose key equals the cut, of which there are enough."""
    lanes = tl.arange(0, scan.TILES_PADDED)
    counts = tl.zeros([scan.TILES_PADDED], tl.int32)
    for tile in range((scan.VOCAB + scan.TILE - 1) // scan.TILE):
        equal = count_equal(scan, cut, tile * scan.TILE)
        counts = tl.where(lanes == tile, tl.sum(equal, 0), counts)
    tile, before = lane_of(counts, lanes, number)
    equal = count_equal(scan, cut, tile * scan.TILE)
    lane, _ = lane_of(equal, tl.arange(0, scan.TILE), number - before)
    return tile * scan.TILE + lane


@triton.jit
def find_cut(scan: RowScan, filters: Filters):
    """Return (cut, the number of ids to keep whose key equals it)."""
    top, t = scan.top, scan.t
    lowest = top.to(tl.float64) + t.to(tl.float64) * tl.log(tl.maximum(filters.min_p, 1e-30).to(tl.float64))
    cut = key_of(lowest.to(tl.float32))
    cut = tl.where(value_of(cut).to(tl.float64) < lowest, cut + 1, cut)
    cut = tl.where(filters.min_p > 0, cut, LOWEST_KEY + 1)
    ties = tl.full([], scan.VOCAB, tl.int32)
    whole = tl.full([], -1.0, tl.float64)
    floor = tl.minimum(key_of(tl.full([], -3.0e38, tl.float32)), key_of(top))
    if (filters.top_k > 0) & (filters.top_k < scan.VOCAB):
        key, count, mass = search(scan, floor, filters.top_k, True)
        if key >= cut:
            cut = key
            ties = filters.top_k - count
            whole = mass + ties.to(tl.float64) * tl.exp((value_of(key) - top) / t).to(tl.float64)
    if filters.top_p < 1.0:
        if whole < 0:
            _, whole, _, _ = measure(scan, cut)
        limit = whole * filters.top_p.to(tl.float64)
        # The total mass of ids below `reach` is at most 1 - top_p, and the mass of the largest id is 1.
        reach = tl.maximum(top - t * (scan.LOG_VOCAB - tl.log(tl.maximum(1.0 - filters.top_p, 1e-7))), -3.0e38)
        low = tl.minimum(tl.maximum(cut, key_of(reach)), key_of(top))
        key, _, before = search(scan, low, limit, False)
        each = tl.exp((value_of(key) - top) / t).to(tl.float64)
        max_ties = tl.minimum(tl.maximum(tl.ceil((limit - before) / each), 1.0), 1.0 * scan.VOCAB).to(tl.int32)
        ties = tl.where(key == cut, tl.minimum(ties, max_ties), max_ties)
        cut = key
    return cut, ties


@triton.jit
def draw_filtered(scan: RowScan, filters: Filters, draw):
    """Return the id that the row samples; `draw` is a result of draw_key."""
    cut, ties = find_cut(scan, filters)
    until = tl.full([], scan.VOCAB, tl.int32)
    if ties < scan.VOCAB:
        until = last_equal(scan, cut, ties)
    best = tl.full([scan.TILE], -9223372036854775808, tl.int64)
    for at in range(0, scan.VOCAB, scan.TILE):
        ids, logit, key = scan_tile(scan, at)
        is_kept = (key > cut) | ((key == cut) & (ids <= until))
        score = tl.where(is_kept, tl.exp((logit - scan.top) / scan.t) / exponential(draw, ids), -1.0)
        best = tl.maximum(best, packed(key_of(score), ids))
    return packed_id(tl.max(best, 0))
