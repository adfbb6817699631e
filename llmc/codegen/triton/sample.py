"""Sampling kernels: biases, penalties, masks, the draw; a row's draw is one program, its largest logits are many.
The text of the draw itself is in draw.py, log-probabilities are in logprobs.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.base import FLOATS, Code, TritonKernel, Unit, unsupported
from llmc.codegen.triton.draw import KEYS, helpers
from llmc.codegen.triton.logits import DRAW_PARAMETERS, PENALISED, PLAIN, ROW, logits, parameters
from llmc.codegen.triton.logprobs import stores, told, too_few
from llmc.codegen.triton.tiles import power
from llmc.ir.graph import Node
from llmc.targets.target import Target

BLOCK_US = 1.5  # a program of few loads, from start to end

_PENALIZE = """\
i = tl.program_id(1)
j = tl.program_id(0) * {block} + tl.arange(0, {block})
{wait}
row = tl.load(x1 + i).to(tl.int64)
f = x2 + tl.maximum(row, 0) * 8
some = tl.where(row >= 0, tl.load(x3 + tl.maximum(row, 0) * 8 + 6), 0)
repetition = tl.load(f + 3)
presence = tl.load(f + 4)
frequency = tl.load(f + 5)
at = i.to(tl.int64) * {v}
penal = (row >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0))
"""
_PENALIZED = """\
v = tl.load(x0 + at + j, mask=j < {v}, other=0.0).to(tl.float32)
if some > 0:
    v = biased(v, x6 + row * {biases}, x7 + row * {biases}, some, j)
if penal:
    v = penalised(v, x4 + row * {words}, x5 + row * {v}, repetition, presence, frequency, j, j < {v})
tl.store(y0 + at + j, v, mask=j < {v})"""

_MASK = """\
i = tl.program_id(0)
{wait}
row = tl.load(x1 + i).to(tl.int64)
live = tl.maximum(row, 0)
end = tl.load(x3 + tl.maximum(tl.load(x2 + i + 1) - 1, 0)) + 1
masks = (row >= 0) & (end < tl.load(x4 + live * 8 + 4))
masked = (row >= 0) & (tl.load(x4 + live * 8 + 7) != 0)
x = x0 + i.to(tl.int64) * {v}
y = y0 + i.to(tl.int64) * {v}
s = tl.arange(0, {lanes})
stop = tl.load(x5 + live * {stops} + s, mask=masks & (s < {stops}), other=-1)
if x0.to(tl.int64) != y0.to(tl.int64):
    for at in range(0, {v}, {tile}):
        j = at + tl.arange(0, {tile})
        tl.store(y + j, tl.load(x + j, mask=j < {v}, other=0.0), mask=j < {v})
    tl.debug_barrier()
if masked:
    for at in range(0, {v}, {tile}):
        j = at + tl.arange(0, {tile})
        word = tl.load(x6 + live * {words} + (j >> 5), mask=j < {v}, other=-1)
        tl.store(y + j, tl.full([{tile}], float("-inf"), tl.float32), mask=((word >> (j & 31)) & 1) == 0)
tl.store(y + stop, tl.full([{lanes}], float("-inf"), tl.float32), mask=stop >= 0)"""

_BLOCKS = """\
i = tl.program_id(1)
first = tl.program_id(0) * {per}
lanes = tl.arange(0, {block})
x = x0 + i.to(tl.int64) * {v}
{wait}
row = tl.load(x1 + i).to(tl.int64)
raw = tl.load(x + first * {block} + lanes, mask=first * {block} + lanes < {v}, other=0.0)
{parameters}
"""
_ONE_BLOCK = """\
v = finished(v.to(tl.float32), {ROW}, j, j < {v})
most = tl.max(packed(tl.where(j < {v}, key_of(v), LOWEST), j), 0)
best = value_of(packed_key(most))
mass = tl.zeros([], tl.float32)
if (row >= 0) & (t > 0):
    e = tl.exp(tl.where(v == best, 0.0, v - best) / t)
    mass = tl.sum(tl.where(j < {v}, e, 0.0), 0)
at = i.to(tl.int64) * {blocks} + block
tl.store(y0 + at, tl.where(row >= 0, best, 0.0))
tl.store(y1 + at, tl.where(row >= 0, packed_id(most), 0))
tl.store(y2 + at, mass)"""
_LONE_BLOCK = """\
block = first
v = raw
j = first * {block} + lanes
"""
# The next block is under way while this one is looked at.
_EACH_BLOCK = """\
for block in range(first, tl.minimum(first + {per}, {blocks})):
    j = block * {block} + lanes
    v = raw
    raw = tl.load(x + j + {block}, mask=(j + {block} < {v}) & (block + 1 < first + {per}), other=0.0)
"""

_PICK = """\
i = tl.program_id(0)
x = x0 + i.to(tl.int64) * {v}
block = tl.arange(0, {lanes})
at = i.to(tl.int64) * {blocks} + block
{wait}
row = tl.load(x1 + i).to(tl.int64)
best = tl.load(x13 + at, mask=block < {blocks}, other=0.0)
id = tl.load(x14 + at, mask=block < {blocks}, other=0)
{parameters}
most = tl.max(packed(tl.where(block < {blocks}, key_of(best), LOWEST), id), 0)
out = tl.where(row >= 0, packed_id(most), 0)
prompt = (row >= 0) & (position < tl.load(n + 3))
if (row >= 0) & (t > 0) & (prompt == 0):
{draw}
    top = value_of(packed_key(most))
    if (top_p < 1.0) | (min_p > 0.0) | ((top_k > 0) & (top_k < V)):
        out = filtered({ROW}, top, t, top_p, min_p, top_k, u)
    else:
        mass = tl.load(x15 + at, mask=block < {blocks}, other=0.0)
        w = tl.where(block < {blocks}, mass * tl.exp((best - top) / t), 0.0).to(tl.float64)
        target = u * tl.sum(w, 0)
        where, before = find(w, block, target)
        j = where * {block} + tl.arange(0, {block})
        v = logits_of({ROW}, j, j < V)
        e = tl.where(j < V, tl.exp((v - top) / t), 0.0).to(tl.float64)
        lane, _ = find(e, tl.arange(0, {block}), target - before)
        out = where * {block} + lane
out = tl.where(prompt, tl.load(x12 + live * {length} + position, mask=prompt, other=0), out)
tl.store(y0 + i, out)"""

# The rest of row_finish: log-probabilities of the raw logits, and the commit.
_FINISH = """
logprob, rank, ids, tops = told(x, out, (row >= 0) & (tl.load(n + 5) != 0))
{stores}
emits = tl.load(x17 + i) != 0
follows = tl.load(x1 + i + 1, mask=i + 1 < {r}, other=-1) == row
if (row >= 0) & (follows == 0) & (tl.load(x2 + i) < tl.load(x2 + i + 1)):
    tl.store(y6 + row, position)
    if emits:
        tl.store(y7 + row * {v} + out, tl.load(x8 + row * {v} + out) + 1)
        tl.store(y5 + row * {length} + position, out, mask=position < {length})"""

_SAMPLE = """\
i = tl.program_id(0)
x = x0 + i.to(tl.int64) * V
{wait}
row = tl.load(x1 + i).to(tl.int64)
out = tl.zeros([], tl.int32)
if row >= 0:
    f = x5 + row * 8
    n = x6 + row * 8
    t = tl.load(f)
    position = tl.load(x3 + tl.maximum(tl.load(x2 + i + 1) - 1, 0)) + 1
    most = tl.full([TILE], -9223372036854775808, tl.int64)
    for at in range(0, V, TILE):
        j = at + tl.arange(0, TILE)
        key = tl.where(j < V, key_of(logits_of(x, j, j < V)), LOWEST)
        most = tl.maximum(most, packed(key, j))
    first = tl.max(most, 0)
    out = packed_id(first)
    prompt = position < tl.load(n + 3)
    if (t > 0) & (prompt == 0):
{draw}
        out = filtered(x, value_of(packed_key(first)), t, top_p, min_p, top_k, u)
    out = tl.where(prompt, tl.load(x4 + row * {length} + position, mask=prompt, other=0), out)
tl.store(y0 + i, out)"""


def _indent(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.split("\n"))


def vocabulary(node: Node) -> int:
    """The columns of the logits."""
    return int(node.operands[0].type.shape[1])


class Sampling(TritonKernel):
    """What the kernels of this file share: columns that are numbers, floats and 32-bit integers."""

    def reject(self, node: Node, target: Target) -> str | None:
        if node.operands[0].type.shape[1].const is None:
            return "the vocabulary has no fixed size"
        return unsupported(node, (*FLOATS, "i32"))


def _programs_us(node: Node, ids: int, per: int, target: Target, env: Mapping[str, int]) -> float:
    """Microseconds of reading the logits with programs of `per` blocks of `ids` ids: traffic, or waves of programs (8
    at a time on a multiprocessor) that wait for memory a few times, less often for the blocks behind the first."""
    rows, v = node.operands[0].type.shape[0].subs(env).const or 1, vocabulary(node)
    nbytes = rows * v * (2 if node.operands[0].type.dtype != "f32" else 4)
    waves = -(-rows * -(-v // (per * ids)) // (8 * max(1, target.limits.units)))
    one = BLOCK_US + 0.4 * (per - 1) + ids / 8192
    return max(nbytes / target.bandwidth * 1e6, waves * one) + target.launch_us


class Penalize(Sampling):
    """row_penalize: a program a block of a row. In place, rows without penalties end at once."""

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),) if node.operands[0].type.dtype == "f32" else ()

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"block": 1024, "warps": 4}, {"block": 2048, "warps": 8}]

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        block = u.schedule.get("block", 1024)
        text = _PENALIZED
        if self.inplace(u.node, u.schedule):
            text = f"if penal | (some > 0) | (x0.to(tl.int64) != y0.to(tl.int64)):\n{_indent(text, 4)}"
        words, biases = (int(u.node.operands[n].type.shape[1]) for n in (4, 6))
        body = (_PENALIZE + text).format(block=block, v=int(v), words=words, biases=biases, wait=u.wait)
        return Code(body, (v.ceildiv(block), rows), PENALISED, u.schedule.get("warps", 4))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return _programs_us(node, schedule["block"], 1, target, env)


class Mask(Sampling):
    """row_mask: one program a row, which writes the masked ids alone where it works in place."""

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        stops, words = (int(u.node.operands[n].type.shape[1]) for n in (5, 6))
        body = _MASK.format(v=int(v), stops=stops, words=words, lanes=power(stops), tile=4096, wait=u.wait)
        return Code(body, (rows,), warps=4)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return target.launch_us + BLOCK_US


class BlockMax(Sampling):
    """row_block_max: a program takes `per` blocks of a row."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"per": per, "warps": 4} for per in (1, 2, 4, 8)]

    def reject(self, node: Node, target: Target) -> str | None:
        block = node.attrs["block"]
        return f"blocks of {block} ids" if block != power(block) else super().reject(node, target)

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        per, block, blocks = u.schedule.get("per", 1), u.node.attrs["block"], int(u.node.results[0].type.shape[1])
        text = _LONE_BLOCK + _ONE_BLOCK if per == 1 else _EACH_BLOCK + _indent(_ONE_BLOCK, 4)
        body = (_BLOCKS + text).format(
            per=per, block=block, blocks=blocks, v=int(v), parameters=parameters(u.node), ROW=ROW, wait=u.wait
        )
        helper = f"{KEYS.strip()}\n\n\n{logits(u.node)}"
        return Code(body, (u.node.results[0].type.shape[1].ceildiv(per), rows), helper, u.schedule.get("warps", 4))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return _programs_us(node, node.attrs["block"], schedule["per"], target, env)


class Draws(Sampling):
    """One program draws a row; `tile` ids at a time where it reads the row."""

    ends_us = 2.0  # of a greedy row

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"tile": 4096, "warps": 16}, {"tile": 4096, "warps": 8}]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Of greedy rows; more warps first, for the others."""
        rows = node.operands[0].type.shape[0].subs(env).const or 1
        waves = -(-rows // max(1, target.limits.units))
        return target.launch_us + waves * (self.ends_us + 0.5 * 16 / schedule["warps"])

    def tile(self, u: Unit) -> int:
        return min(int(u.schedule.get("tile", 4096)), max(16, power(vocabulary(u.node))))


class SampleBlocks(Draws):
    """row_sample_blocks: greedy rows look at the blocks' largest, plain temperatures at one block of logits."""

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        blocks, length = int(u.node.operands[13].type.shape[1]), u.sizes(u.node.operands[12].type.shape[1])
        body = _PICK.format(
            v=int(v), lanes=power(blocks), blocks=blocks, block=u.node.attrs["block"], ROW=ROW, wait=u.wait,
            length=length, parameters=parameters(u.node), draw=_indent(DRAW_PARAMETERS, 4),
        )  # fmt: skip
        text = helpers(int(v), self.tile(u), ROW, logits(u.node))
        return Code(body, (rows,), text, u.schedule.get("warps", 16))


class Finish(SampleBlocks):
    """row_finish: the draw, log-probabilities and the commit of a row by one program."""

    ends_us = 2.5

    def reject(self, node: Node, target: Target) -> str | None:
        return too_few(node) or super().reject(node, target)

    def code(self, u: Unit) -> Code:
        c = super().code(u)
        v, length, k = vocabulary(u.node), u.sizes(u.node.operands[12].type.shape[1]), int(u.node.attrs["k"])
        r = u.sizes(u.node.operands[1].type.shape[0])
        body = c.body + _FINISH.format(v=v, r=r, length=length, stores=stores(1, k))
        return replace(c, body=body, helpers=f"{c.helpers}\n\n\n{told(v, k, min(8192, power(v)))}")


class Sample(Draws):
    """row_sample: the whole row by one program."""

    ends_us = 12.0

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        length = u.sizes(u.node.operands[4].type.shape[1])
        body = _SAMPLE.format(wait=u.wait, draw=_indent(DRAW_PARAMETERS, 8), length=length)
        return Code(body, (rows,), helpers(int(v), self.tile(u), "x", PLAIN), u.schedule.get("warps", 16))


PENALIZE = Penalize("triton/row_penalize", ("row_penalize",), "triton")
MASK = Mask("triton/row_mask", ("row_mask",), "triton")
BLOCK_MAX = BlockMax("triton/row_block_max", ("row_block_max",), "triton")
SAMPLE_BLOCKS = SampleBlocks("triton/row_sample_blocks", ("row_sample_blocks",), "triton")
FINISH = Finish("triton/row_finish", ("row_finish",), "triton")
SAMPLE = Sample("triton/row_sample", ("row_sample",), "triton")
