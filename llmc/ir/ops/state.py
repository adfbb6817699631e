"""Ops that read and write device rows and KV pages in place.

A request owns one row of every row state. A state may be read many times and is written once; the result of the writing
op is its next version. Rows of -1 are padding and are neither read nor written. Entries of a step that name the same
row are adjacent and their tokens consecutive; each entry has its own logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Content
from llmc.ir.dim import Dim
from llmc.ir.opdef import op

# What the operands of ops on device rows hold, by operand name.
HOLDS: Mapping[str, Content] = MappingProxyType(
    {
        "rows": contents.rows, "qlens": contents.qlens, "starts": contents.starts, "token_row": contents.token_row,
        "positions": contents.positions, "length": contents.length, "pages": contents.page_table,
        "kv": contents.kv_pool, "slots": contents.slots, "tokens": contents.history, "counts": contents.counts,
        "emit": contents.emit, "ids": contents.token_ids, "scales": contents.positive, "pool": contents.kv_pool,
    }
)  # fmt: skip


@op(
    "(rows: i32[r], qlens: i32[r], length: state i32[m]) -> (starts: i32[r+1], token_row: i32[tokens],"
    " positions: i32[tokens])", holds=HOLDS, example={"r": 4, "m": 4, "tokens": 7},
)  # fmt: skip
def row_spans(rows: Any, qlens: Any, length: Any, *, tokens: Dim) -> Any:
    """Lay out the step's tokens on one flat axis, the qlens[i] tokens of each entry after those of the previous one.

    `starts` are the entries' offsets; `token_row` and `positions` are each flat token's device row and its position in
    the sequence (-1: padding).
    """
    starts = np.concatenate([[0], np.cumsum(qlens)]).astype(np.int32)
    token_row = np.full(int(tokens), -1, np.int32)
    positions = np.full(int(tokens), -1, np.int32)
    first = 0  # start of the first entry of this device row
    for i, row in enumerate(rows):
        first = first if i and rows[i - 1] == row else starts[i]
        if row >= 0:
            span = np.arange(starts[i], starts[i + 1])
            token_row[span], positions[span] = row, length[row] + span - first
    return starts, token_row, positions


@op(
    "(tokens: state i32[m, l], token_row: i32[t], positions: i32[t]) -> i32[t]", bytes="12*t", holds=HOLDS,
    example={"m": 4, "l": 9, "t": 4},
)  # fmt: skip
def row_ids(tokens: Any, token_row: Any, positions: Any) -> Any:
    """Token ids from the rows' histories; 0 for padding."""
    ids = tokens[np.maximum(token_row, 0), np.maximum(positions, 0)]
    return np.where(token_row >= 0, ids, 0)


@op(
    "(pages: state i32[m, l], token_row: i32[t], positions: i32[t]) -> i32[t]", bytes="12*t", holds=HOLDS,
    example={"m": 4, "l": 9, "t": 4, "page": 2},
)  # fmt: skip
def row_slots(pages: Any, token_row: Any, positions: Any, *, page: int) -> Any:
    """The flat KV slot (page number * page + offset) of each token; -1 for padding and for negative positions."""
    at = np.maximum(positions, 0)
    slots = pages[np.maximum(token_row, 0), at // page] * page + at % page
    return np.where((token_row >= 0) & (positions >= 0), slots, -1)


@op(
    "(rows: i32[r], qlens: i32[r], length: state i32[m], tokens: state i32[m, l], pages: state i32[m, p])"
    " -> (starts: i32[r+1], token_row: i32[tokens], positions: i32[tokens], ids: i32[tokens], slots: i32[tokens])",
    holds=HOLDS, example={"r": 4, "m": 4, "l": 9, "p": 5, "tokens": 7, "page": 2},
)  # fmt: skip
def row_begin(rows: Any, qlens: Any, length: Any, history: Any, pages: Any, *, tokens: Dim, page: int) -> Any:
    """row_spans, and row_ids and row_slots of its tokens: everything that the first layer needs."""
    starts, token_row, positions = row_spans.ref(rows, qlens, length, tokens=tokens)
    ids = row_ids.ref(history, token_row, positions)
    return starts, token_row, positions, ids, row_slots.ref(pages, token_row, positions, page=page)


@op(
    "(kv: state f[p, 2, g, page, d], k: f[t, g, d], v: f[t, g, d], slots: i32[t], scales?kv: f32[2*g])"
    " -> state kv[p, 2, g, page, d]",
    writes=("kv",), bytes="2*t*g*d*bytes_k + 2*t*g*d*bytes_kv + 4*t", holds=HOLDS,
    example={"p": 4, "g": 2, "page": 3, "d": 5, "t": 4},
)  # fmt: skip
def kv_append(kv: Any, k: Any, v: Any, slots: Any, scales: Any = None, largest: float = 0.0) -> Any:
    """Write keys and values to flat slots of the KV pool; slots of -1 are skipped.

    A pool of 8-bit floats holds them times the reciprocals of `scales`, those of the heads of keys and then of values;
    numbers above the pool's largest one saturate.
    """
    kv = kv.copy()
    if scales is not None:
        pairs = zip((k, v), np.split(scales, 2), strict=True)
        k, v = (np.clip(x * (1 / s)[:, None], -largest, largest) for x, s in pairs)
    page = kv.shape[3]
    for i, s in enumerate(slots):
        if s >= 0:
            kv[s // page, 0, :, s % page], kv[s // page, 1, :, s % page] = k[i], v[i]
    return kv


@op(
    "(pool: state f[p, page, d], x: pool[t, d], slots: i32[t]) -> state pool[p, page, d]",
    writes=("pool",), bytes="2*t*d*bytes_x + 4*t", holds=HOLDS, example={"p": 4, "page": 3, "d": 5, "t": 4},
)  # fmt: skip
def page_put(pool: Any, x: Any, slots: Any) -> Any:
    """Write a row per token to flat slots of a pool of pages, for example hidden states; slots of -1 are skipped."""
    pool = pool.copy()
    stored = slots >= 0
    pool.reshape(-1, pool.shape[-1])[slots[stored]] = x[stored]
    return pool


@op(
    "(pool: state f[p, page, d], slots: i32[t]) -> pool[t, d]",
    bytes="2*t*d*bytes_pool + 4*t", holds=HOLDS, example={"p": 4, "page": 3, "d": 5, "t": 4},
)  # fmt: skip
def page_take(pool: Any, slots: Any) -> Any:
    """Read a row per token from flat slots of a pool of pages; zeros for slots of -1."""
    rows = pool.reshape(-1, pool.shape[-1])[np.maximum(slots, 0)]
    return np.where((slots >= 0)[:, None], rows, 0)


@op("(starts: i32[r]) -> i32[r-1]", holds=HOLDS, example={"r": 6})
def row_last(starts: Any) -> Any:
    """The flat index of each entry's last token; -1 if it has no tokens."""
    return np.where(starts[1:] > starts[:-1], starts[1:] - 1, -1)


def last_entries(rows: Any, starts: Any) -> Iterator[tuple[int, int]]:
    """Yield (entry, device row) for the last entry of each row, unless that has no tokens."""
    for i, row in enumerate(rows):
        if row >= 0 and starts[i] < starts[i + 1] and (i + 1 == len(rows) or rows[i + 1] != row):
            yield i, row


def ends(rows: Any, starts: Any, positions: Any) -> Any:
    """Return the position of each entry's new token, one after its last; undefined for padding."""
    return positions[np.clip(starts[1:] - 1, 0, None)] + 1


@op(
    "(tokens: state i32[m, l], length: state i32[m], counts: state i32[m, v], rows: i32[r], starts: i32[r+1],"
    " positions: i32[t], emit: i32[r], ids: i32[r])"
    " -> (history: state i32[m, l], n: state i32[m], c: state i32[m, v])",
    writes=("tokens", "length", "counts"), bytes="32*r", holds=HOLDS,
    example={"m": 4, "l": 8, "v": 9, "r": 5, "t": 7},
)  # fmt: skip
def row_commit(
    tokens: Any, length: Any, counts: Any, rows: Any, starts: Any, positions: Any, emit: Any, ids: Any
) -> Any:
    """Update the rows after a step.

    For the last entry of each row, unless it has no tokens: length becomes the number of computed tokens; if emit is
    set, the sampled id is counted as output and becomes the row's next token (unless the row is full).
    """
    tokens, length, counts = tokens.copy(), length.copy(), counts.copy()
    end = ends(rows, starts, positions)
    for i, row in last_entries(rows, starts):
        length[row] = end[i]
        if emit[i]:
            if end[i] < tokens.shape[1]:
                tokens[row, end[i]] = ids[i]
            counts[row, ids[i]] += 1
    return tokens, length, counts
