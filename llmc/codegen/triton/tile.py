"""Products on tensor cores: weight tiles times a few tokens (TILE), and large square tiles for prompts (GEMM).

Both are one text: TILE has the weight rows as the rows of its tiles and the tokens as their columns, so that few tokens
fill an instruction; GEMM has them the other way round, and walks its tiles in groups that stay in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from llmc.codegen.triton.tiles import power
from llmc.ir.dim import D
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.targets.target import Target

Shape = tuple[int, int, int, int, int, int]  # bm, bn, bk, warps, stages, split
KEYS = ("bm", "bn", "bk", "warps", "stages", "split")
LINE = 128  # bytes that one prefetch brings to the L2 cache
GROUP = 8  # rows of tiles that are walked together
EARLY = 32  # tokens up to which a program keeps its extras in registers while it multiplies
TOKENS = (8, 16, 32, 64, 128, 256)
# bn, bk, warps, stages, split of 16-bit tiles.
NARROW = (
    (64, 128, 4, 4, 1),
    (32, 256, 4, 4, 4),
    (16, 512, 4, 4, 4),
    (64, 128, 4, 6, 1),
    (32, 256, 4, 6, 4),
    (16, 256, 4, 6, 4),
    (8, 512, 4, 4, 4),
    (32, 128, 4, 5, 1),
    (64, 64, 4, 8, 1),
    (128, 64, 4, 4, 1),
    (128, 128, 8, 3, 1),
    (64, 256, 4, 3, 1),
    (64, 128, 4, 8, 1),
    (64, 64, 4, 12, 1),
    (128, 128, 8, 5, 1),
    (128, 64, 8, 6, 1),
    (64, 256, 4, 4, 1),
    (32, 128, 4, 4, 1),
    (32, 128, 4, 8, 1),
    (32, 64, 4, 8, 1),
    (32, 512, 4, 3, 4),
    (16, 512, 4, 6, 4),
    (16, 256, 4, 10, 4),
    (8, 512, 4, 6, 4),
    (8, 256, 4, 6, 4),
)
# float32 factors are multiplied without tensor cores: bm, bn, bk, warps, stages.
FLOAT = ((16, 32, 32, 4, 2), (16, 64, 16, 4, 2), (32, 32, 32, 4, 2), (32, 64, 16, 4, 2))
# bm, bn, bk, warps, stages of large products; bn is of all parts.
LARGE = (
    (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 256, 64, 8, 4),
    (128, 256, 64, 8, 4), (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (64, 128, 128, 4, 4),
)  # fmt: skip
LARGE_FLOAT = ((64, 64, 16, 4, 2), (32, 64, 16, 4, 2))
SMALL = (16, 16, 32, 4, 2, 1)  # fits everywhere
_SUMS = 128  # float32 sums that a thread holds at most
WARPGROUP = 64  # rows of the widest instruction
MATRIX = 16  # rows and columns of AMD's least one
_L2 = 2.2  # times the memory's bandwidth: what the L2 cache gives
_PREFETCH = '"prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l"'


@dataclass(frozen=True)
class Tiled(TritonKernel):
    """linear and linear_map by tl.dot, any number of tokens. `swap`: the weight is the left factor."""

    swap: bool = False
    crowds: bool = True
    yields: bool = True

    def reject(self, node: Node, target: Target) -> str | None:
        return refuse(node)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Product.of(node)
        offered = self._narrow(p) if self.swap else self._large(p)
        if target.family == "hip":  # one tile ahead, in registers; the least instruction has 16 rows and columns
            offered = ((max(MATRIX, s[0]), max(MATRIX, s[1]), *s[2:4], 2, 1) for s in offered)
        shapes = [s for s in dict.fromkeys(offered) if fits(p, s, target)]
        return [dict(zip(KEYS, s, strict=True)) for s in shapes or [SMALL]]

    def _narrow(self, p: Product) -> Iterator[Shape]:
        m = p.m.const
        if p.dot == "f32":
            yield from ((*s, 1) for s in FLOAT)
            return
        for bm in TOKENS if m is None else (next((t for t in TOKENS if t >= m), TOKENS[-1]),):
            yield from ((bm, *s) for s in NARROW)

    def _large(self, p: Product) -> Iterator[Shape]:
        for bm, bn, bk, warps, stages in LARGE_FLOAT if p.dot == "f32" else LARGE:
            yield bm, bn // power(p.parts), bk, warps, stages, 1

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = Product.of(node), schedule
        return product_us(p, s, target, env, self.swap) * (slower(p, s) if self.swap else 1.0) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = Product.of(u.node), u.schedule
        t = self.text(u, p)
        rows, columns = p.m.ceildiv(s["bm"]), -(-p.n // s["bn"])
        grid = (rows, D(columns)) if self.swap else (rows * columns,)
        return Code("\n".join(t.lines()), grid, body_helpers(p), s["warps"], s["stages"])

    def text(self, u: Unit, p: Product) -> Text:
        """What writes the statements."""
        s = u.schedule
        return Text(u, p, self.swap, s["bm"], s["bn"], s["bk"], s["stages"], s["split"])


def fits(p: Product, s: Shape, target: Target) -> bool:
    """True where a block's tiles fit its shared memory, and its sums the registers."""
    bm, bn, _, warps, _, split = s
    shared = tiles_bytes(p, dict(zip(KEYS, s, strict=True)), target)
    return shared <= target.limits.shared and bm * bn * p.parts * split <= _SUMS * warps * target.limits.warp


def tiles_bytes(p: Product, s: Schedule, target: Target) -> int:
    """Shared memory: instructions that read it themselves hold one tile more than those that read registers."""
    rows = s["bn"] * (2 if joins(p, s["bn"], s["split"]) else 1)
    direct = target.family == "cuda" and rows >= WARPGROUP and s["bm"] >= 16
    kept = s["stages"] - (not direct)
    return int(kept * (s["bn"] * p.parts + s["bm"]) * s["bk"] * DTYPES[p.dot].bits // 8)


def joins(p: Product, bn: int, split: int) -> bool:
    """Whether both parts are one tile: half as many rows of each still fill an instruction."""
    return split == 1 and p.parts == 2 and bn < WARPGROUP


def reading_us(p: Product, s: Schedule, target: Target, env: Mapping[str, int], swap: bool) -> float:
    """What is in flight bounds the rate: a multiprocessor takes about 1.6 shares of the bandwidth, and memory answers
    after 1 us. Programs that share weights and are not walked in groups read them again, mostly from the L2 cache."""
    passes, columns, units = -(-p.tokens(env) // s["bm"]), -(-p.n // s["bn"]), target.limits.units
    row = s["bk"] * DTYPES[p.w.dtype].bits // 8
    ahead = (s["stages"] - 1) * s["bn"] * p.parts * row
    blocks = columns if swap else columns * passes
    room = min(target.limits.shared // tiles_bytes(p, s, target), 32 // s["warps"])
    resident = min(blocks, units * max(1, room))
    busy = min(1.0, 1.6 * min(blocks, units) / units, resident * ahead / (target.bandwidth * 1e-6))
    moved = p.bytes(env) + (0.1 * (passes - 1) * p.weight_bytes if swap else 0)
    near = passes * columns * (s["bn"] * p.parts + s["bm"]) * p.k * DTYPES[p.w.dtype].bits // 8
    return max(moved / (0.86 * busy), near / _L2) / target.bandwidth * 1e6


def slower(p: Product, s: Schedule) -> float:
    """What the rule cannot see, as measured on an H200: warps that split the columns need many steps and few tokens,
    flat tiles of many tokens starve."""
    if s["split"] > 1:
        return 1.4 if s["bm"] > 32 else 1.25 if p.k < 8 * s["bk"] else 1.0
    return 1.5 if s["bn"] < 64 and s["bm"] >= 64 else 1.0


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
    """The text of one program: bn weight rows of every part times bm tokens. `split` warps each take their own slice of
    the columns of a step, as a batch of products whose sums are added in the end."""

    u: Unit
    p: Product
    swap: bool
    bm: int
    bn: int
    bk: int
    stages: int
    split: int

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

    @property
    def depth(self) -> int:
        """Columns of both factors that one program multiplies."""
        return self.p.k

    def first(self, base: str) -> str:
        """Where a factor's first such column is."""
        return base

    def finish(self, accs: Sequence[str]) -> list[str]:
        """The results of the accumulators, stored."""
        return finish(self.p, accs, self.token, self.row, self.mmask, self.nmask)

    @property
    def joined(self) -> bool:
        return self.swap and joins(self.p, self.bn, self.split)

    @property
    def high(self) -> int:
        """Weight rows of a product."""
        return self.bn * (2 if self.joined else 1)

    def lines(self) -> list[str]:
        p, u = self.p, self.u
        weights = [self.first("x1"), *(f"(x1 + {j * p.n * p.k})" for j in range(1, 1 if self.joined else p.parts))]
        tiles = [f"w{j} = {self.tile(w, 'wr', left=self.swap)}" for j, w in enumerate(weights)]
        wait = [*self.prefetch(weights), u.hold]
        m, n = self.token, self.row
        extras = load_extras(u, p, m, n, self.mmask, self.nmask)
        early = self.swap and self.bm <= EARLY  # their latency is not paid at the end
        lines = [
            *(self.blocks() if self.swap else self.grouped()),
            f"n = pn * {self.bn} + tl.arange(0, {self.bn})",
            f"m = (pm * {self.bm} + tl.arange(0, {self.bm})).to(tl.int64)",
            f"c = tl.arange(0, {self.bk // self.split})",
            f"q = tl.arange(0, {self.split})[:, None, None] * {self.bk // self.split}" if self.split > 1 else "",
            *self.rows(),
            f"xr = {clamp('m', self.limit, self.bm, p.m.const)} * {p.k}",
            *tiles,
            f"t = {self.tile(self.first('x0'), 'xr', left=not self.swap)}",
            *wait,
            *(extras if early else []),
            *self.loop(),
            u.go,
            *([] if early else extras),
            *self.finish([f"a{j}" for j in range(p.parts)]),
        ]
        return [x for x in lines if x]

    def rows(self) -> list[str]:
        """wr: where the weight rows begin."""
        near = clamp("n", str(self.p.n), self.bn, self.p.n)
        if not self.joined:
            return [f"wr = {near}.to(tl.int64) * {self.p.k}"]
        return [
            f"j = tl.arange(0, {self.high})",
            f"near = {clamp(f'pn * {self.bn} + j % {self.bn}', str(self.p.n), self.bn, self.p.n)}",
            f"wr = (near + j // {self.bn} * {self.p.n}).to(tl.int64) * {self.p.k}",
        ]

    def blocks(self) -> list[str]:
        """The programs that share weights are neighbours."""
        return ["pm = tl.program_id(0)", "pn = tl.program_id(1)"]

    def grouped(self) -> list[str]:
        """Some rows of tiles at a time, column by column, so that both factors are found in the L2 cache."""
        columns, group = -(-self.p.n // self.bn), self.u.schedule.get("group", GROUP)
        return [
            "pid = tl.program_id(0)",
            f"first = pid // {group * columns} * {group}",
            f"high = tl.minimum({self.u.sizes(self.p.m.ceildiv(self.bm))} - first, {group})",
            f"pm = first + pid % {group * columns} % high",
            f"pn = pid % {group * columns} // high",
        ]

    def tile(self, base: str, rows: str, left: bool) -> str:
        """Pointers of a factor: [rows, bk] on the left, [bk, rows] on the right; slices of the columns in front."""
        lead = "None, " if self.split > 1 else ""
        return (
            f"{base} + {rows}[{lead}:, None] + {self.columns(left)}"
            if left
            else (f"{base} + {rows}[{lead}None, :] + {self.columns(left)}")
        )

    def columns(self, left: bool) -> str:
        """The columns of a step as a factor has them."""
        if self.split == 1:
            return "c[None, :]" if left else "c[:, None]"
        return "(q + c[None, None, :])" if left else "(q + c[None, :, None])"

    def prefetch(self, weights: list[str]) -> list[str]:
        """Ask for the weights of the first step while the launches in front are still running. More than that was
        measured to cost others what it gains here."""
        if not (self.swap and self.u.pdl and self.p.early):
            return []
        size = DTYPES[self.p.w.dtype].bits // 8
        lines = 1 << (-(-min(self.p.k, self.bk) * size // LINE)).bit_length() - 1
        at = f"wr[:, None] + tl.minimum(tl.arange(0, {lines}) * {LINE // size}, {self.p.k} - 1)[None, :]"
        ask = f"tl.inline_asm_elementwise({_PREFETCH}, [({{}} + at).to(tl.int64)], tl.int32, False, 1)"
        return [f"at = {at}", *(ask.format(w) for w in weights)]

    def loop(self) -> list[str]:
        p, u = self.p, self.u
        sides = (self.high, self.bm) if self.swap else (self.bm, self.bn)
        shape = list(sides) if self.split == 1 else [self.split, *sides]
        odd = self.depth % self.bk != 0
        left, right = (other(inside(f"{self.columns(x)} < {self.depth} - k" if odd else "")) for x in (True, False))
        wm, xm = (left, right) if self.swap else (right, left)
        hint = f", {EVICT}" if self.swap else ""
        body = [f"x = {dot_cast(u, p, f'tl.load(t + k{xm})')}"]
        products = range(1 if self.joined else p.parts)
        for j in products:
            body.append(f"w = {dot_cast(u, p, f'tl.load(w{j} + k{wm}{hint})')}")
            factors = "w, x" if self.swap else "x, w"
            body.append(f'a{j} = tl.dot({factors}, a{j}, input_precision="ieee")')
        return [
            *(f"a{j} = tl.zeros({shape}, tl.float32)" for j in products),
            f"for k in tl.range(0, {self.depth}, {self.bk}, num_stages={self.stages}):",
            *(f"    {x}" for x in body),
            *(f"a{j} = tl.sum(a{j}, axis=0)" for j in products if self.split > 1),
            *([f"a0, a1 = tl.split(tl.permute(tl.reshape(a0, (2, {self.bn}, {self.bm})), (1, 2, 0)))"] * self.joined),
        ]


TILE = Tiled("triton/tile", ("linear", "linear_map"), swap=True)
GEMM = Tiled("triton/gemm", ("linear", "linear_map"))
