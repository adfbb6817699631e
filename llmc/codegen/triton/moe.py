"""Experts in Triton: pairs put in the order of the experts, and products of each expert's rows by tl.dot.

Programs of the products find their expert and rows from where each expert's pairs begin; there are enough programs for
any routing, and those without rows end at once. An expert that no token chose is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.base import FLOATS, INTS, Code, TritonKernel, Unit, element, unsupported
from llmc.codegen.triton.linear import clamp, inside, other
from llmc.codegen.triton.spell import helpers, inline
from llmc.codegen.triton.tiles import power
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.ir.ops.moe import gate
from llmc.ir.scalar import walk
from llmc.ir.types import Type
from llmc.targets.target import Target

CHUNK = 1024  # pairs that a program of the routing looks at together
MAX_EXPERTS = 4096  # whose pairs a program counts at once
KEYS = ("bm", "bn", "bk", "warps", "stages")
NARROW = ((32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 4, 3), (32, 64, 4, 2), (16, 32, 4, 2))
ROWS = (16, 32, 64, 128)
FLOAT = ((16, 32, 32, 4, 2), (32, 32, 16, 4, 2))  # multiplied without tensor cores


class Route(TritonKernel):
    """moe_route: a program an expert counts the pairs in front of its own, then puts its own there."""

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, INTS)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        pairs = int(node.operands[0].type.numel.subs(env))
        return target.launch_us + 2.0 + 0.3 * pairs / CHUNK

    def code(self, u: Unit) -> Code:
        experts, numel = u.node.attrs["experts"], u.node.operands[0].type.numel
        pairs = u.sizes(numel)
        chunk = CHUNK if numel.const is None else min(CHUNK, power(max(16, numel.const)))
        body = f"""
{u.wait}
e = tl.program_id(0)
c = tl.arange(0, {chunk})
before = tl.zeros([{chunk}], tl.int32)
for k in range(0, {pairs}, {chunk}):
    v = tl.load(x0 + k + c, mask=c < {pairs} - k, other={experts})
    before += (v < e).to(tl.int32)
at = tl.sum(before, axis=0)
tl.store(y1 + e, at)
if e == 0:
    tl.store(y1 + {experts}, {pairs})
for k in range(0, {pairs}, {chunk}):
    v = tl.load(x0 + k + c, mask=c < {pairs} - k, other={experts})
    mine = (v == e).to(tl.int32)
    tl.store(y0 + at + tl.cumsum(mine, axis=0) - 1, k + c, mask=mine != 0)
    at += tl.sum(mine, axis=0)
"""
        return Code(body.strip("\n"), (experts,), "", 4, 1)


@dataclass(frozen=True)
class Experts:
    """One grouped product: rows of `left` times an expert's rows of weights, parts of them side by side."""

    node: Node
    parts: int

    @property
    def w(self) -> Type:
        return self.node.operands[3].type

    @property
    def left(self) -> Type:
        return self.node.operands[0].type

    @property
    def count(self) -> int:
        return int(self.w.shape[0])

    @property
    def n(self) -> int:
        return int(self.w.shape[1]) // self.parts

    @property
    def k(self) -> int:
        return int(self.w.shape[2])

    @property
    def pairs(self) -> Dim:
        return self.node.operands[1].type.shape[0]

    @property
    def dot(self) -> str:
        return self.left.dtype if self.left.dtype == self.w.dtype else "f32"

    def blocks(self, bm: int) -> Dim:
        """Blocks of rows that any routing fits: every expert may have one that is not full."""
        most = self.pairs.ceildiv(bm) + self.count
        return most if self.pairs.const is None else D(min(self.pairs.const, int(most)))


class Grouped(TritonKernel):
    """What moe_up and moe_down share: the search for a program's expert, and the product."""

    def experts(self, node: Node) -> Experts:
        raise NotImplementedError

    def token(self, p: Experts) -> str:
        """The row of the left operand that a block's rows are at: `r` their places, `pair` the pairs."""
        raise NotImplementedError

    def finish(self, u: Unit, p: Experts) -> list[str]:
        """What is stored of the sums, at `rows` [1, bm] and `n` [bn, 1] inside `mask`."""
        raise NotImplementedError

    def reject(self, node: Node, target: Target) -> str | None:
        values = [v for i, v in enumerate([*node.operands, *node.results]) if i not in (1, 2)]
        for v in values:
            if v.type.format is not None:
                return f"operand type {v.type} is quantised"
            if v.type.dtype not in FLOATS:
                return f"dtype {v.type.dtype} is not among {', '.join(FLOATS)}"
        w = node.operands[3].type
        if any(d.const is None for d in w.shape):
            return f"the experts' sizes {w} are not constant"
        count = int(w.shape[0])
        return f"{count} experts; it takes at most {MAX_EXPERTS}" if count > MAX_EXPERTS else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = self.experts(node)
        return [dict(zip(KEYS, s, strict=True)) for s in self._offers(p) if _fits(p, s, target)]

    def _offers(self, p: Experts) -> Iterator[tuple[int, int, int, int, int]]:
        if p.dot == "f32":
            yield from FLOAT
            return
        for bm in ROWS:
            for bn, bk, warps, stages in NARROW:
                yield bm, bn, bk, warps, stages

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Experts that some token chose (all, once there are pairs enough) are read once a block of rows; half of the
        arithmetic comes beside it."""
        p, s = self.experts(node), schedule
        pairs = int(p.pairs.subs(env))
        chosen = min(pairs, p.count)
        passes = -(-pairs // (chosen * s["bm"]))
        weights = chosen * p.n * p.parts * p.k * DTYPES[p.w.dtype].bits // 8
        columns = -(-p.n // s["bn"])
        busy = min(1.0, 1.6 * chosen * columns / target.limits.units)
        moved = weights * (1 + 0.3 * (passes - 1)) / target.bandwidth / (0.8 * busy)
        flops = 2.0 * chosen * passes * s["bm"] * columns * s["bn"] * p.parts * p.k
        best = flops / target.peaks[p.dot]
        share = 0.3 if s["bn"] < 64 else 0.5
        steps = chosen * passes * columns / target.limits.units * -(-p.k // s["bk"]) * 0.02  # us of loop overhead
        return max(moved + 0.5 * best, best / share) * 1e6 + steps + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = self.experts(u.node), u.schedule
        lines = [*search(u, p, s["bm"]), "if expert < " + str(p.count) + ":"]
        lines += [f"    {x}" for x in [*self.product(u, p), *self.finish(u, p)]]
        fns = [e.fn for e in walk(gate(u.node.attrs["body"]))] if "body" in u.node.attrs else []
        grid = (D(-(-p.n // s["bn"])), p.blocks(s["bm"]))
        return Code("\n".join(lines), grid, helpers(fns), s["warps"], s["stages"])

    def product(self, u: Unit, p: Experts) -> list[str]:
        s = u.schedule
        bm, bn, bk = s["bm"], s["bn"], s["bk"]
        cast = ".to(tl.float32)" if u.interpret or p.left.dtype != p.w.dtype else ""
        wm, xm = (other(inside(f"{c} < {p.k} - k" if p.k % bk else "")) for c in ("c[None, :]", "c[:, None]"))
        loop = [f"x = tl.load(t + k{xm}){cast}"]
        for j in range(p.parts):
            loop += [
                f"w = tl.load(w{j} + k{wm}){cast}",
                f'a{j} = tl.dot(w, x, a{j}, input_precision="ieee")',
            ]
        return [
            f"r = row + tl.arange(0, {bm})",
            "pair = tl.load(x1 + r, mask=r < stop, other=0).to(tl.int64)",
            f"n = tl.program_id(0) * {bn} + tl.arange(0, {bn})",
            f"c = tl.arange(0, {bk})",
            f"base = x3 + expert.to(tl.int64) * {p.parts * p.n * p.k}",
            f"w0 = base + {clamp('n', str(p.n), bn, p.n)}[:, None] * {p.k} + c[None, :]",
            *(f"w{j} = w0 + {j * p.n * p.k}" for j in range(1, p.parts)),
            f"t = x0 + ({self.token(p)})[None, :] * {p.k} + c[:, None]",
            *(f"a{j} = tl.zeros([{bn}, {bm}], tl.float32)" for j in range(p.parts)),
            f"for k in tl.range(0, {p.k}, {bk}, num_stages={s['stages']}):",
            *(f"    {x}" for x in loop),
            f"mask = (r < stop)[None, :] & (n < {p.n})[:, None]",
        ]


def search(u: Unit, p: Experts, bm: int) -> list[str]:
    """`expert`, the first `row` of this program's block and where the expert's rows `stop`; no expert is p.count."""
    wide = power(p.count)
    return [
        *u.wait.split("\n"),
        f"e = tl.arange(0, {wide})",
        f"first = tl.load(x2 + e, mask=e < {p.count}, other=0)",
        f"rows = tl.load(x2 + e + 1, mask=e < {p.count}, other=0) - first",
        f"blocks = (rows + {bm - 1}) // {bm}",
        "ends = tl.cumsum(blocks, axis=0)",
        "block = tl.program_id(1)",
        f"expert = tl.sum(((ends <= block) & (e < {p.count})).to(tl.int32), axis=0)",
        "here = e == expert",
        f"row = tl.sum(tl.where(here, first + (block - ends + blocks) * {bm}, 0), axis=0)",
        "stop = tl.sum(tl.where(here, first + rows, 0), axis=0)",
    ]


def biased(p: Experts, operand: int) -> list[str]:
    """The sums with the expert's bias, where the node has that operand."""
    if len(p.node.operands) <= operand:
        return []
    at = f"x{operand} + expert.to(tl.int64) * {p.parts * p.n} + n"
    return [
        f"a{j} += tl.load({at} + {j * p.n}, mask=n < {p.n}, other=0).to(tl.float32)[:, None]" for j in range(p.parts)
    ]


def _fits(p: Experts, s: tuple[int, int, int, int, int], target: Target) -> bool:
    bm, bn, bk, warps, stages = s
    kept = stages if target.family == "cuda" else stages - 1
    shared = kept * (bn * p.parts + bm) * bk * DTYPES[p.dot].bits // 8
    return shared <= target.limits.shared and bm * bn * p.parts <= 128 * 32 * warps


class Up(Grouped):
    """moe_up: gate and up of every pair's token."""

    def experts(self, node: Node) -> Experts:
        return Experts(node, 2)

    def token(self, p: Experts) -> str:
        return f"pair // {p.node.attrs['k']}"

    def finish(self, u: Unit, p: Experts) -> list[str]:
        lines, value = inline(gate(u.node.attrs["body"]), ["a0", "a1"])
        at = f"y0 + r.to(tl.int64)[None, :] * {p.n} + n[:, None]"
        store = f"tl.store({at}, ({value}).to({element(u.node.result.type)}), mask=mask)"
        return [*biased(p, 4), *lines, store]


class Down(Grouped):
    """moe_down: the experts' answers, weighted, where their tokens look for them."""

    def experts(self, node: Node) -> Experts:
        return Experts(node, 1)

    def token(self, p: Experts) -> str:
        return "tl.minimum(r, stop - 1).to(tl.int64)"

    def finish(self, u: Unit, p: Experts) -> list[str]:
        return [
            *biased(p, 5),
            "scale = tl.load(x4 + pair).to(tl.float32)",
            f"tl.store(y0 + pair[None, :] * {p.n} + n[:, None], a0 * scale[None, :], mask=mask)",
        ]


ROUTE = Route("triton/moe_route", ("moe_route",))
UP = Up("triton/moe_up", ("moe_up",))
DOWN = Down("triton/moe_down", ("moe_down",))
