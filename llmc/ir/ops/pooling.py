"""Ops of models that pool: a prompt's first token, its last position, the mean over it, and the row's new length.

States, rows and entries are those of `llmc.ir.ops.state`. An entry without tokens, or of padding, has no first token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from llmc.ir.opdef import op
from llmc.ir.ops.state import HOLDS, ends, last_entries


@op("(starts: i32[r]) -> i32[r-1]", holds=HOLDS, example={"r": 6})
def row_first(starts: Any) -> Any:
    """The flat index of each entry's first token; -1 if it has no tokens."""
    return np.where(starts[1:] > starts[:-1], starts[:-1], -1)


@op("(starts: i32[r], positions: i32[t]) -> i32[t]", bytes="8*t", holds=HOLDS, example={"r": 4, "t": 7})
def row_reach(starts: Any, positions: Any) -> Any:
    """For each token the position of its entry's last token; -1 for padding.

    Paged attention to these positions instead of the tokens' own is bidirectional.
    """
    out = np.full(len(positions), -1, np.int32)
    for start, end in pairwise(starts):
        out[start:end] = positions[end - 1]
    return np.where(positions >= 0, out, -1)


@op(
    "(x: f[t, d], starts: i32[r]) -> f32[r-1, d]", flops="t*d", bytes="t*d*bytes_x + 4*r*d", holds=HOLDS,
    example={"r": 4, "t": 7, "d": 5},
)  # fmt: skip
def row_mean(x: Any, starts: Any) -> Any:
    """The mean of each entry's tokens; 0 for an entry without tokens."""
    sums = np.zeros((len(starts) - 1, x.shape[1]), x.dtype)
    for i, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            sums[i] = x[start:end].mean(0)
    return sums


@op(
    "(length: state i32[m], rows: i32[r], starts: i32[r+1], positions: i32[t]) -> state i32[m]",
    writes=("length",), bytes="16*r", holds=HOLDS, example={"m": 4, "r": 5, "t": 7},
)  # fmt: skip
def row_advance(length: Any, rows: Any, starts: Any, positions: Any) -> Any:
    """Set the length of each row to the number of computed tokens, of its last entry unless that has no tokens."""
    length, end = length.copy(), ends(rows, starts, positions)
    for i, row in last_entries(rows, starts):
        length[row] = end[i]
    return length
