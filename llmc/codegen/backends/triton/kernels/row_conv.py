"""Short depthwise convolutions on device rows, and the log of recurrent layers.

A device row has a ring of its last inputs [RING, channels], that of position p at p % RING. The program that computes
the first tile of a run is the only one that reads and writes the ring of its row, for its channels: tiles have at least
WIDTH - 1 tokens.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.row_runs import find_run, find_run_tile


@triton.jit
def convolve_tile(
    x_ptr, weight_ptr, bias_ptr, ring_ptr, out_ptr, tile, begin, end, first, channel, channels, WIDTH: tl.constexpr,
    RING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the results of the tokens from `tile` on, of a run from `begin` to `end` whose first position is `first`.

    ring_ptr: of the run's device row.
    """
    token = tile + tl.arange(0, TILE)
    exists = (channel < channels)[None, :]
    live = (token < end)[:, None] & exists
    total = tl.zeros([TILE, channel.shape[0]], tl.float32)
    for i in tl.static_range(WIDTH):
        source = token - (WIDTH - 1 - i)
        position = first + source - begin
        in_run = live & (source >= begin)[:, None]
        x = tl.load(x_ptr + source.to(tl.int64)[:, None] * channels + channel[None, :], mask=in_run, other=0.0)
        earlier = live & ((source < begin) & (position >= 0))[:, None]
        slot = (position + RING) % RING  # non-negative for every element that is loaded
        from_ring = tl.load(ring_ptr + slot[:, None] * channels + channel[None, :], mask=earlier, other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + i, mask=channel < channels, other=0.0).to(tl.float32)
        total += (x.to(tl.float32) + from_ring.to(tl.float32)) * weight[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    at = token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def store_ring(x_ptr, ring_ptr, begin, end, first, channel, channels, RING: tl.constexpr, RING_PADDED: tl.constexpr):
    """Store the last RING inputs of a run in the ring of its device row."""
    tl.debug_barrier()  # other threads of this program may have loaded from the ring
    token = end - 1 - tl.arange(0, RING_PADDED)
    mask = ((token >= begin) & (token >= end - RING))[:, None] & (channel < channels)[None, :]
    x = tl.load(x_ptr + token.to(tl.int64)[:, None] * channels + channel[None, :], mask=mask, other=0.0)
    slot = (first + tl.maximum(token - begin, 0)) % RING
    tl.store(ring_ptr + slot[:, None] * channels + channel[None, :], x, mask=mask)


@triton.jit
def row_conv(
    x_ptr,  # [token_count, channels]
    weight_ptr,  # [channels, WIDTH]
    bias_ptr,  # [channels], or None
    rows_ptr,  # [row_count]: the device row of each entry, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each entry
    positions_ptr,  # [token_count]: the position of each token in its sequence
    out_ptr,  # [token_count, channels]
    ring_ptr,  # [rows, RING, channels]: updated
    row_count,
    token_count,
    channels,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    RING_PADDED: tl.constexpr,
    TILE: tl.constexpr,  # tokens, at least WIDTH - 1
    CHANNELS_PER_PROGRAM: tl.constexpr,
    WHOLE_RUNS: tl.constexpr,  # a program computes all tiles of a run
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Compute one tile of a run, or all of them, for a block of channels; the first tile updates the ring."""
    wait_for_previous(DEPENDENT_LAUNCH)
    if WHOLE_RUNS:
        entry = tl.program_id(0)
        tile = entry * 0
    else:
        entry, tile = find_run_tile(rows_ptr, starts_ptr, row_count, TILE)
    row, begin, end = find_run(rows_ptr, starts_ptr, row_count, token_count, entry)
    channel = tl.program_id(1) * CHANNELS_PER_PROGRAM + tl.arange(0, CHANNELS_PER_PROGRAM)
    token = begin + tile * TILE
    stop = end if WHOLE_RUNS else tl.minimum(token + TILE, end)
    if token >= end:
        return
    if row < 0:
        for padding in range(token, stop, TILE):
            index = padding + tl.arange(0, TILE)
            at = index.to(tl.int64)[:, None] * channels + channel[None, :]
            zeros = tl.zeros([TILE, CHANNELS_PER_PROGRAM], out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, zeros, mask=(index < end)[:, None] & (channel < channels)[None, :])
        return
    ring_ptr += row.to(tl.int64) * RING * channels
    first = tl.load(positions_ptr + begin)
    for at in range(token, stop, TILE):
        convolve_tile(
            x_ptr, weight_ptr, bias_ptr, ring_ptr, out_ptr, at, begin, end, first, channel, channels, WIDTH, RING, TILE
        )
    if tile == 0:
        store_ring(x_ptr, ring_ptr, begin, end, first, channel, channels, RING, RING_PADDED)


@triton.jit
def row_log(
    k_ptr,  # [token_count, KEYS]
    v_ptr,  # [token_count, VALUES]
    decay_ptr,  # [token_count, FACTORS]
    beta_ptr,  # [token_count, HEADS], or None
    rows_ptr,  # [row_count]: the device row of each entry, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each entry
    positions_ptr,  # [token_count]: the position of each token in its sequence
    base_ptr,  # [rows]: updated, positions below it are part of the memory
    log_ptr,  # [rows, TOKENS, KEYS + VALUES + FACTORS + HEADS]: updated
    row_count,
    token_count,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    FACTORS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,  # columns per program
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Store the last tokens of a run that are not part of the memory, for a block of the columns of the log."""
    wait_for_previous(DEPENDENT_LAUNCH)
    row, begin, end = find_run(rows_ptr, starts_ptr, row_count, token_count, tl.program_id(0))
    if (row < 0) | (begin >= end):
        return
    WIDTH: tl.constexpr = KEYS + VALUES + FACTORS + HEADS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value, decay = column - KEYS, column - (KEYS + VALUES)
    first = tl.load(positions_ptr + begin)
    first_kept = tl.maximum(begin + 1, end - TOKENS)
    if tl.program_id(1) == 0:
        tl.store(base_ptr + row, first + first_kept - begin)
    log_ptr += row.to(tl.int64) * (TOKENS * WIDTH)
    zero = tl.full([], 0, tl.int64)
    for i in range(first_kept, end):
        token = zero + i
        x = tl.load(k_ptr + token * KEYS + column, mask=column < KEYS, other=0.0).to(tl.float32)
        x += tl.load(v_ptr + token * VALUES + value, mask=(value >= 0) & (value < VALUES), other=0.0).to(tl.float32)
        x += tl.load(decay_ptr + token * FACTORS + decay, mask=(decay >= 0) & (decay < FACTORS), other=0.0)
        if beta_ptr is not None:
            beta = decay - FACTORS
            x += tl.load(beta_ptr + token * HEADS + beta, mask=(beta >= 0) & (beta < HEADS), other=0.0)
        tl.store(log_ptr + (first + (i - begin)) % TOKENS * WIDTH + column, x, mask=column < WIDTH)
