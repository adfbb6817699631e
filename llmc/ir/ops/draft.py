"""Speculative decoding on the device: accepting drafted tokens, drafting by prompt lookup and by a draft model.

Drafted tokens are in the row's history after its last token. A step verifies k of them with k + 1 entries of one token
each that all emit: the row's last token, then the drafts. Whatever the history holds there, the output is that of plain
decoding, so a draft only decides how many tokens a step gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Content, Drawing, Shape
from llmc.ir.opdef import op
from llmc.ir.ops.state import HOLDS, ends, last_entries


def _emit_last(d: Drawing, shape: Shape) -> Any:
    """Draw like contents.emit, but the entries of a row that emit are its last ones."""
    out, rows = contents.emit(d, shape), contents.rows(d, shape)
    for i in range(len(out) - 2, -1, -1):
        out[i] = out[i] and (rows[i] != rows[i + 1] or out[i + 1])
    return out


_HOLDS: Mapping[str, Content] = MappingProxyType(
    {**HOLDS, "drafts": contents.drafts, "emit": _emit_last, "reach": contents.length}
)


@op(
    "(tokens: state i32[m, l], length: state i32[m], counts: state i32[m, v], rows: i32[r], starts: i32[r+1],"
    " positions: i32[t], emit: i32[r], ids: i32[r])"
    " -> (taken: i32[r], history: state i32[m, l], n: state i32[m], c: state i32[m, v])",
    writes=("tokens", "length", "counts"), bytes="40*r", holds=_HOLDS,
    example={"m": 4, "l": 8, "v": 9, "r": 5, "t": 7, "limit": 3},
)  # fmt: skip
def row_accept(
    tokens: Any, length: Any, counts: Any, rows: Any, starts: Any, positions: Any, emit: Any, ids: Any, *, limit: int
) -> Any:
    """Update the rows after a step that may verify drafted tokens, up to `limit` per row.

    The entries of a row that emit are its last ones; the token of each, except the first, is a draft. The first takes
    its sampled id. Each further one takes its own id if the entry before it took one and that equals the draft. `taken`
    is -1 for all other entries. The ids taken are counted as output, the last one becomes the row's next token (unless
    the row is full), and length becomes the number of tokens that are computed and not rejected. A row without an entry
    that emits is updated as by row_commit.

    This is the rejection rule of speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318) for a draft t that is certain, q(t) = 1: `ids` are samples of p, so that t is accepted with probability
    p(t), and a sample that differs from t has the distribution p without t, normalised. As a sample depends only on
    logits, parameters, seed and position, the tokens are those of plain decoding with the same seed.
    """
    tokens, length, counts = tokens.copy(), length.copy(), counts.copy()
    taken = np.full(len(rows), -1, np.int32)
    filled = np.diff(starts) > 0
    emits = filled & (rows >= 0) & (emit != 0)
    after = np.append(rows[1:], -1) == rows
    for i, row in enumerate(rows):
        if row < 0 or not filled[i] or (i and after[i - 1] and emits[i - 1]):
            continue
        if not emits[i]:
            length[row] = length[row] if after[i] else positions[starts[i + 1] - 1] + 1
            continue
        at = i
        while True:
            end = positions[starts[at + 1] - 1] + 1
            taken[at], length[row] = ids[at], end
            counts[row, ids[at]] += 1
            at += 1
            verifies = at <= i + limit and after[at - 1] and emits[at]
            if not verifies or tokens[row, end] != ids[at - 1]:
                break
        if end < tokens.shape[1]:
            tokens[row, end] = ids[at - 1]
    return taken, tokens, length, counts


@op(
    "(tokens: state i32[m, l], drafts: state i32[m, 4], length: state i32[m], rows: i32[r], starts: i32[r+1],"
    " emit: i32[r]) -> (proposed: i32[r], history: state i32[m, l], d: state i32[m, 4])",
    writes=("tokens", "drafts"), bytes="4*r*l", holds=_HOLDS,
    example={"m": 4, "l": 16, "r": 5},
)  # fmt: skip
def row_propose(tokens: Any, drafts: Any, length: Any, rows: Any, starts: Any, emit: Any) -> Any:
    """Draft the next tokens of the rows that emitted one by prompt lookup (Saxena 2023; arXiv 2304.04487).

    The row's tokens, length + 1 of them, end with a suffix that also occurs earlier; the longest suffix of min_ngram to
    max_ngram tokens is chosen (columns of `drafts`, see format.row_abi), at its latest earlier occurrence. The tokens
    that follow it there, up to max_drafts and continued periodically, become the history after the row's last token.
    Without such a suffix, the last token fills this place, so that it always holds ids of the vocabulary. num_drafts
    becomes the number of tokens drafted; `proposed` is this number at the row's last entry and 0 at all others.
    """
    tokens, drafts = tokens.copy(), drafts.copy()
    proposed = np.zeros(len(rows), np.int32)
    for i, row in last_entries(rows, starts):
        if not emit[i]:
            continue
        known = int(length[row]) + 1
        room = min(int(drafts[row, 1]), tokens.shape[1] - known)
        if room <= 0:
            drafts[row, 0] = 0
            continue
        start = lookup(tokens[row, :known], *drafts[row, 2:])
        source = start or known - 1
        tokens[row, known : known + room] = tokens[row, source + np.arange(room) % (known - source)]
        drafts[row, 0] = proposed[i] = room if start else 0
    return proposed, tokens, drafts


@op(
    "(reach: state i32[m], length: state i32[m], rows: i32[r]) -> (start: state i32[m])",
    writes=("reach",), bytes="12*r", holds=_HOLDS, example={"m": 4, "r": 4},
)  # fmt: skip
def row_rewind(reach: Any, length: Any, rows: Any) -> Any:
    """Place a draft model one token before the last token that the model has computed: reach becomes length - 1.

    If all drafts of the step before were accepted, the draft model lacks the KV of that token.
    """
    reach = reach.copy()
    used = rows[rows >= 0]
    reach[used] = np.maximum(length[used] - 1, 0)
    return reach


@op(
    "(tokens: state i32[m, l], reach: state i32[m], rows: i32[r], starts: i32[r+1], positions: i32[t], emit: i32[r],"
    " ids: i32[r]) -> (history: state i32[m, l], n: state i32[m])",
    writes=("tokens", "reach"), bytes="28*r", holds=_HOLDS,
    example={"m": 4, "l": 8, "r": 5, "t": 7},
)  # fmt: skip
def row_extend(tokens: Any, reach: Any, rows: Any, starts: Any, positions: Any, emit: Any, ids: Any) -> Any:
    """Append the tokens that a draft model sampled to the rows' drafts.

    For the last entry of each row, unless it has no tokens: reach becomes the number of tokens whose KV the draft model
    has; if emit is set, the id is written after them, unless the row is full.
    """
    tokens, reach = tokens.copy(), reach.copy()
    end = ends(rows, starts, positions)
    for i, row in last_entries(rows, starts):
        reach[row] = end[i]
        if emit[i] and end[i] < tokens.shape[1]:
            tokens[row, end[i]] = ids[i]
    return tokens, reach


def lookup(tokens: Any, low: int, high: int) -> int:
    """Return the index after the latest earlier occurrence of the longest suffix of `low` to `high` tokens, or 0."""
    known = len(tokens)
    for n in range(min(high, known - 1), max(low, 1) - 1, -1):
        for end in range(known - 1, n - 1, -1):
            if np.array_equal(tokens[end - n : end], tokens[known - n :]):
                return end
    return 0
