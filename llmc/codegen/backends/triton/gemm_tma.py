"""Large products that load tiles by TMA (tensor maps in place of pointers), on Hopper and later.

Threads compute no addresses and no masks, because TMA fills elements outside of a matrix with zeros. The two parts of a
gated product form one tile of twice the rows, so that one instruction multiplies both. The template is
`kernels/gemm_tma.py`.

- `reject`: targets without TMA, factors of two dtypes or of float32, and sizes that TMA cannot load.
- `schedules`: TILES that fit, and the first of them with larger groups of row tiles.
- `cost_us`: that of GEMM, divided by a measured speed-up, and slower with few stages (`slowdown`).
- `code`: that of GEMM, with tensor maps for both factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmc.codegen.backends.triton.gemm_small import WARPGROUP, Gemm, common, large_arguments, product_us
from llmc.codegen.backends.triton.linear_problem import Product
from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.tiling import GemmTile
from llmc.codegen.backends.triton.triton_kernel import Code, Unit, capability
from llmc.codegen.kernel import Map, Schedule
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.targets.target import Target

MIN_CAPABILITY = 90  # compute capability x 10
ROW_BYTES = 16  # the size of a row of a matrix must be a multiple
STEP_BYTES = 128  # bytes per tile row: the width of the largest swizzle
# bm, bn, warps, stages; bn counts the columns of all parts.
TILES = (
    (128, 256, 8, 4), (128, 128, 8, 4), (128, 256, 8, 3), (128, 128, 4, 3), (64, 128, 4, 4), (256, 128, 8, 4),
    (64, 256, 4, 4), (128, 128, 8, 6), (64, 128, 4, 6), (256, 128, 8, 3),
)  # fmt: skip
GROUPS, GROUPED = (16, 32), 3  # larger groups of row tiles, tried with the first GROUPED schedules
_GAIN = 1.1  # speed-up over pointers, measured on an H200
ENOUGH_STAGES = 6  # stages from which tiles of at most LARGE_TILE elements reach their full speed
STAGE_SLOWDOWN = 0.12  # slowdown per missing stage
LARGE_TILE = 128 * 128


def has_maps(target: Target) -> bool:
    """Whether the target's GPUs have TMA."""
    return target.family == "cuda" and capability(target) >= MIN_CAPABILITY


def gain(node: Node, env: Mapping[str, int]) -> float:
    """Return the speed-up over the same tiles with pointers; 1 for few tokens, for which it was not measured."""
    return _GAIN if Product(node).tokens(env) > WARPGROUP else 1.0


@dataclass(frozen=True)
class GemmTma(Gemm):
    """linear, linear_map and linear_split of factors of 8 or 16 bits, one part or two.

    Parts of the depth must be whole steps, because the elements after a part are those of the next, not zeros.
    """

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = Product(node)
        if not has_maps(target):
            return f"{target.name} does not support TMA"
        if p.x.dtype != p.w.dtype or p.dot == "f32":
            return f"factors of {p.x.dtype} and {p.w.dtype}; both must have the same dtype of 8 or 16 bits"
        if p.parts > 2:
            return f"{p.parts} parts; the maximum is 2"
        row, step = p.k * p.factor_bytes, STEP_BYTES // p.factor_bytes
        if row % ROW_BYTES:
            return f"rows of {row} bytes are not a multiple of {ROW_BYTES}"
        depth = p.unsplit.k
        return f"parts of {depth} columns are not a multiple of {step}" if p.splits and depth % step else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """Return all tiles, and the best ones with larger groups: in a single group, weights are read only once."""
        schedules = super().schedules(node, target)
        return schedules + [{**s, "group": g} for g in GROUPS for s in schedules[:GROUPED]]

    def _large(self, p: Product, tiles: Sequence[Sequence[int]]) -> Iterator[GemmTile]:
        for bm, bn, warps, stages in TILES:
            yield GemmTile(bm, bn // p.parts, STEP_BYTES // p.factor_bytes, warps, stages)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p = Product(node)
        us = product_us(p.unsplit, schedule, target, env, False) * (1.0 if p.splits else slowdown(p, schedule))
        return us / gain(node, env) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = Product(u.node), u.schedule
        weight = (s["bn"], s["bk"]) if p.parts == 1 else (p.parts, s["bn"], s["bk"])
        sizes = (D(p.n), D(p.k)) if p.parts == 1 else (D(p.parts), D(p.n), D(p.k))
        return replace(super().code(u), maps=(Map(0, (p.m, D(p.k)), (s["bm"], s["bk"])), Map(1, sizes, weight)))

    def bind(self, u: Unit, p: Product) -> tuple[Template, dict[str, Argument]]:
        return Template("gemm_tma", "gemm_tma"), {**large_arguments(u, p, "x_map", "weight_map"), **common(u, p)}

    def joined(self, p: Product, s: Schedule) -> bool:
        return p.parts == 2


def slowdown(p: Product, s: Schedule) -> float:
    """Return the measured factor by which small tiles are slower with fewer steps in flight than ENOUGH_STAGES."""
    missing = ENOUGH_STAGES - s["stages"] if s["bm"] * s["bn"] * p.parts <= LARGE_TILE else 0
    return 1.0 + STAGE_SLOWDOWN * max(0, missing)


GEMM_TMA = GemmTma("triton/gemm_tma", ("linear", "linear_map"))
GEMM_TMA_SPLITK = GemmTma("triton/gemm_tma_splitk", ("linear_split",))
