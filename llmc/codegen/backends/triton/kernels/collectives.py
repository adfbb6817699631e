"""Sums over the ranks of a group, and the operands of all ranks in a row.

A program computes chunks of LANES lanes. With WIDE, a lane is 16 bytes of floats; otherwise it is one element, so that
operands of any size and dtype can be exchanged.
"""

from typing import NamedTuple

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


class Group(NamedTuple):
    """The memory of a group of ranks, and the elements that they exchange."""

    memory_ptr: tl.tensor  # see `peer_exchange`
    RANKS: tl.constexpr
    DTYPE: tl.constexpr
    BITS: tl.constexpr  # bits per element
    WIDE: tl.constexpr
    ASSEMBLY: tl.constexpr


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
def load_lane(ptr, lane, inside, group: Group):
    """Return the lanes of these numbers as two words that can be sent."""
    if group.WIDE:
        low, high = read_lane(ptr.to(tl.int64) + lane.to(tl.int64) * 16, inside, group.ASSEMBLY)
        return tl.where(low == -1, NAN, low), tl.where(high == -1, NAN, high)
    else:
        bits = bits_of(tl.load(ptr + lane, mask=inside, other=0), group.BITS)
        return bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF


@triton.jit
def store_lane(ptr, lane, low, high, inside, group: Group):
    """Store lanes that `load_lane` has loaded, at these numbers of lanes."""
    if group.WIDE:
        write_lane(ptr.to(tl.int64) + lane.to(tl.int64) * 16, low, high, inside, group.ASSEMBLY)
    else:
        tl.store(ptr + lane, from_bits(low | (high << 32), group.DTYPE, group.BITS), mask=inside)


@triton.jit
def elements(low, high, group: Group):
    """Return the elements of lanes in float32, as a tuple."""
    BITS: tl.constexpr = group.BITS
    values = (from_bits(low, group.DTYPE, BITS).to(tl.float32),)
    if group.WIDE:
        for at in tl.static_range(BITS, 64, BITS):
            values = values + (from_bits(low >> at, group.DTYPE, BITS).to(tl.float32),)
        for at in tl.static_range(0, 64, BITS):
            values = values + (from_bits(high >> at, group.DTYPE, BITS).to(tl.float32),)
    return values


@triton.jit
def lane_of(values, group: Group):
    """Return the words of lanes whose elements are these floats, rounded to DTYPE."""
    BITS: tl.constexpr = group.BITS
    low = bits_of(values[0].to(group.DTYPE), BITS)
    high = low * 0
    if group.WIDE:
        per_word: tl.constexpr = 64 // BITS
        for i in tl.static_range(1, per_word):
            low = low | (bits_of(values[i].to(group.DTYPE), BITS) << (BITS * i))
        for i in tl.static_range(per_word):
            high = high | (bits_of(values[per_word + i].to(group.DTYPE), BITS) << (BITS * i))
    return low, high


@triton.jit
def added(values, others):
    """Return the sums of the elements of two tuples."""
    out = (values[0] + others[0],)
    for i in tl.static_range(1, len(values)):
        out = out + (values[i] + others[i],)
    return out


@triton.jit
def send_to_all(low, high, inside, group: Group, rank, exchange, lane):
    """Send lanes to every other rank."""
    for other in tl.static_range(group.RANKS):
        there = slot_of(group.memory_ptr, other, rank, exchange, lane, group.RANKS)
        send(there, low, high, inside & (rank != other), group.ASSEMBLY)


@triton.jit
def receive_from(source, low, high, inside, group: Group, rank, exchange, lane):
    """Return the lanes that the rank `source` has sent; this rank's own are low, high."""
    there = slot_of(group.memory_ptr, rank, source, exchange, lane, group.RANKS)
    a, b = receive(there, inside & (rank != source), group.memory_ptr, group.ASSEMBLY)
    return tl.where(rank == source, low, a), tl.where(rank == source, high, b)


@triton.jit
def add_ranks(low, high, r_ptr, at, inside, group: Group, rank, exchange, lane):
    """Receive the lanes of all other ranks in an exchange; return the elements of their sum with this rank's own.

    Elements are added in the order of the ranks, in float32, and then those of r at the lanes `at` (r_ptr may be None).
    """
    if r_ptr is not None:
        r_low, r_high = load_lane(r_ptr, at, inside, group)
    for source in tl.static_range(group.RANKS):
        a, b = receive_from(source, low, high, inside, group, rank, exchange, lane)
        new = elements(a, b, group)
        if source == 0:
            total = new
        else:
            total = added(total, new)
    if r_ptr is not None:
        total = added(total, elements(r_low, r_high, group))
    return total


@triton.jit
def sum_of_ranks(low, high, r_ptr, at, inside, group: Group, rank, exchange, lane):
    """The same, as the words of lanes that can be sent."""
    low, high = lane_of(add_ranks(low, high, r_ptr, at, inside, group, rank, exchange, lane), group)
    return tl.where(low == -1, NAN, low), tl.where(high == -1, NAN, high)


@triton.jit
def all_reduce(
    x_ptr, r_ptr, y_ptr, group: Group, NUM_LANES, CHUNKS, LANES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr
):
    """y = the sum of x over the ranks + r, of NUM_LANES lanes in CHUNKS chunks. Every rank sends x to all.

    r is the same on all ranks, or None. y may be x or r.
    """
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group.memory_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group.memory_ptr)
    lane = tl.arange(0, LANES)
    for chunk in range(tl.program_id(0), CHUNKS * is_running(group.memory_ptr), tl.num_programs(0)):
        if chunk // tl.num_programs(0) % 2 == 0 and chunk >= tl.num_programs(0):
            order_exchanges(exchange, group.ASSEMBLY)
        at = chunk * LANES + lane
        inside = at < NUM_LANES
        low, high = load_lane(x_ptr, at, inside, group)
        send_to_all(low, high, inside, group, rank, exchange, lane)
        low, high = sum_of_ranks(low, high, r_ptr, at, inside, group, rank, exchange, lane)
        store_lane(y_ptr, at, low, high, inside, group)
        exchange += 1
    end_exchanges(group.memory_ptr, exchange)


@triton.jit
def all_reduce_in_parts(
    x_ptr, r_ptr, y_ptr, group: Group, NUM_LANES, CHUNKS, LANES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr
):
    """The same with RANKS parts of LANES lanes per chunk: rank r receives part r of all, and sends its sum to all."""
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group.memory_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group.memory_ptr)
    lane = tl.arange(0, LANES)
    for chunk in range(tl.program_id(0), CHUNKS * is_running(group.memory_ptr), tl.num_programs(0)):
        if chunk >= tl.num_programs(0):
            order_exchanges(exchange, group.ASSEMBLY)
        first = chunk * group.RANKS * LANES + lane
        for other in tl.static_range(group.RANKS):
            at = first + other * LANES
            inside = (at < NUM_LANES) & (rank != other)
            low, high = load_lane(x_ptr, at, inside, group)
            there = slot_of(group.memory_ptr, other, rank, exchange, lane, group.RANKS)
            send(there, low, high, inside, group.ASSEMBLY)
        own_lane = first + rank * LANES
        inside = own_lane < NUM_LANES
        low, high = load_lane(x_ptr, own_lane, inside, group)
        low, high = sum_of_ranks(low, high, r_ptr, own_lane, inside, group, rank, exchange, lane)
        store_lane(y_ptr, own_lane, low, high, inside, group)
        send_to_all(low, high, inside, group, rank, exchange + 1, lane)
        for source in tl.static_range(group.RANKS):
            at = first + source * LANES
            inside = (at < NUM_LANES) & (rank != source)
            there = slot_of(group.memory_ptr, rank, source, exchange + 1, lane, group.RANKS)
            low, high = receive(there, inside, group.memory_ptr, group.ASSEMBLY)
            store_lane(y_ptr, at, low, high, inside, group)
        exchange += 2
    end_exchanges(group.memory_ptr, exchange)


@triton.jit
def send_row(x_ptr, row, rows, WIDTH, group: Group, rank, exchange, lane):
    """Send a row of x to every other rank, unless there are no more rows; return its lanes."""
    inside = (lane < WIDTH) & (row < rows)
    low, high = load_lane(x_ptr, row * WIDTH + lane, inside, group)
    send_to_all(low, high, inside, group, rank, exchange, lane)
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
    x_ptr, w_ptr, r_ptr, sum_ptr, y_ptr, group: Group, ROWS, WIDTH, EPS: tl.constexpr, ELEMENTS: tl.constexpr,
    LANES: tl.constexpr, PER_LANE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """sum = the sum of x over the ranks + r; y = its RMS norm with gain w, of float32 sums.

    There are ROWS rows of WIDTH lanes (ELEMENTS elements). A program computes whole rows, and sends its next row before
    it receives the present one. The results may be x or r, which may be None.
    """
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group.memory_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group.memory_ptr)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    per_row: tl.constexpr = (LANES + SLOT_LANES - 1) // SLOT_LANES  # exchanges
    rows = ROWS * is_running(group.memory_ptr)
    step = tl.num_programs(0)
    low, high = send_row(x_ptr, tl.program_id(0), rows, WIDTH, group, rank, exchange, lane)
    gain = gain_of(w_ptr, lane, inside, PER_LANE)
    for row in range(tl.program_id(0), rows, step):
        if row // step * per_row % 2 == 0 and row >= step:
            order_exchanges(exchange, group.ASSEMBLY)
        next_low, next_high = send_row(x_ptr, row + step, rows, WIDTH, group, rank, exchange + per_row, lane)
        at = row * WIDTH + lane
        total = add_ranks(low, high, r_ptr, at, inside, group, rank, exchange, lane)
        low, high = lane_of(total, group)
        store_lane(sum_ptr, at, low, high, inside, group)
        low, high = lane_of(normed(total, gain, EPS, ELEMENTS), group)
        store_lane(y_ptr, at, low, high, inside, group)
        low, high = next_low, next_high
        exchange += per_row
    end_exchanges(group.memory_ptr, exchange)


@triton.jit
def all_gather(
    x_ptr, y_ptr, group: Group, NUM_LANES, CHUNKS, WIDTH, LANES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr
):
    """y [rows, RANKS * WIDTH] = the x [rows, WIDTH] of all ranks side by side, in lanes; x has NUM_LANES lanes."""
    wait_for_previous(DEPENDENT_LAUNCH)
    rank = tl.load(group.memory_ptr + RANK_AT).to(tl.int32)
    exchange = first_exchange(group.memory_ptr)
    lane = tl.arange(0, LANES)
    for chunk in range(tl.program_id(0), CHUNKS * is_running(group.memory_ptr), tl.num_programs(0)):
        if chunk // tl.num_programs(0) % 2 == 0 and chunk >= tl.num_programs(0):
            order_exchanges(exchange, group.ASSEMBLY)
        at = chunk * LANES + lane
        inside = at < NUM_LANES
        low, high = load_lane(x_ptr, at, inside, group)
        send_to_all(low, high, inside, group, rank, exchange, lane)
        begin = (at // WIDTH) * (group.RANKS * WIDTH) + at % WIDTH
        for source in tl.static_range(group.RANKS):
            a, b = receive_from(source, low, high, inside, group, rank, exchange, lane)
            store_lane(y_ptr, begin + source * WIDTH, a, b, inside, group)
        exchange += 1
    end_exchanges(group.memory_ptr, exchange)
