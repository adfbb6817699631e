"""Products of few tokens as streams of weight rows, multiplied in float32 registers; no tensor cores here.

A program owns `bn` rows of every part and all the tokens of its block. It loads its first weight tiles before it waits
for the launches in front of it, and reduces once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.base import Code, TritonKernel, Unit
from llmc.codegen.triton.linear import (
    EVICT,
    Product,
    body_helpers,
    clamp,
    finish,
    inside,
    load_extras,
    other,
    refuse,
)
from llmc.codegen.triton.tiles import power
from llmc.ir.dim import D
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.targets.target import Target

Shape = tuple[int, int, int, int]  # bn, bk, warps, stages
Measured = tuple[int, int, Shape]
MAX_ROWS = 8  # tokens of one program
MOST = 16  # tokens beyond which the weights would be read again and again
# Rows of all parts x columns -> the fastest (bn of all parts, bk, warps, stages) of bf16 streams measured on an H200.
MEASURED: tuple[Measured, ...] = (
    (6144, 4096, (2, 2048, 8, 2)),
    (4096, 4096, (2, 2048, 8, 2)),
    (28672, 4096, (2, 2048, 4, 1)),
    (4096, 14336, (2, 2048, 8, 2)),
    (3072, 2048, (2, 1024, 4, 2)),
    (2048, 2048, (4, 2048, 2, 2)),
    (16384, 2048, (2, 1024, 4, 2)),
    (2048, 8192, (2, 2048, 8, 2)),
    (4096, 1024, (8, 1024, 2, 2)),
    (1024, 2048, (4, 2048, 2, 1)),
    (6144, 1024, (4, 512, 4, 1)),
    (1024, 3072, (2, 1024, 4, 1)),
)
_KEYS = ("bn", "bk", "warps", "stages")
_READ = 0.96  # of the bandwidth that the best of these schedules reach


class Stream(TritonKernel):
    """linear and linear_map of 1 to about 4 tokens; any number is right."""

    measured: ClassVar[tuple[Measured, ...]] = MEASURED

    def reject(self, node: Node, target: Target) -> str | None:
        if why := refuse(node):
            return why
        m = Product.of(node).m.const
        return f"{m} tokens; a stream takes at most {MOST}" if m is not None and m > MOST else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Product.of(node)
        best = nearest(p, self.measured)
        near = sorted((r[2] for r in self.measured), key=lambda s: _distance(s, best))
        shapes = list(dict.fromkeys(_fit(p, s) for s in near))
        m = p.m.const
        counts = (2, 4, MAX_ROWS) if m is None else (min(m, MAX_ROWS), 4, 2, 1)
        found = [[dict(zip(_KEYS, s, strict=True)) | {"rows": r} for s in shapes if _holds(p, s, r)] for r in counts]
        return [x for some in found for x in some] if m is None else next(filter(None, found))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = Product.of(node), schedule
        m = p.tokens(env)
        passes = -(-m // s["rows"])
        moved = (p.bytes(env) + (passes - 1) * p.weight_bytes) / target.bandwidth / _READ
        # A weight is converted once; a token's element, too, and then multiplied with the weights of all rows.
        steps = 1 + s["rows"] * (1 + 1.2 / (s["bn"] * p.parts))
        arithmetic = passes * p.parts * p.n * p.k * steps * 2 / target.peaks["f32"] / 0.85
        far = _distance(tuple(s[k] for k in _KEYS), _fit(p, nearest(p, self.measured)))
        return math.hypot(moved, arithmetic) * 1e6 * (1 + 0.02 * far) + target.launch_us

    def tile(self, u: Unit, p: Product, bn: int, bk: int, rows: int) -> Tile:
        """The text of one program."""
        return Tile(u, p, bn, bk, rows)

    def code(self, u: Unit) -> Code:
        p, s = Product.of(u.node), u.schedule
        rows, blocks = s["rows"], p.m.ceildiv(s["rows"])
        tile = self.tile(u, p, s["bn"], s["bk"], rows)
        lines = [*tile.start(), *tile.stream(s["stages"]), *tile.reduce()]
        helpers = f"{body_helpers(p)}\n\n{tile.reducer()}"
        return Code("\n".join(lines), (D(-(-p.n // s["bn"])), blocks), helpers, s["warps"], 1)


def nearest(p: Product, measured: Sequence[Measured]) -> Shape:
    """The measured schedule of the shape that is nearest in size and form."""
    n, k = math.log2(p.n * p.parts), math.log2(p.k)
    return min(measured, key=lambda r: (abs(math.log2(r[0]) - n) + abs(math.log2(r[1]) - k), r[0]))[2]


def _fit(p: Product, s: Shape) -> Shape:
    """A measured schedule with its rows dealt to the parts, for this width of an element and this depth.

    A thread reads 16 bytes of each row at once and no two warps read the same columns, so x is read once a program."""
    bn, bk, warps, stages = s
    lanes = 32 * 128 // DTYPES[p.w.dtype].bits
    while warps > 1 and lanes * warps > power(p.k):
        warps //= 2
    bk = min(max(bk, lanes * warps), max(lanes * warps, power(p.k)))
    return min(max(1, bn // power(p.parts)), power(p.n)), bk, warps, stages if bk < p.k else 1


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """How many factors of two lie between two schedules."""
    return sum(abs(math.log2(x / y)) for x, y in zip(a, b, strict=True))


def _holds(p: Product, s: Shape, rows: int) -> bool:
    """True where the float32 sums of a thread, and the weights on their way to it, fit its registers."""
    bn, bk, warps, stages = s
    each = bn * bk * p.parts // (warps * 32)
    return each * rows <= 128 and each * rows + stages * each * DTYPES[p.w.dtype].bits // 32 <= 256


class Tile:
    """The text of one program: bn rows of every part, bk columns at a time, for `rows` tokens."""

    def __init__(self, u: Unit, p: Product, bn: int, bk: int, rows: int) -> None:
        self.u, self.p, self.bn, self.bk, self.rows = u, p, bn, bk, rows
        self.m = p.m.const
        self.whole = self.m is not None and self.m % rows == 0
        self.limit = u.sizes(p.m)
        self.cells = [(i, j) for i in range(rows) for j in range(p.parts)]
        self.joint = len(self.cells) > 1 and not u.interpret

    def start(self) -> list[str]:
        p, bn = self.p, self.bn
        first = "tl.program_id(1)" if self.m is None or self.m > self.rows else "0"
        lines = [
            f"n0 = tl.program_id(0) * {bn}",
            f"n = n0 + tl.arange(0, {bn})",
            f"c = tl.arange(0, {self.bk})",
            f"near = {clamp('n', str(p.n), bn, p.n)} - n0",
            f"w0 = x1 + n0.to(tl.int64) * {p.k} + near[:, None] * {p.k} + c[None, :]",
            *(f"w{j} = w0 + {j * p.n * p.k}" for j in range(1, p.parts)),
        ]
        for i in range(self.rows):
            at = f"{first} * {self.rows} + {i}" if first != "0" else str(i)
            lines.append(f"m{i} = tl.cast({at}, tl.int64)")
            lines.append(f"r{i} = x0 + {clamp(f'm{i}', self.limit, self.rows, self.m)} * {p.k} + c")
        return lines

    def stream(self, stages: int) -> list[str]:
        """The sums over k, with up to `stages` tiles of each part loaded ahead, the first of them before the wait."""
        p, steps = self.p, -(-self.p.k // self.bk)
        ahead = min(stages, steps)
        early = [x for a in range(ahead) for x in self.weights(str(a * self.bk), a)]
        wait = [x for x in self.u.wait.split("\n") if x]
        lines = [*early, *wait] if p.early else [*wait, *early]
        lines += self.extras()
        lines += [f"a{i}_{j} = tl.zeros([{self.bn}, {self.bk}], tl.float32)" for i, j in self.cells]
        left = steps - ahead
        if left:
            lines.append(f"for k in range(0, {left * self.bk}, {self.bk}):")
            inner = self.sums("k", 0)
            inner += [f"v{j}_{a} = v{j}_{a + 1}" for a in range(ahead - 1) for j in range(p.parts)]
            inner += self.weights(f"k + {ahead * self.bk}", ahead - 1)
            lines += [f"    {x}" for x in inner]
        for a in range(ahead):
            lines += self.sums(str((left + a) * self.bk), a)
        return lines

    def weights(self, k: str, slot: int) -> list[str]:
        mask = other(inside(self.columns(k, "c[None, :]")))
        return [f"v{j}_{slot} = tl.load(w{j} + ({k}){mask}, {EVICT})" for j in range(self.p.parts)]

    def inside(self, k: str) -> str:
        """The mask argument of a step's columns."""
        return inside(self.columns(k, "c"))

    def columns(self, k: str, c: str) -> str:
        return "" if self.p.k % self.bk == 0 else f"{c} < {self.p.k} - ({k})"

    def sums(self, k: str, slot: int) -> list[str]:
        mask = other(self.inside(k))
        lines = [f"f{j} = v{j}_{slot}.to(tl.float32)" for j in range(self.p.parts)]
        for i in range(self.rows):
            lines += self.tokens(i, f"tl.load(r{i} + ({k}){mask}).to(tl.float32)")
            lines += [f"a{i}_{j} += f{j} * t{i}[None, :]" for j in range(self.p.parts)]
        return lines

    def tokens(self, i: int, loaded: str) -> list[str]:
        """`t{i}`: the elements of token i that meet the weights of this step."""
        return [f"t{i} = {loaded}"]

    def scaled(self) -> list[str]:
        """What is done to the sums before the epilogue."""
        return []

    def reducer(self) -> str:
        """The sum of several values at once: one trip through shared memory for all."""
        if not self.joint:
            return ""
        a, b = ([f"{x}{i}" for i in range(len(self.cells))] for x in "ab")
        sums = ", ".join(f"{x} + {y}" for x, y in zip(a, b, strict=True))
        return f"@triton.jit\ndef plus({', '.join([*a, *b])}):\n    return {sums}"

    def masks(self, i: int) -> tuple[str, str]:
        return "" if self.whole else f"m{i} < {self.limit}", "" if self.p.n % self.bn == 0 else f"n < {self.p.n}"

    def extras(self) -> list[str]:
        found = (load_extras(self.u, self.p, f"m{i}", "n", *self.masks(i), f"_{i}") for i in range(self.rows))
        return [x for lines in found for x in lines]

    def reduce(self) -> list[str]:
        names = [f"a{i}_{j}" for i, j in self.cells]
        if self.joint:
            lines = [f"{', '.join(names)} = tl.reduce(({', '.join(names)}), 1, plus)"]
        else:
            lines = [f"{x} = tl.sum({x}, axis=1)" for x in names]
        lines += self.scaled()
        for i in range(self.rows):
            accs = [f"a{i}_{j}" for j in range(self.p.parts)]
            lines += finish(self.p, accs, f"m{i}", "n", *self.masks(i), f"_{i}")
        return lines


STREAM = Stream("triton/stream", ("linear", "linear_map"))
