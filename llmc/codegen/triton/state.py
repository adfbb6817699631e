"""Kernels over device rows: flat tokens, ids, slots, the commit; a lane a row or a token, and no sampling."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.base import Code, TritonKernel, Unit, unsupported
from llmc.codegen.triton.tiles import power
from llmc.ir.dim import Dim
from llmc.ir.graph import Node
from llmc.targets.target import Target

LANES = 128
TOKENS = 32  # flat tokens of one program of row_spans
ROWS = 256  # rows that it looks at together
LATENCY_US = 0.6  # of a load whose address another load gives

_LATEST = """\
@triton.jit
def latest(a, b):
    return tl.maximum(a, b)
"""
_SPANS = """\
t = tl.program_id(0) * {tokens} + tl.arange(0, {tokens})
token_row = tl.full([{tokens}], -1, tl.int32)
position = tl.full([{tokens}], -1, tl.int32)
done = tl.full([], 0, tl.int32)
run = tl.full([], 0, tl.int32)
{wait}
for first in range(0, {r}, {rows}):
    i = first + tl.arange(0, {rows})
    q = tl.load(x1 + i, mask=i < {r}, other=0)
    row = tl.load(x0 + i, mask=i < {r}, other=-1)
    length = tl.load(x2 + row, mask=row >= 0, other=0)
    ends = done + tl.cumsum(q, 0)
    begins = ends - q
    again = (i > 0) & (tl.load(x0 + i - 1, mask=(i > 0) & (i < {r}), other=-1) == row)
    firsts = tl.maximum(tl.associative_scan(tl.where(again, 0, begins), 0, latest), run)
    if tl.program_id(0) == 0:
        tl.store(y0 + 1 + i, ends, mask=i < {r})
    mine = (begins[None, :] <= t[:, None]) & (t[:, None] < ends[None, :]) & (row >= 0)[None, :]
    token_row += tl.sum(tl.where(mine, row[None, :] + 1, 0), 1)
    position += tl.sum(tl.where(mine, (length - firsts)[None, :] + t[:, None] + 1, 0), 1)
    done += tl.sum(q, 0)
    run = tl.max(firsts, 0)
if tl.program_id(0) == 0:
    tl.store(y0, 0)
tl.store(y1 + t, token_row, mask=t < {t})
tl.store(y2 + t, position, mask=t < {t})"""

_IDS = """\
live = (t < {t}) & (token_row >= 0)
found = tl.load({tokens} + token_row.to(tl.int64) * {length} + position, mask=live, other=0)
tl.store({out} + t, found, mask=t < {t})"""

_SLOTS = """\
live = (t < {t}) & (token_row >= 0)
pages = {pages} + token_row.to(tl.int64) * {length}
slot = tl.load(pages + position // {page}, mask=live, other=0) * {page} + position % {page}
tl.store({out} + t, tl.where(live, slot, -1), mask=t < {t})"""

_OF_TOKEN = """\
t = tl.program_id(0) * {lanes} + tl.arange(0, {lanes})
{wait}
token_row = tl.load(x1 + t, mask=t < {t}, other=-1)
position = tl.load(x2 + t, mask=t < {t}, other=0)
"""

_LAST = """\
i = tl.program_id(0) * {lanes} + tl.arange(0, {lanes})
{wait}
start = tl.load(x0 + i, mask=i < {r}, other=0)
end = tl.load(x0 + i + 1, mask=i < {r}, other=0)
tl.store(y0 + i, tl.where(end > start, end - 1, -1), mask=i < {r})"""

_COMMIT = """\
i = tl.program_id(0) * {lanes} + tl.arange(0, {lanes})
{wait}
row = tl.load(x3 + i, mask=i < {r}, other=-1)
start = tl.load(x4 + i, mask=i < {r}, other=0)
end = tl.load(x4 + i + 1, mask=i < {r}, other=0)
emits = tl.load(x6 + i, mask=i < {r}, other=0) != 0
id = tl.load(x7 + i, mask=i < {r}, other=0)
live = (row >= 0) & (start < end) & (tl.load(x3 + i + 1, mask=i + 1 < {r}, other=-1) != row)
length = tl.load(x5 + end - 1, mask=live, other=0) + 1
at = row.to(tl.int64) * {vocab} + id
n = tl.load(x2 + at, mask=live & emits, other=0)
tl.store(y1 + row, length, mask=live)
tl.store(y0 + row.to(tl.int64) * {length} + length, id, mask=live & emits & (length < {length}))
tl.store(y2 + at, n + 1, mask=live & emits)"""


class Integers(TritonKernel):
    """What the kernels of this file share: 32-bit integers, and a time that no size of a step changes much."""

    chain = 2  # loads that wait for one another

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, ("i32",))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return target.launch_us + self.chain * LATENCY_US


class Spans(Integers):
    """The flat token axis. Every program sums all rows' counts for itself, so that one launch is enough."""

    def code(self, u: Unit) -> Code:
        body, tokens = spans(u)
        return Code(body, (tokens.ceildiv(TOKENS),), _LATEST)


class Begin(Integers):
    """`row_begin`: the flat token axis, and each token's id and slot."""

    chain = 3

    def code(self, u: Unit) -> Code:
        body, tokens = spans(u)
        n, history, table = u.sizes(tokens), *(u.sizes(u.node.operands[i].type.shape[1]) for i in (3, 4))
        ids = _IDS.format(t=n, tokens="x3", length=history, out="y3")
        slots = _SLOTS.format(t=n, pages="x4", length=table, page=u.node.attrs["page"], out="y4")
        return Code(f"{body}\n{ids}\n{slots}", (tokens.ceildiv(TOKENS),), _LATEST)


def spans(u: Unit) -> tuple[str, Dim]:
    """The text that fills y0, y1, y2 as row_spans says, and the number of tokens."""
    r, tokens = u.node.operands[0].type.shape[0], u.node.results[1].type.shape[0]
    rows = ROWS if r.const is None else min(ROWS, max(16, power(r.const)))
    return _SPANS.format(r=u.sizes(r), t=u.sizes(tokens), rows=rows, tokens=TOKENS, wait=u.wait), tokens


class OfToken(Integers):
    """row_ids and row_slots: a lane a token."""

    def code(self, u: Unit) -> Code:
        width, tokens = u.node.operands[0].type.shape[1], u.node.result.type.shape[0]
        n, length = u.sizes(tokens), u.sizes(width)
        body = _OF_TOKEN.format(t=n, lanes=LANES, wait=u.wait)
        if u.node.op.name == "row_ids":
            body += _IDS.format(t=n, tokens="x0", length=length, out="y0")
        else:
            body += _SLOTS.format(t=n, pages="x0", length=length, page=u.node.attrs["page"], out="y0")
        return Code(body, (tokens.ceildiv(LANES),))


class Last(Integers):
    """row_last: a lane a row."""

    chain = 1

    def code(self, u: Unit) -> Code:
        r = u.node.result.type.shape[0]
        return Code(_LAST.format(r=u.sizes(r), lanes=LANES, wait=u.wait), (r.ceildiv(LANES),))


class Commit(Integers):
    """row_commit: a lane an entry; the last of a row alone writes."""

    def code(self, u: Unit) -> Code:
        history, _, counts, rows = (v.type.shape for v in u.node.operands[:4])
        sizes = {"r": u.sizes(rows[0]), "length": u.sizes(history[1]), "vocab": u.sizes(counts[1])}
        return Code(_COMMIT.format(lanes=LANES, wait=u.wait, **sizes), (rows[0].ceildiv(LANES),))


SPANS = Spans("triton/row_spans", ("row_spans",), "triton")
BEGIN = Begin("triton/row_begin", ("row_begin",), "triton")
OF_TOKEN = OfToken("triton/row_tokens", ("row_ids", "row_slots"), "triton")
LAST = Last("triton/row_last", ("row_last",), "triton")
COMMIT = Commit("triton/row_commit", ("row_commit",), "triton")
