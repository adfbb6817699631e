"""The text that reads a row of logits as sampling sees it: raw, penalised, masked; and the row's parameters."""

from __future__ import annotations

from llmc.ir.graph import Node

# A row of raw logits with its penalties and its stop mask: `logits_of(ROW, j, ok)` gives masked(penalised(raw)).
ROW = "x, bits, counts, stops, penal, masks, repetition, presence, frequency"
PENALISED = """\
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


@triton.jit
def finished(v, ROW, j, ok):
    if penal:
        v = penalised(v, bits, counts, repetition, presence, frequency, j, ok)
    if masks:
        for s in range(STOPS):
            v = tl.where(j == tl.load(stops + s), float("-inf"), v)
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
position = tl.load(x3 + live) + tl.load(x2 + i)
penal = (row >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0))
masks = (row >= 0) & (position < tl.load(n + 4))
bits = x7 + live * {words}
counts = x8 + live * {v}
stops = x6 + live * STOPS"""

DRAW_PARAMETERS = """\
top_p = tl.load(f + 1)
min_p = tl.load(f + 2)
top_k = tl.load(n)
u = uniform(tl.load(n + 1), tl.load(n + 2), position)"""


def _width(node: Node, operand: int) -> int:
    return int(node.operands[operand].type.shape[1])


def logits(node: Node) -> str:
    """Module-level text for a node whose operands begin as row_block_max's do."""
    return f"{PENALISED}\n\n{_LOGITS.replace('ROW', ROW).format(stops=_width(node, 6))}"


def parameters(node: Node) -> str:
    """The entry's text for such a node, once it has `row` and `i`."""
    return _PARAMETERS.format(v=_width(node, 0), words=_width(node, 7))
