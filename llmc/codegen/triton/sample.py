"""Sampling kernels: penalties, stop masks, the draw; a row's draw is one program, its largest logits are many. The text
of the draw itself is in draw.py, log-probabilities are in logprobs.py."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.base import FLOATS, Code, TritonKernel, Unit, unsupported
from llmc.codegen.triton.draw import KEYS, helpers, power
from llmc.ir.graph import Node
from llmc.targets.target import Target

BLOCK_US = 1.5  # a program of few loads, from start to end

# A row of raw logits with its penalties and its stop mask: what `logits_of` gives is masked(penalised(raw)).
ROW = "x, bits, counts, stops, penal, masks, repetition, presence, frequency"
_PENALISED = """\
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
def logits_of(ROW, j, ok):
    v = tl.load(x + j, mask=ok, other=0.0).to(tl.float32)
    if penal:
        v = penalised(v, bits, counts, repetition, presence, frequency, j, ok)
    if masks:
        for s in range(STOPS):
            v = tl.where(j == tl.load(stops + s), float("-inf"), v)
    return v
"""
_PLAIN = """\
@triton.jit
def logits_of(x, j, ok):
    return tl.load(x + j, mask=ok, other=0.0)
"""

# The parameters of row `row`, the i-th of the step. Operands x0 .. x8 as those of row_block_max.
_PARAMETERS = """\
f = x4 + row * 8
n = x5 + row * 8
t = tl.load(f)
repetition = tl.load(f + 3)
presence = tl.load(f + 4)
frequency = tl.load(f + 5)
penal = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
position = tl.load(x3 + row) + tl.load(x2 + i)
masks = position < tl.load(n + 4)
x = x0 + i.to(tl.int64) * {v}
bits = x7 + row * {words}
counts = x8 + row * {v}
stops = x6 + row * STOPS"""

_DRAW_PARAMETERS = """\
top_p = tl.load(f + 1)
min_p = tl.load(f + 2)
top_k = tl.load(n)
u = uniform(tl.load(n + 1), tl.load(n + 2), position)"""

_PENALIZE = """\
i = tl.program_id(1)
j = tl.program_id(0) * {block} + tl.arange(0, {block})
{wait}
row = tl.load(x1 + i).to(tl.int64)
f = x2 + tl.maximum(row, 0) * 8
repetition = tl.load(f + 3)
presence = tl.load(f + 4)
frequency = tl.load(f + 5)
at = i.to(tl.int64) * {v}
penal = (row >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0))
"""
_PENALIZED = """\
v = tl.load(x0 + at + j, mask=j < {v}, other=0.0).to(tl.float32)
if penal:
    v = penalised(v, x3 + row * {words}, x4 + row * {v}, repetition, presence, frequency, j, j < {v})
tl.store(y0 + at + j, v, mask=j < {v})"""

_MASK = """\
i = tl.program_id(0)
{wait}
row = tl.load(x1 + i).to(tl.int64)
live = tl.maximum(row, 0)
masks = (row >= 0) & (tl.load(x3 + live) + tl.load(x2 + i) < tl.load(x4 + live * 8 + 4))
x = x0 + i.to(tl.int64) * {v}
y = y0 + i.to(tl.int64) * {v}
s = tl.arange(0, {lanes})
stop = tl.load(x5 + live * {stops} + s, mask=masks & (s < {stops}), other=-1)
if x0.to(tl.int64) != y0.to(tl.int64):
    for at in range(0, {v}, {tile}):
        j = at + tl.arange(0, {tile})
        tl.store(y + j, tl.load(x + j, mask=j < {v}, other=0.0), mask=j < {v})
    tl.debug_barrier()
tl.store(y + stop, tl.full([{lanes}], float("-inf"), tl.float32), mask=stop >= 0)"""

_BLOCKS = """\
i = tl.program_id(1)
block = tl.program_id(0) * {per} + tl.arange(0, {per})
{wait}
row = tl.load(x1 + i).to(tl.int64)
best = tl.zeros([{per}], tl.float32)
id = tl.zeros([{per}], tl.int32)
mass = tl.zeros([{per}], tl.float32)
if row >= 0:
{parameters}
    j = block[:, None] * {block} + tl.arange(0, {block})[None, :]
    v = logits_of({ROW}, j, j < {v})
    most = tl.max(packed(tl.where(j < {v}, key_of(v), LOWEST), j), 1)
    best = value_of(packed_key(most))
    id = packed_id(most)
    if t > 0:
        e = tl.exp(tl.where(v == best[:, None], 0.0, v - best[:, None]) / t)
        mass = tl.sum(tl.where(j < {v}, e, 0.0), 1)
at = i.to(tl.int64) * {blocks} + block
tl.store(y0 + at, best, mask=block < {blocks})
tl.store(y1 + at, id, mask=block < {blocks})
tl.store(y2 + at, mass, mask=block < {blocks})"""

_PICK = """\
i = tl.program_id(0)
{wait}
row = tl.load(x1 + i).to(tl.int64)
block = tl.arange(0, {lanes})
at = i.to(tl.int64) * {blocks} + block
best = tl.load(x9 + at, mask=block < {blocks}, other=0.0)
key = tl.where(block < {blocks}, key_of(best), LOWEST)
id = tl.load(x10 + at, mask=block < {blocks}, other=0)
most = tl.max(packed(key, id), 0)
out = packed_id(most)
if row < 0:
    out = tl.zeros_like(out)
else:
    t = tl.load(x4 + row * 8)
    if t > 0:
{parameters}
        top = value_of(packed_key(most))
        if (top_p < 1.0) | (min_p > 0.0) | ((top_k > 0) & (top_k < V)):
            out = filtered({ROW}, top, t, top_p, min_p, top_k, u)
        else:
            mass = tl.load(x11 + at, mask=block < {blocks}, other=0.0)
            w = tl.where(block < {blocks}, mass * tl.exp((best - top) / t), 0.0).to(tl.float64)
            target = u * tl.sum(w, 0)
            where, before = find(w, block, target)
            j = where * {block} + tl.arange(0, {block})
            v = logits_of({ROW}, j, j < V)
            e = tl.where(j < V, tl.exp((v - top) / t), 0.0).to(tl.float64)
            lane, _ = find(e, tl.arange(0, {block}), target - before)
            out = where * {block} + lane
tl.store(y0 + i, out)"""

_SAMPLE = """\
i = tl.program_id(0)
{wait}
row = tl.load(x1 + i).to(tl.int64)
out = tl.zeros([], tl.int32)
if row >= 0:
    x = x0 + i.to(tl.int64) * V
    f = x4 + row * 8
    n = x5 + row * 8
    t = tl.load(f)
    position = tl.load(x3 + row) + tl.load(x2 + i)
    most = tl.full([TILE], -9223372036854775808, tl.int64)
    for at in range(0, V, TILE):
        j = at + tl.arange(0, TILE)
        key = tl.where(j < V, key_of(logits_of(x, j, j < V)), LOWEST)
        most = tl.maximum(most, packed(key, j))
    first = tl.max(most, 0)
    out = packed_id(first)
    if t > 0:
{parameters}
        out = filtered(x, value_of(packed_key(first)), t, top_p, min_p, top_k, u)
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


def _logits(stops: int) -> str:
    return f"{_PENALISED}\n\n{_LOGITS.replace('ROW', ROW).format(stops=stops)}"


def _programs_us(node: Node, per: int, target: Target, env: Mapping[str, int]) -> float:
    """Microseconds of reading the logits with programs of `per` ids: traffic, or waves of programs that each wait for
    memory a few times (8 at a time on a multiprocessor)."""
    rows, v = node.operands[0].type.shape[0].subs(env).const or 1, vocabulary(node)
    nbytes = rows * v * (2 if node.operands[0].type.dtype != "f32" else 4)
    waves = -(-rows * -(-v // per) // (8 * max(1, target.limits.units)))
    return max(nbytes / target.bandwidth * 1e6, waves * (BLOCK_US + per / 8192)) + target.launch_us


class Penalize(Sampling):
    """row_penalize: a program a block of a row. In place, rows without penalties end at once."""

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),) if node.operands[0].type.dtype == "f32" else ()

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"block": 1024, "warps": 4}, {"block": 4096, "warps": 8}]

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        block = u.schedule.get("block", 1024)
        text = _PENALIZED
        if self.inplace(u.node, u.schedule):
            text = f"if penal | (x0.to(tl.int64) != y0.to(tl.int64)):\n{_indent(text, 4)}"
        words = u.sizes(u.node.operands[3].type.shape[1])
        body = (_PENALIZE + text).format(block=block, v=int(v), words=words, wait=u.wait)
        return Code(body, (v.ceildiv(block), rows), _PENALISED, u.schedule.get("warps", 4))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return _programs_us(node, schedule["block"], target, env)


class MaskStops(Sampling):
    """row_mask_stops: one program a row, which writes the stop ids alone where it works in place."""

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        stops = int(u.node.operands[5].type.shape[1])
        body = _MASK.format(v=int(v), stops=stops, lanes=power(stops), tile=4096, wait=u.wait)
        return Code(body, (rows,), warps=4)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return target.launch_us + BLOCK_US


class BlockMax(Sampling):
    """row_block_max: a program takes `per` blocks of a row."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"per": 1, "warps": 4}, {"per": 2, "warps": 4}, {"per": 4, "warps": 8}, {"per": 8, "warps": 8}]

    def reject(self, node: Node, target: Target) -> str | None:
        block = node.attrs["block"]
        return f"blocks of {block} ids" if block != power(block) else super().reject(node, target)

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        per, block, blocks = u.schedule.get("per", 1), u.node.attrs["block"], int(u.node.results[0].type.shape[1])
        stops, words = (int(u.node.operands[i].type.shape[1]) for i in (6, 7))
        parameters = _indent(_PARAMETERS.format(v=int(v), words=words), 4)
        body = _BLOCKS.format(
            per=per, block=block, blocks=blocks, v=int(v), parameters=parameters, ROW=ROW, wait=u.wait
        )
        text = f"{KEYS.strip()}\n\n\n{_logits(stops)}"
        return Code(body, (u.node.results[0].type.shape[1].ceildiv(per), rows), text, u.schedule.get("warps", 4))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return _programs_us(node, schedule["per"] * node.attrs["block"], target, env)


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
        stops, words = (int(u.node.operands[i].type.shape[1]) for i in (6, 7))
        blocks = int(u.node.operands[9].type.shape[1])
        parameters = f"{_PARAMETERS.format(v=int(v), words=words)}\n{_DRAW_PARAMETERS}"
        body = _PICK.format(
            lanes=power(blocks), blocks=blocks, block=u.node.attrs["block"], ROW=ROW, wait=u.wait,
            parameters=_indent(parameters, 8),
        )  # fmt: skip
        text = helpers(int(v), self.tile(u), ROW, _logits(stops))
        return Code(body, (rows,), text, u.schedule.get("warps", 16))


class Sample(Draws):
    """row_sample: the whole row by one program."""

    ends_us = 12.0

    def code(self, u: Unit) -> Code:
        rows, v = u.node.operands[0].type.shape
        body = _SAMPLE.format(wait=u.wait, parameters=_indent(_DRAW_PARAMETERS, 8))
        return Code(body, (rows,), helpers(int(v), self.tile(u), "x", _PLAIN), u.schedule.get("warps", 16))


PENALIZE = Penalize("triton/row_penalize", ("row_penalize",), "triton")
MASK_STOPS = MaskStops("triton/row_mask_stops", ("row_mask_stops",), "triton")
BLOCK_MAX = BlockMax("triton/row_block_max", ("row_block_max",), "triton")
SAMPLE_BLOCKS = SampleBlocks("triton/row_sample_blocks", ("row_sample_blocks",), "triton")
SAMPLE = Sample("triton/row_sample", ("row_sample",), "triton")
