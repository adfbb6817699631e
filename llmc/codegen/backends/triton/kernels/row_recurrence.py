"""Linear recurrences on device rows: the gated delta rule (Yang et al. 2024, arXiv 2412.06464), and Mamba's rules.

A program has one run, one value head and a block of the columns of the head's state [KEY_DIM, VALUE_DIM], which it
keeps in registers as float32. It computes one token after another or, of long runs, chunks of tokens as products, some
of whose factors another launch has computed (`delta_chunk.py`). With a log, it first repeats the tokens that its row's
memory does not have yet. A state decays as a whole, or each of its rows, which are channels of a key, by itself
(Kimi-Linear, Mamba-1).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from llmc.codegen.backends.triton.kernels.delta_chunk import add_chunk
from llmc.codegen.backends.triton.kernels.dependent_launch import wait_for_previous
from llmc.codegen.backends.triton.kernels.row_runs import find_run

PADDING = tl.constexpr(16)  # tokens of padding that are cleared at once


class Head(NamedTuple):
    """The inputs and the result of one value head: pointers to its first token, and shapes."""

    q_ptr: tl.tensor
    k_ptr: tl.tensor
    v_ptr: tl.tensor
    decay_ptr: tl.tensor
    beta_ptr: tl.tensor  # None without the delta rule
    out_ptr: tl.tensor
    KEY_HEADS: tl.constexpr
    VALUE_HEADS: tl.constexpr
    KEY_DIM: tl.constexpr
    VALUE_DIM: tl.constexpr
    KEY_PADDED: tl.constexpr
    VALUE_BLOCK: tl.constexpr  # columns of a program
    DECAYS: tl.constexpr  # decays of a head: 1, or KEY_DIM


@triton.jit
def load_decay(decay_ptr, row, DECAYS: tl.constexpr):
    """Return the decay of one token's state: a number, or [KEY_PADDED, 1] if each row has its own."""
    if DECAYS == 1:
        return tl.load(decay_ptr)
    else:
        return tl.load(decay_ptr + row, mask=row < DECAYS, other=0.0)[:, None]


@triton.jit
def add_token(state, k, v, decay, beta, DELTA: tl.constexpr):
    """Return the state [KEY_PADDED, VALUE_BLOCK] after one token, whose factors are float32; see `load_decay`."""
    state *= tl.exp(decay)
    if DELTA:
        v = beta * (v - tl.sum(state * k[:, None], 0))
    return state + k[:, None] * v[None, :]


@triton.jit
def add_tokens(state, head: Head, column, begin, end):
    """Return the state after the tokens from `begin` to `end`, one after another, and store their results."""
    row = tl.arange(0, head.KEY_PADDED)
    zero = tl.full([], 0, tl.int64)
    for i in range(begin, end):
        token = zero + i
        key_at = token * (head.KEY_HEADS * head.KEY_DIM) + row
        value_at = token * (head.VALUE_HEADS * head.VALUE_DIM) + column
        k = tl.load(head.k_ptr + key_at, mask=row < head.KEY_DIM, other=0.0).to(tl.float32)
        q = tl.load(head.q_ptr + key_at, mask=row < head.KEY_DIM, other=0.0).to(tl.float32)
        v = tl.load(head.v_ptr + value_at, mask=column < head.VALUE_DIM, other=0.0).to(tl.float32)
        decay = load_decay(head.decay_ptr + token * (head.VALUE_HEADS * head.DECAYS), row, head.DECAYS)
        beta = 0.0
        if head.beta_ptr is not None:
            beta = tl.load(head.beta_ptr + token * head.VALUE_HEADS)
        state = add_token(state, k, v, decay, beta, head.beta_ptr is not None)
        y = tl.sum(state * q[:, None], 0)
        tl.store(head.out_ptr + value_at, y.to(head.out_ptr.dtype.element_ty), mask=column < head.VALUE_DIM)
    return state


@triton.jit
def add_logged(
    state, head: Head, log_ptr, value_head, column, begin, end, LOG_TOKENS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Return the state after the positions from `begin` to `end` of a row whose log is at log_ptr [LOG_TOKENS, width].

    An entry of the log has the KEYS elements of all keys, the VALUES of all values, their decays and their betas.
    """
    row = tl.arange(0, head.KEY_PADDED)
    key_at = value_head // (head.VALUE_HEADS // head.KEY_HEADS) * head.KEY_DIM + row
    value_at = KEYS + value_head * head.VALUE_DIM + column
    BETAS: tl.constexpr = KEYS + VALUES + head.VALUE_HEADS * head.DECAYS
    for position in range(begin, end):
        at = log_ptr + position % LOG_TOKENS * (BETAS + head.VALUE_HEADS)
        k = tl.load(at + key_at, mask=row < head.KEY_DIM, other=0.0)
        v = tl.load(at + value_at, mask=column < head.VALUE_DIM, other=0.0)
        decay = load_decay(at + (KEYS + VALUES) + value_head * head.DECAYS, row, head.DECAYS)
        beta = tl.load(at + BETAS + value_head)
        state = add_token(state, k, v, decay, beta, head.beta_ptr is not None)
    return state


@triton.jit
def clear(out_ptr, column, begin, end, VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Set the results of the tokens from `begin` to `end` to zero, in a block of columns of one head."""
    for i in range(begin, end, PADDING):
        token = i + tl.arange(0, PADDING)
        at = token.to(tl.int64)[:, None] * (VALUE_HEADS * VALUE_DIM) + column[None, :]
        zeros = tl.zeros([PADDING, column.shape[0]], out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, zeros, mask=(token < end)[:, None] & (column < VALUE_DIM)[None, :])


class Row(NamedTuple):
    """The memory of one value head of a device row, and the row's log: pointers to their first elements."""

    memory_ptr: tl.tensor
    base_ptr: tl.tensor  # None without a log
    log_ptr: tl.tensor  # see `add_logged`


@triton.jit
def add_run(
    head: Head, row: Row, factors_ptr, value_head, column, begin, end, first, LOG_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr, LEAST: tl.constexpr, DOT_DTYPE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute the tokens from `begin` to `end`, whose first position is `first`, and update the memory."""
    d = tl.arange(0, head.KEY_PADDED)
    memory_ptr = row.memory_ptr + (d[:, None] * head.VALUE_DIM + column[None, :])
    exists = (d < head.KEY_DIM)[:, None] & (column < head.VALUE_DIM)[None, :]
    state = tl.load(memory_ptr, mask=exists, other=0.0)
    state = tl.where(first > 0, state, 0.0)
    certain_end = end
    if LOG_TOKENS:
        base = tl.where(first > 0, tl.load(row.base_ptr), 0)
        state = add_logged(state, head, row.log_ptr, value_head, column, base, first, LOG_TOKENS, KEYS, VALUES)
        certain_end = tl.maximum(begin + 1, end - LOG_TOKENS)
    if CHUNK:
        if end - begin >= LEAST:
            for token in range(begin, certain_end, CHUNK):
                state = add_chunk(state, head, factors_ptr, column, token, certain_end, CHUNK, DOT_DTYPE)
        else:
            state = add_tokens(state, head, column, begin, certain_end)
    else:
        state = add_tokens(state, head, column, begin, certain_end)
    tl.debug_barrier()  # threads may have loaded elements of the memory that others store
    tl.store(memory_ptr, state, mask=exists)
    if LOG_TOKENS:
        add_tokens(state, head, column, certain_end, end)


@triton.jit
def row_recurrence(
    q_ptr,  # [token_count, KEY_HEADS, KEY_DIM]
    k_ptr,  # [token_count, KEY_HEADS, KEY_DIM]
    v_ptr,  # [token_count, VALUE_HEADS, VALUE_DIM]
    decay_ptr,  # [token_count, VALUE_HEADS, DECAYS]: logarithms
    beta_ptr,  # [token_count, VALUE_HEADS], or None without the delta rule
    factors_ptr,  # [token_count, VALUE_HEADS, matrices, CHUNK]: see `delta_chunk.chunk_factors`; None without chunks
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
    DECAYS: tl.constexpr,  # decay factors per head: 1 or KEY_DIM
    LOG_TOKENS: tl.constexpr,  # the last tokens of a run that do not become part of the memory; 0 without a log
    CHUNK: tl.constexpr,  # tokens that are computed as products; 0: one token after another
    LEAST: tl.constexpr,  # tokens of a run that is computed in chunks
    DOT_DTYPE: tl.constexpr,  # dtype of keys in products with the state, see `delta_chunk.times`
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Compute the tokens of one run, for one value head and a block of columns, and update the row's memory."""
    wait_for_previous(DEPENDENT_LAUNCH)
    value_head = tl.program_id(1)
    row, begin, end = find_run(rows_ptr, starts_ptr, row_count, token_count, tl.program_id(0))
    column = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    out_ptr += value_head * VALUE_DIM
    if begin >= end:
        return
    if row < 0:
        clear(out_ptr, column, begin, end, VALUE_HEADS, VALUE_DIM)
        return
    key_head = value_head // (VALUE_HEADS // KEY_HEADS)
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    at = row.to(tl.int64)
    add_run(
        Head(
            q_ptr + key_head * KEY_DIM, k_ptr + key_head * KEY_DIM, v_ptr + value_head * VALUE_DIM,
            decay_ptr + value_head * DECAYS, None if beta_ptr is None else beta_ptr + value_head, out_ptr, KEY_HEADS,
            VALUE_HEADS, KEY_DIM, VALUE_DIM, KEY_PADDED, VALUE_BLOCK, DECAYS,
        ),
        Row(
            memory_ptr + (at * VALUE_HEADS + value_head) * (KEY_DIM * VALUE_DIM),
            None if base_ptr is None else base_ptr + row,
            None if log_ptr is None else log_ptr + at * (LOG_TOKENS * (KEYS + VALUES + VALUE_HEADS * (DECAYS + 1))),
        ),
        None if factors_ptr is None else factors_ptr + value_head * ((1 if beta_ptr is None else 2) * CHUNK),
        value_head, column, begin, end, tl.load(positions_ptr + begin), LOG_TOKENS, CHUNK, LEAST, DOT_DTYPE, KEYS,
        VALUES,
    )  # fmt: skip
