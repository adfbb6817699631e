"""The text of the draw: keys that order logits, splitmix64, the cut by top_k, min_p and top_p, the inverse CDF. It is
part of one program that owns a row; it chooses no grid and reads no parameters."""

from __future__ import annotations

import math

from llmc.codegen.triton.tiles import power

# Keys are i32 and order as logits do: NaN above all, both zeros equal; LOWEST stands behind the row's end.
KEYS = """\
LOWEST = tl.constexpr(-2147483648)
HIGHEST = tl.constexpr(2147483647)


@triton.jit
def key_of(x):
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(key, id):
    # One i64 that orders by key, and among equals by the lower id.
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - id).to(tl.int64)


@triton.jit
def packed_key(p):
    return (p >> 32).to(tl.int32)


@triton.jit
def packed_id(p):
    return (0x7FFFFFFF - (p & 0x7FFFFFFF)).to(tl.int32)
"""

# uniform(seed, position) of llmc/ir/ops/sample.py, bit for bit.
UNIFORM = """\
@triton.jit
def mixed(z):
    z = z + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def uniform(lo, hi, position):
    low = lo.to(tl.int64).to(tl.uint64) & 0xFFFFFFFF
    high = hi.to(tl.int64).to(tl.uint64) & 0xFFFFFFFF
    z = mixed(mixed(low | (high << 32)) ^ position.to(tl.int64).to(tl.uint64))
    return (z >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
"""

# `find` inverts a cumulative sum of weights over lanes; weights are not negative.
FIND = """\
@triton.jit
def find(w, lanes, target):
    # (the first lane whose cumulative weight exceeds the target, else the last with a weight; the weight before it)
    sums = tl.cumsum(w, 0)
    first = tl.min(tl.where((sums > target) & (w > 0), lanes, HIGHEST), 0)
    last = tl.max(tl.where(w > 0, lanes, 0), 0)
    lane = tl.minimum(first, last)
    return lane, tl.sum(tl.where(lanes < lane, w, 0.0), 0)
"""

# A row is passed as ROW; `logits_of(ROW, j, ok)` reads ids j of it. `top` is its largest logit, `t` its temperature.
# Kept are the keys above `cut`, and those equal to it whose id is not above `until`.
DRAW = """\
@triton.jit
def measured(ROW, top, t, mid):
    # Of the keys from mid on: count, mass, lowest key; and the highest key below mid.
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float64)
    above = tl.full([TILE], HIGHEST, tl.int32)
    below = tl.full([TILE], LOWEST, tl.int32)
    for at in range(0, V, TILE):
        j = at + tl.arange(0, TILE)
        v = logits_of(ROW, j, j < V)
        key = tl.where(j < V, key_of(v), LOWEST)
        inside = key >= mid
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp((v - top) / t), 0.0).to(tl.float64)
        above = tl.minimum(above, tl.where(inside, key, HIGHEST))
        below = tl.maximum(below, tl.where(inside, LOWEST, key))
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def searched(ROW, top, t, low, limit, by_count: tl.constexpr):
    # The highest present key whose count (or mass) from it on reaches the limit, as that from `low` on does; and the
    # count and mass above it. Halves the range of values and of keys in turn: one is short where the other is long.
    high = key_of(top)
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    step = tl.full([], 0, tl.int32)
    while low < high:
        mid = key_of((value_of(low) + value_of(high)) * 0.5)
        by_key = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        mid = tl.where((step % 2 == 1) | (mid > high) | (mid <= low), by_key, mid)
        n, m, above, below = measured(ROW, top, t, mid)
        if by_count:
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
def weighed(ROW, top, t, cut, until, at, ties: tl.constexpr):
    # Weights of one tile: the masses of kept ids, or 1 for each id that equals the cut.
    j = at + tl.arange(0, TILE)
    v = logits_of(ROW, j, j < V)
    key = tl.where(j < V, key_of(v), LOWEST)
    if ties:
        w = (key == cut).to(tl.float64)
    else:
        kept = (key > cut) | ((key == cut) & (j <= until))
        w = tl.where(kept, tl.exp((v - top) / t), 0.0).to(tl.float64)
    return w


@triton.jit
def walked(ROW, top, t, cut, until, target, ties: tl.constexpr):
    # The id where the weights, added up in id order, exceed the target (masses: the target times their sum).
    lanes = tl.arange(0, TILES)
    sums = tl.zeros([TILES], tl.float64)
    for tile in range(0, (V + TILE - 1) // TILE):
        w = weighed(ROW, top, t, cut, until, tile * TILE, ties)
        sums = tl.where(lanes == tile, tl.sum(w, 0), sums)
    if not ties:
        target = target * tl.sum(sums, 0)
    tile, before = find(sums, lanes, target)
    w = weighed(ROW, top, t, cut, until, tile * TILE, ties)
    lane, _ = find(w, tl.arange(0, TILE), target - before)
    return tile * TILE + lane


@triton.jit
def cut_of(ROW, top, t, top_p, min_p, top_k):
    # (cut, how many of the ids that equal it): min_p, top_k and top_p each keep a prefix of the ids in descending
    # order, top_p of what the others leave.
    least = top.to(tl.float64) + t.to(tl.float64) * tl.log(tl.minimum(tl.maximum(min_p, 1e-30), 1.0).to(tl.float64))
    cut = key_of(least.to(tl.float32))
    cut = tl.where(value_of(cut).to(tl.float64) < least, cut + 1, cut)
    cut = tl.where(min_p > 0, cut, LOWEST + 1)
    ties = tl.full([], V, tl.int32)
    whole = tl.full([], -1.0, tl.float64)
    floor = tl.minimum(key_of(tl.full([], -3.0e38, tl.float32)), key_of(top))
    if (top_k > 0) & (top_k < V):
        key, count, mass = searched(ROW, top, t, floor, top_k, True)
        if key >= cut:
            cut = key
            ties = top_k - count
            whole = mass + ties.to(tl.float64) * tl.exp((value_of(key) - top) / t).to(tl.float64)
    if top_p < 1.0:
        if whole < 0:
            _, whole, _, _ = measured(ROW, top, t, cut)
        limit = whole * top_p.to(tl.float64)
        # Ids below `reach` have a mass of at most 1 - top_p together, and the largest alone has 1.
        reach = tl.maximum(top - t * (LOG_V - tl.log(tl.maximum(1.0 - top_p, 1e-7))), -3.0e38)
        low = tl.minimum(tl.maximum(cut, key_of(reach)), key_of(top))
        key, _, before = searched(ROW, top, t, low, limit, False)
        each = tl.exp((value_of(key) - top) / t).to(tl.float64)
        most = tl.minimum(tl.maximum(tl.ceil((limit - before) / each), 1.0), 1.0 * V).to(tl.int32)
        ties = tl.where(key == cut, tl.minimum(ties, most), most)
        cut = key
    return cut, ties


@triton.jit
def filtered(ROW, top, t, top_p, min_p, top_k, u):
    # The id that the row draws at u in [0, 1).
    cut, ties = cut_of(ROW, top, t, top_p, min_p, top_k)
    until = tl.full([], V, tl.int32)
    if ties < V:
        until = walked(ROW, top, t, cut, until, (ties - 1).to(tl.float64), True)
    return walked(ROW, top, t, cut, until, u, False)
"""


def helpers(v: int, tile: int, row: str, logits: str) -> str:
    """The module-level text of a kernel that draws: `logits` defines logits_of, whose row parameters `row` names."""
    tiles = max(2, power(-(-v // tile)))
    sizes = {"V": v, "TILE": tile, "TILES": tiles, "LOG_V": math.log(v)}
    head = "\n".join(f"{name} = tl.constexpr({value!r})" for name, value in sizes.items())
    return "\n\n\n".join([head, KEYS.strip(), UNIFORM.strip(), FIND.strip(), logits.strip(), DRAW.strip()]).replace(
        "ROW", row
    )
