"""Sums over the ranks of a group, and the operands of all ranks in a row.

A program computes chunks of LANES lanes. With WIDE, a lane is 16 bytes of floats; otherwise it is one element, so that
operands of any size and dtype can be exchanged.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.peer_exchange import (
    RANK_AT,
    SLOT_LANES,
    end_exchanges,
    first_exchange,
    is_running,
    order_exchanges,
    read_lane,
    receive,
    send,
    slot_of,
    write_lane,
)

NAN = tl.constexpr(0x7FFF7FFF7FFF7FFF)  # NaN in four 16-bit floats, or two of 32 bits


@triton.jit
def bits_of(x, BITS: tl.constexpr):
    """Return elements as integers of 64 bits, of which those above BITS are 0."""
    if BITS == 8:
        return x.to(tl.uint8, bitcast=True).to(tl.int64)
    elif BITS == 16:
        return x.to(tl.uint16, bitcast=True).to(tl.int64)
    elif BITS == 32:
        return x.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        return x.to(tl.int64, bitcast=True)


@triton.jit
def from_bits(bits, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Return the elements in the lowest BITS bits of integers of 64 bits."""
    if BITS == 8:
        return bits.to(tl.uint8).to(DTYPE, bitcast=True)
    elif BITS == 16:
        return bits.to(tl.uint16).to(DTYPE, bitcast=True)
    elif BITS == 32:
        return bits.to(tl.uint32).to(DTYPE, bitcast=True)
    else:
        return bits.to(DTYPE, bitcast=True)


@triton.jit
def load_lane(ptr, lane, inside, BITS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the lanes of these numbers as two words that can be sent."""
    if WIDE:
        low, high = read_lane(ptr.to(tl.int64) + lane.to(tl.int64) * 16, inside, ASSEMBLY)
        return tl.where(low == -1, NAN, low), tl.where(high == -1, NAN, high)
    else:
        bits = bits_of(tl.load(ptr + lane, mask=inside, other=0), BITS)
        return bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF


@triton.jit
def store_lane(
    ptr, lane, low, high, inside, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Store lanes that `load_lane` has loaded, at these numbers of lanes."""
    if WIDE:
        write_lane(ptr.to(tl.int64) + lane.to(tl.int64) * 16, low, high, inside, ASSEMBLY)
    else:
        tl.store(ptr + lane, from_bits(low | (high << 32), DTYPE, BITS), mask=inside)


@triton.jit
def elements(low, high, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Return the elements of lanes in float32, as a tuple."""
    values = (from_bits(low, DTYPE, BITS).to(tl.float32),)
    if WIDE:
        for at in tl.static_range(BITS, 64, BITS):
            values = values + (from_bits(low >> at, DTYPE, BITS).to(tl.float32),)
        for at in tl.static_range(0, 64, BITS):
            values = values + (from_bits(high >> at, DTYPE, BITS).to(tl.float32),)
    return values


@triton.jit
def lane_of(values, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Return the words of lanes whose elements are these floats, rounded to DTYPE."""
    low = bits_of(values[0].to(DTYPE), BITS)
    high = low * 0
    if WIDE:
        per_word: tl.constexpr = 64 // BITS
        for i in tl.static_range(1, per_word):
            low = low | (bits_of(values[i].to(DTYPE), BITS) << (BITS * i))
        for i in tl.static_range(per_word):
            high = high | (bits_of(values[per_word + i].to(DTYPE), BITS) << (BITS * i))
    return low, high


@triton.jit
def added(values, others):
    """Return the sums of the elements of two tuples."""
    out = (values[0] + others[0],)
    for i in tl.static_range(1, len(values)):
        out = out + (values[i] + others[i],)
    return out


@triton.jit
def send_to_all(
    low, high, inside, group_ptr, rank, exchange, lane, RANKS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Send lanes to every other rank."""
    for other in tl.static_range(RANKS):
        there = slot_of(group_ptr, other, rank, exchange, lane, RANKS)
        send(there, low, high, inside & (rank != other), ASSEMBLY)


@triton.jit
def add_ranks(
    low, high, r_ptr, at, inside, group_ptr, rank, exchange, lane,
    RANKS: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Receive the lanes of all other ranks in an exchange; return the elements of their sum with this rank's own.

    Elements are added in the order of the ranks, in float32, and then those of r at the lanes `at` (r_ptr may be None).
    """
    if r_ptr is not None:
        r_low, r_high = load_lane(r_ptr, at, inside, BITS, WIDE, ASSEMBLY)
    for source in tl.static_range(RANKS):
        there = slot_of(group_ptr, rank, source, exchange, lane, RANKS)
        a, b = receive(there, inside & (rank != source), group_ptr, ASSEMBLY)
        new = elements(tl.where(rank == source, low, a), tl.where(rank == source, high, b), DTYPE, BITS, WIDE)
        if source == 0:
            total = new
        else:
            total = added(total, new)
    if r_ptr is not None:
        total = added(total, elements(r_low, r_high, DTYPE, BITS, WIDE))
    return total


@triton.jit
def sum_of_ranks(
    low, high, r_ptr, at, inside, group_ptr, rank, exchange, lane,
    RANKS: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The same, as the words of lanes that can be sent."""
    total = add_ranks(low, high, r_ptr, at, inside, group_ptr, rank, exchange, lane, RANKS, DTYPE, BITS, WIDE, ASSEMBLY)
    low, high = lane_of(total, DTYPE, BITS, WIDE)
    return tl.where(low == -1, NAN, low), tl.where(high == -1, NAN, high)


@triton.jit
def all_reduce(
    x_ptr, r_ptr, y_ptr, group_ptr, NUM_LANES, CHUNKS,
    RANKS: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
    ASSEMBLY: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """y = the sum of x over the ranks + r, of NUM_LANES lanes in CHUNKS chunks. Every rank sends x to all.

    r is the same on all ranks, or None. y may be x or r.
    """
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group_ptr)
    lane = tl.arange(0, LANES)
    for chunk in range(tl.program_id(0), CHUNKS * is_running(group_ptr), tl.num_programs(0)):
        if chunk // tl.num_programs(0) % 2 == 0 and chunk >= tl.num_programs(0):
            order_exchanges(exchange, ASSEMBLY)
        at = chunk * LANES + lane
        inside = at < NUM_LANES
        low, high = load_lane(x_ptr, at, inside, BITS, WIDE, ASSEMBLY)
        send_to_all(low, high, inside, group_ptr, rank, exchange, lane, RANKS, ASSEMBLY)
        low, high = sum_of_ranks(
            low, high, r_ptr, at, inside, group_ptr, rank, exchange, lane, RANKS, DTYPE, BITS, WIDE, ASSEMBLY
        )
        store_lane(y_ptr, at, low, high, inside, DTYPE, BITS, WIDE, ASSEMBLY)
        exchange += 1
    end_exchanges(group_ptr, exchange)


@triton.jit
def all_reduce_in_parts(
    x_ptr, r_ptr, y_ptr, group_ptr, NUM_LANES, CHUNKS,
    RANKS: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
    ASSEMBLY: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """The same with RANKS parts of LANES lanes per chunk: rank r receives part r of all, and sends its sum to all."""
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group_ptr)
    lane = tl.arange(0, LANES)
    for chunk in range(tl.program_id(0), CHUNKS * is_running(group_ptr), tl.num_programs(0)):
        if chunk >= tl.num_programs(0):
            order_exchanges(exchange, ASSEMBLY)
        first = chunk * RANKS * LANES + lane
        for other in tl.static_range(RANKS):
            at = first + other * LANES
            inside = (at < NUM_LANES) & (rank != other)
            low, high = load_lane(x_ptr, at, inside, BITS, WIDE, ASSEMBLY)
            send(slot_of(group_ptr, other, rank, exchange, lane, RANKS), low, high, inside, ASSEMBLY)
        own = first + rank * LANES
        inside = own < NUM_LANES
        low, high = load_lane(x_ptr, own, inside, BITS, WIDE, ASSEMBLY)
        low, high = sum_of_ranks(
            low, high, r_ptr, own, inside, group_ptr, rank, exchange, lane, RANKS, DTYPE, BITS, WIDE, ASSEMBLY
        )
        store_lane(y_ptr, own, low, high, inside, DTYPE, BITS, WIDE, ASSEMBLY)
        send_to_all(low, high, inside, group_ptr, rank, exchange + 1, lane, RANKS, ASSEMBLY)
        for source in tl.static_range(RANKS):
            at = first + source * LANES
            inside = (at < NUM_LANES) & (rank != source)
            there = slot_of(group_ptr, rank, source, exchange + 1, lane, RANKS)
            low, high = receive(there, inside, group_ptr, ASSEMBLY)
            store_lane(y_ptr, at, low, high, inside, DTYPE, BITS, WIDE, ASSEMBLY)
        exchange += 2
    end_exchanges(group_ptr, exchange)


@triton.jit
def send_row(
    x_ptr, row, rows, WIDTH, group_ptr, rank, exchange, lane,
    RANKS: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Send a row of x to every other rank, unless there are no more rows; return its lanes."""
    inside = (lane < WIDTH) & (row < rows)
    low, high = load_lane(x_ptr, row * WIDTH + lane, inside, BITS, WIDE, ASSEMBLY)
    send_to_all(low, high, inside, group_ptr, rank, exchange, lane, RANKS, ASSEMBLY)
    return low, high


@triton.jit
def gain_of(w_ptr, lane, inside, PER_LANE: tl.constexpr):
    """Return the elements of a norm's gain at these lanes in float32, as a tuple."""
    gain = (tl.load(w_ptr + lane * PER_LANE, mask=inside, other=0.0).to(tl.float32),)
    for i in tl.static_range(1, PER_LANE):
        gain = gain + (tl.load(w_ptr + lane * PER_LANE + i, mask=inside, other=0.0).to(tl.float32),)
    return gain


@triton.jit
def normed(values, gain, EPS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return the RMS norm of a row's elements, of which there are ELEMENTS; those outside of the row are 0."""
    squares = values[0] * values[0]
    for i in tl.static_range(1, len(values)):
        squares += values[i] * values[i]
    scale = tl.rsqrt(tl.sum(squares) / ELEMENTS + EPS)
    out = (values[0] * scale * gain[0],)
    for i in tl.static_range(1, len(values)):
        out = out + (values[i] * scale * gain[i],)
    return out


@triton.jit
def all_reduce_norm(
    x_ptr, w_ptr, r_ptr, sum_ptr, y_ptr, group_ptr, ROWS, WIDTH,
    EPS: tl.constexpr, ELEMENTS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PER_LANE: tl.constexpr,
    DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr, ASSEMBLY: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """sum = the sum of x over the ranks + r; y = its RMS norm with gain w, of float32 sums.

    There are ROWS rows of WIDTH lanes (ELEMENTS elements). A program computes whole rows, and sends its next row before
    it receives the present one. The results may be x or r, which may be None.
    """
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group_ptr)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    per_row: tl.constexpr = (LANES + SLOT_LANES - 1) // SLOT_LANES  # exchanges
    rows = ROWS * is_running(group_ptr)
    step = tl.num_programs(0)
    low, high = send_row(
        x_ptr, tl.program_id(0), rows, WIDTH, group_ptr, rank, exchange, lane, RANKS, BITS, WIDE, ASSEMBLY
    )
    gain = gain_of(w_ptr, lane, inside, PER_LANE)
    for row in range(tl.program_id(0), rows, step):
        if row // step * per_row % 2 == 0 and row >= step:
            order_exchanges(exchange, ASSEMBLY)
        next_low, next_high = send_row(
            x_ptr, row + step, rows, WIDTH, group_ptr, rank, exchange + per_row, lane, RANKS, BITS, WIDE, ASSEMBLY
        )
        at = row * WIDTH + lane
        total = add_ranks(
            low, high, r_ptr, at, inside, group_ptr, rank, exchange, lane, RANKS, DTYPE, BITS, WIDE, ASSEMBLY
        )
        low, high = lane_of(total, DTYPE, BITS, WIDE)
        store_lane(sum_ptr, at, low, high, inside, DTYPE, BITS, WIDE, ASSEMBLY)
        low, high = lane_of(normed(total, gain, EPS, ELEMENTS), DTYPE, BITS, WIDE)
        store_lane(y_ptr, at, low, high, inside, DTYPE, BITS, WIDE, ASSEMBLY)
        low, high = next_low, next_high
        exchange += per_row
    end_exchanges(group_ptr, exchange)


@triton.jit
def all_gather(
    x_ptr, y_ptr, group_ptr, NUM_LANES, CHUNKS, WIDTH,
    RANKS: tl.constexpr, LANES: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
    ASSEMBLY: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """y [rows, RANKS * WIDTH] = the x [rows, WIDTH] of all ranks side by side, in lanes; x has NUM_LANES lanes."""
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group_ptr)
    lane = tl.arange(0, LANES)
    for chunk in range(tl.program_id(0), CHUNKS * is_running(group_ptr), tl.num_programs(0)):
        if chunk // tl.num_programs(0) % 2 == 0 and chunk >= tl.num_programs(0):
            order_exchanges(exchange, ASSEMBLY)
        at = chunk * LANES + lane
        inside = at < NUM_LANES
        low, high = load_lane(x_ptr, at, inside, BITS, WIDE, ASSEMBLY)
        send_to_all(low, high, inside, group_ptr, rank, exchange, lane, RANKS, ASSEMBLY)
        begin = (at // WIDTH) * (RANKS * WIDTH) + at % WIDTH
        for source in tl.static_range(RANKS):
            there = slot_of(group_ptr, rank, source, exchange, lane, RANKS)
            a, b = receive(there, inside & (rank != source), group_ptr, ASSEMBLY)
            a = tl.where(rank == source, low, a)
            b = tl.where(rank == source, high, b)
            store_lane(y_ptr, begin + source * WIDTH, a, b, inside, DTYPE, BITS, WIDE, ASSEMBLY)
        exchange += 1
    end_exchanges(group_ptr, exchange)
