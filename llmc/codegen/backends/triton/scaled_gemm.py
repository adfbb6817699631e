"""Products of 8-bit floats with a scale for each group of activations and each tile of the weight.

One template serves all kernels: SCALED_GEMM_SMALL has weight rows as the rows of its tiles, for few tokens;
SCALED_GEMM has tokens there, for many, and SCALED_GEMM_TMA loads those tiles by TMA. Threads hold two accumulators: the
total, and that of the current group. The template is `kernels/scaled_gemm.py`.

- `reject`: dtypes other than 8-bit floats, and groups that are not whole instructions.
- `schedules`: FEW_TOKEN_TILES or MANY_TOKEN_TILES; a step multiplies the columns of one group, or a part of them.
- `cost_us`: that of GEMM_SMALL, GEMM or GEMM_TMA, and half of the arithmetic that scales the sums of each group.
- `code`: one program for each tile of the result, with tensor maps if it loads by TMA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from llmc.codegen.backends.triton.gemm_small import GROUP, LINE_BYTES, fits, joins, penalty, product_us
from llmc.codegen.backends.triton.gemm_tma import gain, has_maps
from llmc.codegen.backends.triton.linear_problem import Product, epilogue, output, reject_weight
from llmc.codegen.backends.triton.template import Argument, Template, record
from llmc.codegen.backends.triton.tiling import GemmTile, next_power_of_2, previous_power_of_2
from llmc.codegen.backends.triton.triton_kernel import CODES, FLOAT8, Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import BY_SCHEDULE, Map, Schedule
from llmc.codegen.product import tiles_to_try
from llmc.ir.dim import D
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

MAX_SLICE = 128  # maximum columns of a slice: the width of the largest swizzle in bytes
DEPTH = 32  # columns of an instruction; groups are multiples of it
GROUPS = (16, 32)  # larger groups of row tiles, tried with the first schedule
TOKENS = (16, 32, 64)
# bn of all parts, warps, stages, slices of a step.
FEW_TOKEN_TILES = (
    (64, 4, 6, 1), (32, 4, 4, 4), (16, 4, 4, 4), (64, 4, 4, 1), (64, 4, 10, 1), (128, 4, 4, 1), (128, 8, 4, 1),
    (32, 4, 6, 1), (32, 4, 6, 4), (16, 4, 6, 4), (128, 4, 6, 1),
)  # fmt: skip
# bm, bn of all parts, warps, stages.
MANY_TOKEN_TILES = (
    (128, 128, 8, 4), (64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 6), (64, 256, 8, 4), (128, 128, 8, 3),
    (64, 128, 4, 6), (64, 64, 4, 4), (128, 128, 8, 6),
)  # fmt: skip
_MAX_SUMS = 64  # maximum float32 sums per thread in each of the two accumulators
_RESCALE_OPERATIONS = 4  # operations per sum and group


class ScaledProduct(Product):
    """The computation of block_scaled_linear."""

    @property
    def group(self) -> int:
        """Columns of the weight that share a scale."""
        return int(self.node.attrs["block"][1])

    @property
    def rows(self) -> int:
        """Rows of the weight that share a scale."""
        return int(self.node.attrs["block"][0]) or self.parts * self.n

    @property
    def first_extra(self) -> int:
        """The index of the first operand of the epilogue."""
        return 4

    @property
    def step(self) -> int:
        """The columns that are multiplied into one accumulator."""
        return min(MAX_SLICE, self.group & -self.group)


@dataclass(frozen=True)
class ScaledGemm(TritonKernel):
    """block_scaled_linear by tl.dot. swap: the weight is the left factor. mapped: factors are loaded by TMA."""

    constant_reduction_order = BY_SCHEDULE
    swap: bool = False
    mapped: bool = False
    fills_multiprocessors: bool = True
    can_trigger_after_loads: bool = True

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, (*FLOATS, *CODES), target):
            return why
        if self.mapped and not has_maps(target):
            return f"{target.name} does not support TMA"
        x, code = node.operands[0].type, node.operands[1].type
        if why := reject_weight(node):
            return why
        if x.dtype != code.dtype or x.dtype not in FLOAT8:
            return f"codes of {x.dtype} and {code.dtype} in blocks; two of one dtype of 8-bit floats are supported"
        p = ScaledProduct(node)
        if any(t.dtype not in FLOATS for t in p.extras):
            return "an operand of the epilogue is not of a float dtype"
        return f"groups of {p.group} columns are not a multiple of {DEPTH}" if p.group % DEPTH else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = ScaledProduct(node)
        tiles = dict.fromkeys(_narrow(p) if self.swap else _large(p))
        fitting = [t for t in tiles if fits(p, t, target, _MAX_SUMS)] or [GemmTile(16, 16, p.step, 4, 2)]
        schedules: list[Schedule] = [t._asdict() for t in fitting]
        return schedules + [{**s, "group": g} for g in GROUPS for s in schedules[:1] if self.mapped]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = ScaledProduct(node), schedule
        sums = -(-p.tokens(env) // s["bm"]) * s["bm"] * p.parts * p.n
        scaling = sums * (p.k / p.step) * _RESCALE_OPERATIONS / target.peaks["f32"] * 1e6
        us = product_us(p, s, target, env, self.swap) * (penalty(p, s, env) if self.swap else 1.0)
        us /= gain(node, env) if self.mapped else 1.0
        return us + scaling / 2 + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = ScaledProduct(u.node), u.schedule
        template = Template("scaled_gemm", "scaled_gemm")
        grid = (p.m.ceildiv(s["bm"]) * -(-p.n // s["bn"]),)
        code = u.launch(template, grid, s["warps"], s["stages"], (epilogue(u, p),), **self.arguments(u, p))
        if not self.mapped:
            return code
        x = Map(0, (p.m, D(p.k)), (s["bm"], s["bk"]))
        return replace(code, maps=(x, Map(1, (D(p.parts * p.n), D(p.k)), (s["bn"], s["bk"]))))

    def arguments(self, u: Unit, p: ScaledProduct) -> dict[str, Argument]:
        """Return the arguments of the template."""
        s = u.schedule
        joined = self.swap and joins(p, u.schedule["bn"], u.schedule["split"])
        lines = previous_power_of_2(max(1, min(p.k, s["bk"]) // LINE_BYTES))
        tile = record(
            "ScaledTile", K=p.k, PARTS=p.parts, GROUP=p.group, SCALE_ROWS=p.rows, JOINED=joined, BLOCK_M=s["bm"],
            BLOCK_N=s["bn"], BLOCK_K=s["bk"], SLICES=s["split"], WEIGHT_LEFT=self.swap, MAPPED=self.mapped,
            ONE_SCALE=not joined and p.rows % s["bn"] == 0 and (p.parts == 1 or p.n % s["bn"] == 0),
            PREFETCH_LINES=lines if self.swap and u.pdl and p.weight_before_wait else 0,
            FLOAT32_FACTORS=u.interpret,
        )  # fmt: skip
        return {
            "x_ptr": "x0",
            "code_ptr": "x1",
            "x_scale_ptr": "x2",
            "scale_ptr": "x3",
            "output": output(u, p, s["bm"]),
            "tile": tile,
            "ROW_TILES": u.sizes(p.m.ceildiv(s["bm"])),
            "STAGES": s["stages"],
            "TILE_GROUP": s.get("group", GROUP),
            "LATE_LAUNCH": u.triggers_after_loads,
        }


def _narrow(p: ScaledProduct) -> Iterator[GemmTile]:
    """Yield the tiles for few tokens."""
    steps = p.k // p.step
    for bm in tiles_to_try(TOKENS, p.m.const):
        for bn, warps, stages, slices in FEW_TOKEN_TILES:
            if steps % slices == 0:
                columns = max(16, bn // next_power_of_2(p.parts))
                yield GemmTile(bm, columns, p.step * slices, warps, stages, slices)


def _large(p: ScaledProduct) -> Iterator[GemmTile]:
    """Yield the tiles for many tokens."""
    for bm, bn, warps, stages in MANY_TOKEN_TILES:
        yield GemmTile(bm, max(16, bn // next_power_of_2(p.parts)), p.step, warps, stages)


SCALED_GEMM_SMALL = ScaledGemm("triton/scaled_gemm_small", ("block_scaled_linear",), swap=True)
SCALED_GEMM = ScaledGemm("triton/scaled_gemm", ("block_scaled_linear",))
SCALED_GEMM_TMA = ScaledGemm("triton/scaled_gemm_tma", ("block_scaled_linear",), mapped=True)
