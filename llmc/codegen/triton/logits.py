"""The text that reads a row of logits as sampling sees it: raw, biased, penalised, masked; and the row's parameters."""

from __future__ import annotations

from llmc.ir.graph import Node

# A row of raw logits with all that a request may change of them: `logits_of(ROW, j, ok)` gives
# masked(penalised(biased(raw))).
ROW = "x, bits, counts, stops, bias_ids, biases, allowed, penal, masks, some, masked, repetition, presence, frequency"
PENALISED = """\
@triton.jit
def biased(v, bias_ids, biases, some, j):
    # The list ascends: those of its ids that lie in this tile are next to one another, and searched by halves.
    least = tl.min(j, 0)
    n = tl.full([], 0, tl.int32)
    end = n + some
    while n < end:
        mid = (n + end) // 2
        below = tl.load(bias_ids + mid) < least
        n = tl.where(below, mid + 1, n)
        end = tl.where(below, end, mid)
    most = tl.max(j, 0)
    id = tl.load(bias_ids + n, mask=n < some, other=2147483647)
    while id <= most:
        v += tl.where(j == id, tl.load(biases + n), 0.0)
        n += 1
        id = tl.load(bias_ids + n, mask=n < some, other=2147483647)
    return v


@triton.jit
def penalised(v, bits, counts, repetition, presence, frequency, j, ok):
    n = tl.load(counts + j, mask=ok, other=0)
    word = tl.load(bits + (j >> 5), mask=ok, other=0)
    hit = (((word >> (j & 31)) & 1) != 0) | (n > 0)
    v = tl.where(hit, tl.where(v > 0, v / repetition, v * repetition), v)
    return v - frequency * n.to(tl.float32) - tl.where(n > 0, presence, 0.0)
"""
_LOGITS = """\
STOPS = tl.constexpr({stops})
BIASES = tl.constexpr({biases})


@triton.jit
def finished(v, ROW, j, ok):
    if some > 0:
        v = biased(v, bias_ids, biases, some, j)
    if penal:
        v = penalised(v, bits, counts, repetition, presence, frequency, j, ok)
    if masks:
        for s in range(STOPS):
            v = tl.where(j == tl.load(stops + s), float("-inf"), v)
    if masked:
        word = tl.load(allowed + (j >> 5), mask=ok, other=0)
        v = tl.where(((word >> (j & 31)) & 1) != 0, v, float("-inf"))
    return v


@triton.jit
def logits_of(ROW, j, ok):
    return finished(tl.load(x + j, mask=ok, other=0.0).to(tl.float32), ROW, j, ok)
"""
# Logits that are ready to be drawn from, as row_sample has them.
PLAIN = """\
@triton.jit
def logits_of(x, j, ok):
    return tl.load(x + j, mask=ok, other=0.0)
"""

# The parameters of row `row`, the i-th of the step; those of row 0 stand in for padding. Operands as row_block_max's.
_PARAMETERS = """\
live = tl.maximum(row, 0)
f = x4 + live * 8
n = x5 + live * 8
t = tl.load(f)
repetition = tl.load(f + 3)
presence = tl.load(f + 4)
frequency = tl.load(f + 5)
position = tl.load(x3 + tl.maximum(tl.load(x2 + i + 1) - 1, 0)) + 1
penal = (row >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0))
masks = (row >= 0) & (position < tl.load(n + 4))
bits = x7 + live * {words}
counts = x8 + live * {v}
stops = x6 + live * STOPS
some = tl.where(row >= 0, tl.load(n + 6), 0)
masked = (row >= 0) & (tl.load(n + 7) != 0)
bias_ids = x9 + live * BIASES
biases = x10 + live * BIASES
allowed = x11 + live * {words}"""

DRAW_PARAMETERS = """\
top_p = tl.load(f + 1)
min_p = tl.load(f + 2)
top_k = tl.load(n)
u = uniform(tl.load(n + 1), tl.load(n + 2), position)"""


def _width(node: Node, operand: int) -> int:
    return int(node.operands[operand].type.shape[1])


def logits(node: Node) -> str:
    """Module-level text for a node whose operands begin as row_block_max's do."""
    stops, biases = _width(node, 6), _width(node, 9)
    return f"{PENALISED}\n\n{_LOGITS.replace('ROW', ROW).format(stops=stops, biases=biases)}"


def parameters(node: Node) -> str:
    """The entry's text for such a node, once it has `row` and `i`."""
    return _PARAMETERS.format(v=_width(node, 0), words=_width(node, 7))
