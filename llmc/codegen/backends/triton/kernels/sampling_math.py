"""Sampling one token id: the cut by top_k, min_p and top_p, and the random draw among the ids that are kept.

A program samples a row of VOCAB logits. `LOGITS(row, ids, mask)` loads logits of the row, `top` is its largest logit
and `t` its temperature; the mass of an id is exp((logit - top) / t). An id is kept if its key is above `cut`, or if its
key equals `cut` and the id is at most `until`. The draw is the kept id with the largest quotient of its mass and its
exponential random variable (see the op row_sample).
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.logit_keys import HIGHEST_KEY, LOWEST_KEY, key_of, packed, packed_id, value_of


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
def measure(row, top, t, mid, LOGITS: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return (count, mass and lowest key of the keys from `mid` on; the highest key below `mid`)."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float64)
    above = tl.full([TILE], HIGHEST_KEY, tl.int32)
    below = tl.full([TILE], LOWEST_KEY, tl.int32)
    for at in range(0, VOCAB, TILE):
        ids = at + tl.arange(0, TILE)
        logit = LOGITS(row, ids, ids < VOCAB)
        key = tl.where(ids < VOCAB, key_of(logit), LOWEST_KEY)
        inside = key >= mid
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp((logit - top) / t), 0.0).to(tl.float64)
        above = tl.minimum(above, tl.where(inside, key, HIGHEST_KEY))
        below = tl.maximum(below, tl.where(inside, LOWEST_KEY, key))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def search(
    row,
    top,
    t,
    low,
    limit,
    BY_COUNT: tl.constexpr,
    LOGITS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return (the highest existing key such that the keys from it on reach the limit, their count and mass above it).

    The limit is a count if BY_COUNT, else a mass. Invariant: the keys from `low` on reach the limit. Steps
    bisect the range of values and the range of keys in turn, because each converges fast if the other is slow.
    """
    high = key_of(top)
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    step = tl.full([], 0, tl.int32)
    while low < high:
        mid = key_of((value_of(low) + value_of(high)) * 0.5)
        by_key = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        mid = tl.where((step % 2 == 1) | (mid > high) | (mid <= low), by_key, mid)
        n, m, above, below = measure(row, top, t, mid, LOGITS, VOCAB, TILE)
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
def count_equal(row, cut, at, LOGITS: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Return 1 for each id of a tile whose key equals the cut, and 0 for the others."""
    ids = at + tl.arange(0, TILE)
    logit = LOGITS(row, ids, ids < VOCAB)
    return (tl.where(ids < VOCAB, key_of(logit), LOWEST_KEY) == cut).to(tl.int32)


@triton.jit
def lane_of(counts, lanes, number):
    """Return (the first lane up to which the counts reach a number, the sum of the counts before it)."""
    lane = tl.min(tl.where(tl.cumsum(counts, 0) >= number, lanes, HIGHEST_KEY), 0)
    return lane, tl.sum(tl.where(lanes < lane, counts, 0), 0)


@triton.jit
def last_equal(
    row,
    cut,
    number,
    LOGITS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    """Return the id that is the `number`-th one, in ascending order, whose key equals the cut. There are as many."""
    lanes = tl.arange(0, TILES_PADDED)
    counts = tl.zeros([TILES_PADDED], tl.int32)
    for tile in range((VOCAB + TILE - 1) // TILE):
        equal = count_equal(row, cut, tile * TILE, LOGITS, VOCAB, TILE)
        counts = tl.where(lanes == tile, tl.sum(equal, 0), counts)
    tile, before = lane_of(counts, lanes, number)
    equal = count_equal(row, cut, tile * TILE, LOGITS, VOCAB, TILE)
    lane, _ = lane_of(equal, tl.arange(0, TILE), number - before)
    return tile * TILE + lane


@triton.jit
def find_cut(
    row,
    top,
    t,
    top_p,
    least_p,
    top_k,
    LOGITS: tl.constexpr,
    VOCAB: tl.constexpr,
    LOG_VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return (cut, the number of ids to keep whose key equals it).

    least_p (the smallest probability to keep, relative to the largest: 0 to 1), top_k and top_p each keep a prefix of
    the ids in descending order, top_p among the ids that the other two keep.
    """
    least = top.to(tl.float64) + t.to(tl.float64) * tl.log(tl.maximum(least_p, 1e-30).to(tl.float64))
    cut = key_of(least.to(tl.float32))
    cut = tl.where(value_of(cut).to(tl.float64) < least, cut + 1, cut)
    cut = tl.where(least_p > 0, cut, LOWEST_KEY + 1)
    ties = tl.full([], VOCAB, tl.int32)
    whole = tl.full([], -1.0, tl.float64)
    floor = tl.minimum(key_of(tl.full([], -3.0e38, tl.float32)), key_of(top))
    if (top_k > 0) & (top_k < VOCAB):
        key, count, mass = search(row, top, t, floor, top_k, True, LOGITS, VOCAB, TILE)
        if key >= cut:
            cut = key
            ties = top_k - count
            whole = mass + ties.to(tl.float64) * tl.exp((value_of(key) - top) / t).to(tl.float64)
    if top_p < 1.0:
        if whole < 0:
            _, whole, _, _ = measure(row, top, t, cut, LOGITS, VOCAB, TILE)
        limit = whole * top_p.to(tl.float64)
        # The total mass of ids below `reach` is at most 1 - top_p, and the mass of the largest id is 1.
        reach = tl.maximum(top - t * (LOG_VOCAB - tl.log(tl.maximum(1.0 - top_p, 1e-7))), -3.0e38)
        low = tl.minimum(tl.maximum(cut, key_of(reach)), key_of(top))
        key, _, before = search(row, top, t, low, limit, False, LOGITS, VOCAB, TILE)
        each = tl.exp((value_of(key) - top) / t).to(tl.float64)
        most = tl.minimum(tl.maximum(tl.ceil((limit - before) / each), 1.0), 1.0 * VOCAB).to(tl.int32)
        ties = tl.where(key == cut, tl.minimum(ties, most), most)
        cut = key
    return cut, ties


@triton.jit
def draw_filtered(
    row,
    top,
    t,
    top_p,
    least_p,
    top_k,
    draw,
    LOGITS: tl.constexpr,
    VOCAB: tl.constexpr,
    LOG_VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PADDED: tl.constexpr,
):
    """Return the id that the row samples; `draw` is a result of draw_key."""
    cut, ties = find_cut(row, top, t, top_p, least_p, top_k, LOGITS, VOCAB, LOG_VOCAB, TILE)
    until = tl.full([], VOCAB, tl.int32)
    if ties < VOCAB:
        until = last_equal(row, cut, ties, LOGITS, VOCAB, TILE, TILES_PADDED)
    best = tl.full([TILE], -9223372036854775808, tl.int64)
    for at in range(0, VOCAB, TILE):
        ids = at + tl.arange(0, TILE)
        logit = LOGITS(row, ids, ids < VOCAB)
        key = tl.where(ids < VOCAB, key_of(logit), LOWEST_KEY)
        kept = (key > cut) | ((key == cut) & (ids <= until))
        score = tl.where(kept, tl.exp((logit - top) / t) / exponential(draw, ids), -1.0)
        best = tl.maximum(best, packed(key_of(score), ids))
    return packed_id(tl.max(best, 0))
