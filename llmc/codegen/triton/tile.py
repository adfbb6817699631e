"""Products on tensor cores: weight tiles times a few tokens (TILE), and large square tiles for prompts (GEMM).

Both are one text: TILE has the weight rows as the rows of its tiles and the tokens as their columns, so that few tokens
fill an instruction; GEMM has them the other way round, and walks its tiles in groups that stay in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.base import Code, TritonKernel, Unit
from llmc.codegen.triton.linear import (
    EVICT,
    Product,
    body_helpers,
    clamp,
    dot_cast,
    finish,
    inside,
    load_extras,
    other,
    peak,
    refuse,
)
from llmc.ir.dim import D
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.targets.target import Target

Shape = tuple[int, int, int, int, int]  # bm, bn, bk, warps, stages
LINE = 128  # bytes that one prefetch brings to the L2 cache
ASK = 64 << 10  # bytes that a program asks for ahead of its turn
# bn, bk, warps, stages of 16-bit tiles, and of float32 ones, which are multiplied without tensor cores.
NARROW = (
    (64, 128, 4, 4),
    (32, 128, 4, 5),
    (16, 256, 4, 4),
    (128, 128, 8, 3),
    (64, 64, 4, 5),
    (64, 256, 8, 3),
    (64, 128, 8, 4),
)
TOKENS = (16, 32, 64, 128, 256)
FLOAT = ((32, 32, 4, 2), (64, 16, 4, 2))
FLOAT_TOKENS = (16, 32)
# bm, bn, bk, warps, stages of large products; bn is of all parts.
LARGE = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 256, 64, 8, 4))
SMALL = (16, 16, 32, 4, 2)  # fits everywhere
LARGE_FLOAT = ((64, 64, 16, 4, 2), (32, 64, 16, 4, 2))
_SUMS = 128  # float32 sums that a thread holds at most
_PREFETCH = '"prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l"'


@dataclass(frozen=True)
class Tiled(TritonKernel):
    """linear and linear_map by tl.dot, any number of tokens. `swap`: the weight is the left factor."""

    swap: bool = False

    def reject(self, node: Node, target: Target) -> str | None:
        return refuse(node)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Product.of(node)
        keys = ("bm", "bn", "bk", "warps", "stages")
        offered = self._narrow(p) if self.swap else self._large(p)
        if target.family == "hip":  # one tile ahead, in registers
            offered = ((*s[:4], 2) for s in offered)
        shapes = [s for s in dict.fromkeys(offered) if fits(p, s, target)]
        return [dict(zip(keys, s, strict=True)) for s in shapes or [SMALL]]

    def _narrow(self, p: Product) -> Iterator[Shape]:
        tokens: tuple[int, ...] = FLOAT_TOKENS if p.dot == "f32" else TOKENS
        if (m := p.m.const) is not None:
            tokens = (next((t for t in tokens if t >= m), tokens[-1]),)
        for bm in tokens:
            for bn, bk, warps, stages in FLOAT if p.dot == "f32" else NARROW:
                yield bm, bn, bk, warps, stages

    def _large(self, p: Product) -> Iterator[Shape]:
        for bm, bn, bk, warps, stages in LARGE_FLOAT if p.dot == "f32" else LARGE:
            yield bm, bn // (1 << (p.parts - 1).bit_length()), bk, warps, stages

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = Product.of(node), schedule
        return product_us(p, s, target, env, self.swap) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = Product.of(u.node), u.schedule
        t = Text(u, p, self.swap, s["bm"], s["bn"], s["bk"], s["stages"])
        rows, columns = p.m.ceildiv(s["bm"]), -(-p.n // s["bn"])
        grid = (rows, D(columns)) if self.swap else (rows * columns,)
        return Code("\n".join(t.lines()), grid, body_helpers(p), s["warps"], s["stages"])


def fits(p: Product, s: Shape, target: Target) -> bool:
    """True where a block's tiles fit its shared memory, and its sums the registers."""
    bm, bn, bk, warps, stages = s
    kept = stages if target.family == "cuda" else stages - 1
    tiles = kept * (bn * p.parts + bm) * bk * DTYPES[p.dot].bits // 8
    return tiles <= target.limits.shared and bm * bn * p.parts <= _SUMS * warps * 32


def reading_us(p: Product, s: Schedule, target: Target, env: Mapping[str, int], swap: bool) -> float:
    """What is in flight bounds the rate: a multiprocessor takes about 1.6 shares of the bandwidth, and memory answers
    after 1 us. Programs that share weights and are not walked in groups read them again, half from the L2 cache."""
    passes, columns, units = -(-p.tokens(env) // s["bm"]), -(-p.n // s["bn"]), target.limits.units
    row = s["bk"] * DTYPES[p.w.dtype].bits // 8
    ahead = (s["stages"] - 1) * s["bn"] * p.parts * row
    tile = s["stages"] * (s["bn"] * p.parts + s["bm"]) * row
    blocks = columns if swap else columns * passes
    resident = min(blocks, units * max(1, min(target.limits.shared // tile, 16 // s["warps"])))
    busy = min(1.0, 1.6 * min(blocks, units) / units, resident * ahead / (target.bandwidth * 1e-6))
    moved = p.bytes(env) + (0.5 * (passes - 1) * p.weight_bytes if swap else 0)
    return moved / target.bandwidth / (0.86 * busy) * 1e6


def product_us(p: Product, s: Schedule, target: Target, env: Mapping[str, int], swap: bool) -> float:
    """Reading and half of the arithmetic beside it, as tiles of few tokens were measured; or the arithmetic, at the
    share of the peak that a tile of the size reaches, in whole rounds of blocks over the multiprocessors."""
    rows, columns = -(-p.tokens(env) // s["bm"]), -(-p.n // s["bn"])
    blocks, units, area = rows * columns, target.limits.units, s["bm"] * s["bn"] * p.parts
    flops = 2.0 * rows * s["bm"] * columns * s["bn"] * p.parts * p.k
    if swap:
        share = 0.35 if s["bn"] < 64 else 0.55 if area < 16384 else 0.65
    else:
        share = 0.5 if area < 16384 else 0.72 if area < 32768 else 0.77
    best = flops / peak(p, target) * 1e6
    return max(reading_us(p, s, target, env, swap) + 0.5 * best, best * (-(-blocks // units) * units / blocks) / share)


@dataclass(frozen=True)
class Text:
    """The text of one program: bn weight rows of every part times bm tokens."""

    u: Unit
    p: Product
    swap: bool
    bm: int
    bn: int
    bk: int
    stages: int

    @property
    def limit(self) -> str:
        return self.u.sizes(self.p.m)

    @property
    def mmask(self) -> str:
        m = self.p.m.const
        return "" if m is not None and m % self.bm == 0 else f"{self.token} < {self.limit}"

    @property
    def nmask(self) -> str:
        return "" if self.p.n % self.bn == 0 else f"{self.row} < {self.p.n}"

    @property
    def token(self) -> str:
        return "m[None, :]" if self.swap else "m[:, None]"

    @property
    def row(self) -> str:
        return "n[:, None]" if self.swap else "n[None, :]"

    def lines(self) -> list[str]:
        p, u = self.p, self.u
        weights = ["x1", *(f"(x1 + {j * p.n * p.k})" for j in range(1, p.parts))]
        tiles = [f"w{j} = {self.tile(w, 'wr', left=self.swap)}" for j, w in enumerate(weights)]
        wait = [*self.prefetch(weights), *u.wait.split("\n")]
        m, n = self.token, self.row
        return [
            *(self.blocks() if self.swap else self.grouped()),
            f"n = pn * {self.bn} + tl.arange(0, {self.bn})",
            f"m = (pm * {self.bm} + tl.arange(0, {self.bm})).to(tl.int64)",
            f"c = tl.arange(0, {self.bk})",
            f"wr = {clamp('n', str(p.n), self.bn, p.n)}.to(tl.int64) * {p.k}",
            f"xr = {clamp('m', self.limit, self.bm, p.m.const)} * {p.k}",
            *tiles,
            f"t = {self.tile('x0', 'xr', left=not self.swap)}",
            *filter(None, wait),
            *self.loop(),
            *load_extras(u, p, m, n, self.mmask, self.nmask),
            *finish(p, [f"a{j}" for j in range(p.parts)], m, n, self.mmask, self.nmask),
        ]

    def blocks(self) -> list[str]:
        """The programs that share weights are neighbours."""
        return ["pm = tl.program_id(0)", "pn = tl.program_id(1)"]

    def grouped(self) -> list[str]:
        """Eight rows of tiles at a time, column by column, so that both factors are found in the L2 cache."""
        columns = -(-self.p.n // self.bn)
        return [
            "pid = tl.program_id(0)",
            f"first = pid // {8 * columns} * 8",
            f"high = tl.minimum({self.u.sizes(self.p.m.ceildiv(self.bm))} - first, 8)",
            f"pm = first + pid % {8 * columns} % high",
            f"pn = pid % {8 * columns} // high",
        ]

    def tile(self, base: str, rows: str, left: bool) -> str:
        """Pointers of a factor: [rows, bk] on the left, [bk, rows] on the right."""
        return f"{base} + {rows}[:, None] + c[None, :]" if left else f"{base} + {rows}[None, :] + c[:, None]"

    def prefetch(self, weights: list[str]) -> list[str]:
        """Ask for the first columns of the weights while the launches in front are still running."""
        if not (self.swap and self.u.pdl and self.p.early):
            return []
        size = DTYPES[self.p.w.dtype].bits // 8
        columns = min(self.p.k, max(self.stages * self.bk, ASK // (self.bn * self.p.parts * size)))
        lines = 1 << (-(-columns * size // LINE)).bit_length() - 1
        at = f"wr[:, None] + tl.minimum(tl.arange(0, {lines}) * {LINE // size}, {self.p.k} - 1)[None, :]"
        ask = f"tl.inline_asm_elementwise({_PREFETCH}, [({{}} + at).to(tl.int64)], tl.int32, False, 1)"
        return [f"at = {at}", *(ask.format(w) for w in weights)]

    def loop(self) -> list[str]:
        p, u = self.p, self.u
        shape = f"[{self.bn}, {self.bm}]" if self.swap else f"[{self.bm}, {self.bn}]"
        odd = p.k % self.bk != 0
        left, right = (other(inside(f"{c} < {p.k} - k" if odd else "")) for c in ("c[None, :]", "c[:, None]"))
        wm, xm = (left, right) if self.swap else (right, left)
        hint = f", {EVICT}" if self.swap else ""
        body = [f"x = {dot_cast(u, p, f'tl.load(t + k{xm})')}"]
        for j in range(p.parts):
            body.append(f"w = {dot_cast(u, p, f'tl.load(w{j} + k{wm}{hint})')}")
            factors = "w, x" if self.swap else "x, w"
            body.append(f'a{j} = tl.dot({factors}, a{j}, input_precision="ieee")')
        return [
            *(f"a{j} = tl.zeros({shape}, tl.float32)" for j in range(p.parts)),
            f"for k in tl.range(0, {p.k}, {self.bk}, num_stages={self.stages}):",
            *(f"    {x}" for x in body),
        ]


TILE = Tiled("triton/tile", ("linear", "linear_map"), swap=True)
GEMM = Tiled("triton/gemm", ("linear", "linear_map"))
