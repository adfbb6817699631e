"""Linear recurrences on device rows whose states decay at a rate of each channel of a key: Kimi-Linear, Mamba-1.

A program has one run, one value head and a block of the columns of the head's state [KEY_DIM, VALUE_DIM], which it
keeps in registers as float32, and computes one token after another. With a log, it first repeats the tokens that its
row's memory does not have yet.
"""

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.row_recurrence import clear
from llmc.codegen.backends.triton.kernels.row_runs import find_run


@triton.jit
def load_row(pointer, index, count):
    """Load elements as float32, zero from `count` on."""
    return tl.load(pointer + index, mask=index < count, other=0.0).to(tl.float32)


@triton.jit
def add_channels(state, k, v, decay, beta, DELTA: tl.constexpr):
    """Return the state [KEY_PADDED, VALUE_BLOCK] after one token; k and decay [KEY_PADDED] are float32."""
    state *= tl.exp(decay)[:, None]
    if DELTA:
        v = beta * (v - tl.sum(state * k[:, None], 0))
    return state + k[:, None] * v[None, :]


@triton.jit
def add_tokens(
    state, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, column, begin, end, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
):  # fmt: skip
    """Return the state after the tokens from `begin` to `end`, and store their results."""
    row = tl.arange(0, KEY_PADDED)
    zero = tl.full([], 0, tl.int64)
    for i in range(begin, end):
        token = zero + i
        k = load_row(k_ptr + token * (KEY_HEADS * KEY_DIM), row, KEY_DIM)
        q = load_row(q_ptr + token * (KEY_HEADS * KEY_DIM), row, KEY_DIM)
        v = load_row(v_ptr + token * (VALUE_HEADS * VALUE_DIM), column, VALUE_DIM)
        decay = load_row(decay_ptr + token * (VALUE_HEADS * KEY_DIM), row, KEY_DIM)
        beta = 0.0
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + token * VALUE_HEADS)
        state = add_channels(state, k, v, decay, beta, beta_ptr is not None)
        y = tl.sum(state * q[:, None], 0)
        at = out_ptr + token * (VALUE_HEADS * VALUE_DIM) + column
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=column < VALUE_DIM)
    return state


@triton.jit
def add_logged(
    state, log_ptr, value_head, column, begin, end, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, LOG_TOKENS: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """Return the state after the positions from `begin` to `end` of a row whose log is at log_ptr [LOG_TOKENS, width].

    An entry of the log has the elements of all keys, those of all values, the decays and the betas.
    """
    row = tl.arange(0, KEY_PADDED)
    VALUES: tl.constexpr = KEY_HEADS * KEY_DIM
    DECAYS: tl.constexpr = VALUES + VALUE_HEADS * VALUE_DIM
    BETAS: tl.constexpr = DECAYS + VALUE_HEADS * KEY_DIM
    key_head = value_head // (VALUE_HEADS // KEY_HEADS)
    for position in range(begin, end):
        at = log_ptr + position % LOG_TOKENS * (BETAS + VALUE_HEADS)
        k = load_row(at + key_head * KEY_DIM, row, KEY_DIM)
        v = load_row(at + VALUES + value_head * VALUE_DIM, column, VALUE_DIM)
        decay = load_row(at + DECAYS + value_head * KEY_DIM, row, KEY_DIM)
        beta = tl.load(at + BETAS + value_head)
        state = add_channels(state, k, v, decay, beta, DELTA)
    return state


@triton.jit
def add_run(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, memory_ptr, base_ptr, log_ptr, value_head, column, begin, end,
    first, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr, LOG_TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute the tokens from `begin` to `end`, whose first position is `first`, and update the memory of the head."""
    d = tl.arange(0, KEY_PADDED)
    memory_ptr += d[:, None] * VALUE_DIM + column[None, :]
    exists = (d < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    state = tl.load(memory_ptr, mask=exists, other=0.0)
    state = tl.where(first > 0, state, 0.0)
    kept = end
    if LOG_TOKENS:
        base = tl.where(first > 0, tl.load(base_ptr), 0)
        state = add_logged(
            state, log_ptr, value_head, column, base, first, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KEY_PADDED,
            LOG_TOKENS, beta_ptr is not None,
        )  # fmt: skip
        kept = tl.maximum(begin + 1, end - LOG_TOKENS)
    state = add_tokens(
        state, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, column, begin, kept, KEY_HEADS, VALUE_HEADS, KEY_DIM,
        VALUE_DIM, KEY_PADDED,
    )  # fmt: skip
    tl.debug_barrier()  # threads may have loaded elements of the memory that others store
    tl.store(memory_ptr, state, mask=exists)
    if LOG_TOKENS:
        add_tokens(
            state, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr, column, kept, end, KEY_HEADS, VALUE_HEADS,
            KEY_DIM, VALUE_DIM, KEY_PADDED,
        )  # fmt: skip


@triton.jit
def row_channels(
    q_ptr,  # [token_count, KEY_HEADS, KEY_DIM]
    k_ptr,  # [token_count, KEY_HEADS, KEY_DIM]
    v_ptr,  # [token_count, VALUE_HEADS, VALUE_DIM]
    decay_ptr,  # [token_count, VALUE_HEADS, KEY_DIM]: logarithms
    beta_ptr,  # [token_count, VALUE_HEADS], or None without the delta rule
    base_ptr,  # [rows]: positions below it are part of the memory; None without a log
    log_ptr,  # [rows, LOG_TOKENS, width]: see `add_logged`
    rows_ptr,  # [row_count]: the device row of each entry, -1 for padding
    starts_ptr,  # [row_count + 1]: the first token of each entry
    positions_ptr,  # [token_count]: the position of each token in its sequence
    out_ptr,  # [token_count, VALUE_HEADS, VALUE_DIM]
    memory_ptr,  # [rows, VALUE_HEADS, KEY_DIM, VALUE_DIM]: updated
    row_count,
    token_count,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    LOG_TOKENS: tl.constexpr,  # the last tokens of a run that do not become part of the memory; 0 without a log
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Compute the tokens of one run, for one value head and a block of columns, and update the row's memory."""
    wait_for_previous(DEPENDENT_LAUNCH)
    value_head = tl.program_id(0) % VALUE_HEADS
    row, begin, end = find_run(rows_ptr, starts_ptr, row_count, token_count, tl.program_id(0) // VALUE_HEADS)
    column = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    out_ptr += value_head * VALUE_DIM
    if begin >= end:
        return
    if row < 0:
        clear(out_ptr, column, begin, end, VALUE_HEADS, VALUE_DIM)
        return
    key_head = value_head // (VALUE_HEADS // KEY_HEADS)
    q_ptr += key_head * KEY_DIM
    k_ptr += key_head * KEY_DIM
    v_ptr += value_head * VALUE_DIM
    decay_ptr += value_head * KEY_DIM
    if beta_ptr is not None:
        beta_ptr += value_head
    at = row.to(tl.int64)
    WIDTH: tl.constexpr = KEY_HEADS * KEY_DIM + VALUE_HEADS * (VALUE_DIM + KEY_DIM + 1)
    add_run(
        q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, out_ptr,
        memory_ptr + (at * VALUE_HEADS + value_head) * (KEY_DIM * VALUE_DIM),
        None if base_ptr is None else base_ptr + row,
        None if log_ptr is None else log_ptr + at * (LOG_TOKENS * WIDTH),
        value_head, column, begin, end, tl.load(positions_ptr + begin), KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        KEY_PADDED, LOG_TOKENS,
    )  # fmt: skip
