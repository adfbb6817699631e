"""Products on tensor cores: weight tiles times a few tokens (GEMM_SMALL), and large square tiles for prompts (GEMM).

GEMM_SPLITK divides the depth, and SPLITK_COMBINE adds the partial products and computes the epilogue.

GEMM_SMALL uses weight rows as the rows of its tiles and tokens as their columns, because tensor-core instructions have
many rows but may have few columns. GEMM uses tokens as rows, and orders its tiles in groups that stay in the L2 cache.
The templates are `kernels/gemm_small.py`, `kernels/gemm.py` and `kernels/splitk_combine.py`.

- `reject`: what `reject_product` names; any number of tokens is supported.
- `schedules`: the tiles of NARROW or LARGE_TILES that fit shared memory and registers.
- `cost_us`: reading or arithmetic, whichever takes longer, in whole waves of tiles (`product_us`, `reading_us`).
- `code`: one program for each tile of the result; `common` has the arguments that all templates of tiles share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from llmc.codegen.backends.triton.linear_problem import Product, epilogue, output, peak, reject_product
from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.tiling import GemmTile, dot_order, next_power_of_2, previous_power_of_2
from llmc.codegen.backends.triton.triton_kernel import FLOAT8, Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import Schedule
from llmc.codegen.product import tiles_to_try
from llmc.ir.dim import D, Dim, product
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

LINE_BYTES = 128  # bytes of one prefetch into the L2 cache
GROUP = 8  # rows of tiles per group
MAX_EARLY_TOKENS = 32  # maximum tokens per tile for which the epilogue operands are loaded before the product
TOKENS = (8, 16, 32, 64, 128, 256)
# bn, bk, warps, stages, split of 16-bit tiles; tiles of 8 bits have twice the bk.
NARROW = (
    (64, 128, 4, 4, 1), (32, 256, 4, 4, 4), (16, 512, 4, 4, 4), (64, 128, 4, 6, 1), (32, 256, 4, 6, 4),
    (16, 256, 4, 6, 4), (8, 512, 4, 4, 4), (32, 128, 4, 5, 1), (64, 64, 4, 8, 1), (128, 64, 4, 4, 1),
    (128, 128, 8, 3, 1), (64, 256, 4, 3, 1), (64, 128, 4, 8, 1), (64, 64, 4, 12, 1), (128, 128, 8, 5, 1),
    (128, 64, 8, 6, 1), (64, 256, 4, 4, 1), (32, 128, 4, 4, 1), (32, 128, 4, 8, 1), (32, 64, 4, 8, 1),
    (32, 512, 4, 3, 4), (16, 512, 4, 6, 4), (16, 256, 4, 10, 4), (8, 512, 4, 6, 4), (8, 256, 4, 6, 4),
)  # fmt: skip
# float32 factors are multiplied without tensor cores: bm, bn, bk, warps, stages.
FLOAT_TILES = ((16, 32, 32, 4, 2), (16, 64, 16, 4, 2), (32, 32, 32, 4, 2), (32, 64, 16, 4, 2))
# bm, bn, bk, warps, stages of large products of 16 bits; bn counts the columns of all parts.
LARGE_TILES = (
    (128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 256, 64, 8, 4),
    (128, 256, 64, 8, 4), (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (64, 128, 128, 4, 4),
)  # fmt: skip
# The same for AMD GPUs, whose blocks prefetch one tile: published limits allow these, none has been measured.
LARGE_AMD_TILES = (
    (256, 256, 64, 8, 2), (256, 128, 64, 8, 2), (128, 256, 64, 8, 2), (128, 128, 64, 8, 2), (128, 128, 64, 4, 2),
    (128, 128, 32, 4, 2), (64, 128, 64, 4, 2), (64, 256, 64, 4, 2),
)  # fmt: skip
LARGE_FLOAT_TILES = ((64, 64, 16, 4, 2), (32, 64, 16, 4, 2))
SMALL = GemmTile(16, 16, 32, 4, 2)  # fits every target
_MAX_SUMS = 128  # maximum float32 sums per thread
COMBINED, COMBINE_WARPS = 1024, 4  # preferred columns of a program of linear_combine, and its warps
UNIT_BANDWIDTH = 1.6  # bandwidth that one multiprocessor can reach: times that of the GPU, divided by their number
REREAD = 0.1  # share of the weights' bytes that reading them again takes from memory; the rest is in the L2 cache
_READ = 0.86  # share of the bandwidth that these tiles reach
WARPGROUP = 64  # rows of a warpgroup's instruction
MATRIX = 16  # rows and columns of AMD's smallest instruction, and columns of NVIDIA's of 8-bit floats


@dataclass(frozen=True)
class Gemm(TritonKernel):
    """linear, linear_map and linear_split by tl.dot, for any number of tokens.

    swap: the weight is the left factor of tl.dot; not for linear_split.
    """

    swap: bool = False
    fills_multiprocessors: bool = True
    can_trigger_after_loads: bool = True

    def reject(self, node: Node, target: Target) -> str | None:
        return reject_product(node, target)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Product(node)
        # Instructions of 8-bit floats have at least 16 columns, and so have those of warpgroups, by which
        # deterministic kernels multiply any number of tokens.
        min_tokens = MATRIX if p.dot in FLOAT8 or target.deterministic else 0
        amd = target.family == "hip"
        if self.swap:
            tiles = self._narrow(p, min_tokens)
        else:
            tiles = self._large(p, LARGE_AMD_TILES if amd else LARGE_TILES)
        if amd:  # prefetches one tile in registers; the smallest instruction has 16 rows and columns
            tiles = (t._replace(bm=max(MATRIX, t.bm), bn=max(MATRIX, t.bn), stages=2, split=1) for t in tiles)
        fitting = [t for t in dict.fromkeys(tiles) if fits(p, t, target)]
        return [t._asdict() for t in fitting or [SMALL]]

    def _narrow(self, p: Product, min_tokens: int) -> Iterator[GemmTile]:
        if p.dot == "f32":
            yield from (GemmTile(*t) for t in FLOAT_TILES)
            return
        for bm in tiles_to_try([t for t in TOKENS if t >= min_tokens], p.m.const):
            yield from (GemmTile(bm, bn, bk * 2 // p.factor_bytes, *rest) for bn, bk, *rest in NARROW)

    def _large(self, p: Product, tiles: Sequence[Sequence[int]]) -> Iterator[GemmTile]:
        is_float = p.dot == "f32"
        if is_float:
            tiles = LARGE_FLOAT_TILES
        for bm, bn, bk, warps, stages in tiles:
            depth = bk if is_float else bk * 2 // p.factor_bytes
            yield GemmTile(bm, bn // next_power_of_2(p.parts), depth, warps, stages)

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        p, s = Product(node), schedule
        tokens, columns = s["bm"], s["bn"] * (2 if self.joined(p, s) else 1)
        if s["split"] > 1 or p.splits:  # each step adds columns of several slices; graphs may differ in `splits`
            return None
        rows, columns = (columns, tokens) if self.swap else (tokens, columns)
        return dot_order(target, p.dot, rows, columns, s["warps"])

    def joined(self, p: Product, s: Schedule) -> bool:
        """Whether the columns of both parts form one tile."""
        return self.swap and joins(p, s["bn"], s["split"])

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = Product(node), schedule
        measured = self.swap and target.family == "cuda"
        us = product_us(p.unsplit, s, target, env, self.swap)
        return us * (penalty(p, s, env) if measured else 1.0) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = Product(u.node), u.schedule
        rows = p.m.ceildiv(s["bm"])
        columns = -(-p.n // s["bn"])
        grid: tuple[Dim, ...] = (rows, D(columns)) if self.swap else (rows * columns,)
        if p.splits and not self.swap:
            grid = (*grid, D(p.splits))
        template, arguments = self.bind(u, p)
        return u.launch(template, grid, s["warps"], s["stages"], (epilogue(u, p),), **arguments)

    def bind(self, u: Unit, p: Product) -> tuple[Template, dict[str, Argument]]:
        """Return the template and its arguments."""
        if self.swap:
            return gemm_small_template(u, p)
        return Template("gemm", "gemm"), {**common(u, p), **large_arguments(u, p)}


def common(u: Unit, p: Product) -> dict[str, Argument]:
    """Return the arguments that the templates of tiled products share."""
    s = u.schedule
    converted = u.interpret or (p.dot == "f32" and p.x.dtype != p.w.dtype)
    return {
        "output": output(u, p, s["bm"]),
        "K": p.k,
        "PARTS": p.parts,
        "BLOCK_M": s["bm"],
        "BLOCK_N": s["bn"],
        "BLOCK_K": s["bk"],
        "STAGES": s["stages"],
        "FLOAT32_FACTORS": converted,
        "SUM": p.sums(converted),
        "LATE_LAUNCH": u.triggers_after_loads,
    }


def large_arguments(u: Unit, p: Product, x: str = "x_ptr", weight: str = "weight_ptr") -> dict[str, Argument]:
    """Return the other arguments of a template of large tiles; `x` and `weight` are the names of its operands."""
    tiles = u.sizes(p.m.ceildiv(u.schedule["bm"]))
    group = u.schedule.get("group", GROUP)
    return {x: "x0", weight: "x1", "ROW_TILES": tiles, "SPLITS": p.splits, "GROUP": group}


def gemm_small_template(u: Unit, p: Product) -> tuple[Template, dict[str, Argument]]:
    """Return the template for few tokens and its arguments.

    With dependent launches, the kernel prefetches the weights of its first step before the wait. Prefetching more
    slowed down the previous kernels by as much as this one gained.
    """
    s, line = u.schedule, LINE_BYTES * 8 // DTYPES[p.w.dtype].bits
    lines = previous_power_of_2(-(-min(p.k, s["bk"]) // line))  # prefetches per step
    return Template("gemm_small", "gemm_small"), {
        **common(u, p),
        "x_ptr": "x0",
        "weight_ptr": "x1",
        "JOINED": joins(p, s["bn"], s["split"]),
        "SLICES": s["split"],
        "PREFETCH_LINE": line,
        "PREFETCH_LINES": lines if u.pdl and p.weight_before_wait else 0,
        "EARLY_EXTRAS": s["bm"] <= MAX_EARLY_TOKENS,
    }


def fits(p: Product, t: GemmTile, target: Target, sums: int = _MAX_SUMS) -> bool:
    """Whether a block's tiles fit shared memory, and a thread has at most `sums` float32 sums."""
    if tiles_bytes(p, t._asdict(), target) > target.limits.shared:
        return False
    return t.bm * t.bn * p.parts * t.split <= sums * t.warps * target.limits.warp


def tiles_bytes(p: Product, s: Schedule, target: Target) -> int:
    """Return the bytes of shared memory. Instructions that read operands from shared memory need a stage more."""
    rows = s["bn"] * (2 if joins(p, s["bn"], s["split"]) else 1)
    direct = target.family == "cuda" and rows >= WARPGROUP and s["bm"] >= 16
    buffers = s["stages"] - (not direct)
    return int(buffers * (s["bn"] * p.parts + s["bm"]) * s["bk"] * DTYPES[p.dot].bits // 8)


def joins(p: Product, bn: int, split: int) -> bool:
    """Whether the rows of both parts form one tile, so that fewer rows of each part fill an instruction."""
    return split == 1 and p.parts == 2 and bn < WARPGROUP


def reading_us(p: Product, s: Schedule, target: Target, env: Mapping[str, int], swap: bool) -> float:
    """Predict the microseconds of reading the operands.

    The bytes in flight bound the rate: one multiprocessor reaches UNIT_BANDWIDTH, and the latency of memory is 1 us.
    Programs that share weights but are not grouped read them again (REREAD).
    """
    passes = -(-p.tokens(env) // s["bm"])
    columns = -(-p.n // s["bn"])
    units = target.limits.units
    row = s["bk"] * DTYPES[p.w.dtype].bits // 8
    ahead = (s["stages"] - 1) * s["bn"] * p.parts * row
    blocks = columns if swap else columns * passes
    per_unit = min(target.limits.shared // tiles_bytes(p, s, target), 32 // s["warps"])
    resident = min(blocks, units * max(1, per_unit))
    busy = min(1.0, UNIT_BANDWIDTH * min(blocks, units) / units, resident * ahead / (target.bandwidth * 1e-6))
    moved = p.bytes(env) + (REREAD * (passes - 1) * p.weight_bytes if swap else 0)
    cached = passes * columns * (s["bn"] * p.parts + s["bm"]) * p.k * DTYPES[p.w.dtype].bits // 8
    return max(moved / (_READ * busy), cached / target.limits.near) / target.bandwidth * 1e6


def penalty(p: Product, s: Schedule, env: Mapping[str, int]) -> float:
    """Return the measured factor (H200) by which some schedules are slower than `product_us` predicts.

    Warps that split the columns need many steps and few tiles of tokens; tiles of few weight rows and many tokens are
    slow.
    """
    if s["split"] == 1:
        return 1.5 if s["bn"] < 64 and s["bm"] >= 64 else 1.0
    passes = -(-p.tokens(env) // s["bm"])
    factor = 1.0
    if s["bm"] > 32:
        factor = 1.4
    elif p.k < 8 * s["bk"]:
        factor = 1.25
    return factor * (1 + 0.09 * (passes - 1))


def product_us(p: Product, s: Schedule, target: Target, env: Mapping[str, int], swap: bool) -> float:
    """Predict the microseconds of a product without launch overhead.

    The larger of two times: reading plus half of the arithmetic (as measured for tiles of few tokens), and the
    arithmetic in whole waves of blocks at the share of the peak that tiles of this size reach.
    """
    rows = -(-p.tokens(env) // s["bm"])
    columns = -(-p.n // s["bn"])
    blocks, units = rows * columns, target.limits.units
    flops = 2.0 * rows * s["bm"] * columns * s["bn"] * p.parts * p.k
    best = flops / peak(p, target) * 1e6
    computing = best * (-(-blocks // units) * units / blocks) / _peak_share(p, s, swap)
    return max(reading_us(p, s, target, env, swap) + 0.5 * best, computing)


def _peak_share(p: Product, s: Schedule, swap: bool) -> float:
    """Return the share of the peak that tiles of this size reach, if they fill the multiprocessors."""
    elements = s["bm"] * s["bn"] * p.parts
    if swap and s["bn"] < 64:
        return 0.35
    if elements < 16384:
        return 0.55 if swap else 0.5
    if swap:
        return 0.65
    return 0.72 if elements < 32768 else 0.77


class PartialSums(Product):
    """The epilogue of linear_combine, whose accumulator is the sum of the partial products."""

    @cached_property
    def n(self) -> int:
        """The number of columns."""
        return int(self.x.shape[-1])

    @property
    def m(self) -> Dim:
        """The number of tokens: the product of the leading axes of the result."""
        return product(self.out.shape[:-1])

    @property
    def first_extra(self) -> int:
        """The index of the first epilogue operand."""
        return 1

    @property
    def dot(self) -> str:
        """The dtype of the partial products."""
        return "f32"


class SplitKCombine(TritonKernel):
    """linear_combine: a program computes one block of columns of one token."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, FLOATS):
            return why
        splits, columns = (node.operands[0].type.shape[i].const for i in (0, -1))
        return "the number of parts or columns is not constant" if splits is None or columns is None else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        wide = next_power_of_2(PartialSums(node).n)
        blocks = (max(16, min(block, wide)) for block in (COMBINED, COMBINED // 2, 2 * COMBINED))
        return [{"block": block, "warps": COMBINE_WARPS} for block in blocks]

    def code(self, u: Unit) -> Code:
        p, block = PartialSums(u.node), u.schedule["block"]
        return u.launch(
            Template("splitk_combine", "splitk_combine"),
            (p.m, D(-(-p.n // block))),
            u.schedule["warps"],
            0,
            (epilogue(u, p),),
            **u.pointers("partial_ptr", ""),
            output=output(u, p, 1),
            SPLITS=int(u.node.operands[0].type.shape[0]),
            BLOCK=block,
        )


GEMM_SMALL = Gemm("triton/gemm_small", ("linear", "linear_map"), swap=True)
GEMM = Gemm("triton/gemm", ("linear", "linear_map"))
GEMM_SPLITK = Gemm("triton/gemm_splitk", ("linear_split",))
SPLITK_COMBINE = SplitKCombine("triton/splitk_combine", ("linear_combine",))
