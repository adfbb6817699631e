"""The binding of `kernels/gemm_wgmma.cu`: bf16 products on Hopper by wgmma and tensor maps, split over clusters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_epilogue import pair_epilogue, reject_product
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding, OptionalCudaKernel
from llmc.codegen.backends.cuda.wgmma import ALIGN, RESERVED, SWIZZLE, WARPGROUP, lacks_wgmma, multiply
from llmc.codegen.kernel import Map, Schedule
from llmc.codegen.product import ConstantProduct, ProductNode
from llmc.ir.cost import node_cost
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

TILE_K = 64
HEIGHTS = (128, 64)  # tokens per tile
COLUMNS = (256, 224, 192, 160, 128, 96, 64)  # rows of w per tile, of all parts together
SPLITS, SPLIT_COLUMNS = (2, 4, 8), (256, 192, 128, 96, 64)  # blocks that share the depth of a tile; its COLUMNS
MIN_BLOCKS = 30  # minimum blocks of a split product of one tile of tokens
# Pairs of tiles in a cluster: (axis, HEIGHTS, COLUMNS, splits) for which they are offered. Two tiles along the tokens
# share w, two along the columns share x.
PAIRS_OF_TILES = (
    ("along_m", 128, (256, 224, 192, 160, 128, 96), (1, 2, 4)),
    ("along_n", 128, (128, 96, 64), (1, 2)),
)
GROUP_SIZE_M = 16  # tiles of tokens that are processed together, to share tiles of the weight in the L2 cache
MAX_STAGES, MAX_PARTS = 8, 2
PADDING = 8  # floats after a token's sums in shared memory
_SHARE, _READS = 0.86, 0.8  # shares of the peak and of the bandwidth that are reached
_TILE_US, _START_US, _CLUSTER_US = 1.6, 3.5, 1.5  # times of a tile's epilogue, a launch, and sums over a cluster


class WgmmaProduct(ConstantProduct):
    """y[m, n] = epilogue(x @ w_0.T, x @ w_1.T, others) of k columns."""

    def columns(self, bn: int) -> int:
        """Return the number of tiles along the columns, if a tile has `bn` rows of w."""
        return -(-self.n * self.parts // bn)

    @property
    def steps(self) -> int:
        """The number of steps per tile."""
        return -(-self.k // TILE_K)


def reject_bf16(node: Node, target: Target) -> str | None:
    """Return why a node is not a product of bf16 by wgmma on the target; None if it is one."""
    if why := lacks_wgmma(target):
        return why
    for v in node.operands[:2]:
        if v.type.format is not None or v.type.dtype != "bf16":
            return f"operand type {v.type} is not bf16"
    return reject_product(ProductNode(node), MAX_PARTS)


@dataclass(frozen=True)
class GemmWgmma(OptionalCudaKernel):
    """linear and linear_map of one or two parts in bf16, with a weight whose sizes are multiples of 8, on sm_90."""

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        return reject_bf16(node, target)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(WgmmaProduct(node), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: whole rounds of tiles on all multiprocessors, or the bytes of the operands."""
        p, s, units = WgmmaProduct(node), schedule, target.limits.units
        blocks = int(_tiles(p, s).subs(env)) * cluster(s)
        rounds = -(-blocks // units)
        flops = 2.0 * s["bm"] * max(128, s["bn"]) * p.k / s["split"]  # narrow tiles are bound by shared memory
        tile = flops * units / target.peaks["bf16"] / _SHARE * 1e6 + _TILE_US
        busy = min(1.0, blocks / (0.8 * units))  # fewer blocks do not reach the bandwidth
        moved = int(node_cost(node)[1].subs(env)) / target.bandwidth / _READS / busy * 1e6
        return max(rounds * tile, moved) + _START_US + (_CLUSTER_US if cluster(s) > 1 else 0.0) + target.launch_us

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, bm, bn, split = WgmmaProduct(node), schedule["bm"], schedule["bn"], schedule["split"]
        half = Map(1, (D(p.parts * p.n), D(p.k)), (bn // 2, TILE_K), SWIZZLE)
        along_m, along_n, blocks = schedule.get("along_m", 1), schedule.get("along_n", 1), cluster(schedule)
        return Binding(
            grid=(_tiles(p, schedule) * blocks if split > 1 else target.limits.units // blocks * blocks,),
            threads=bm // 64 * WARPGROUP + WARPGROUP,
            constants={
                "N": p.n, "K": p.k, "PARTS": p.parts, "TILE_M": bm, "TILE_N": bn, "STAGES": stages(schedule, target),
                "GROUP_SIZE_M": GROUP_SIZE_M * 128 // (bm * along_m), "SPLIT": split, "ALONG_M": along_m,
                "ALONG_N": along_n, "READ_BEFORE_WAIT": int(origin(node.operands[1]) is not Origin.INPUTS),
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=max(stages(schedule, target) * stage_bytes(schedule), sum_bytes(schedule)) + ALIGN,
            sizes=(p.m,),
            maps=(Map(0, (p.m, D(p.k)), (bm // along_n, TILE_K), SWIZZLE), half),
            cluster=(blocks, 1, 1) if blocks > 1 else (),
            text="\n\n".join(
                (multiply(bn), pair_epilogue(p))
            ),
        )  # fmt: skip


def cluster(s: Schedule) -> int:
    """Return the number of blocks per cluster."""
    return int(s["split"] * s.get("along_m", 1) * s.get("along_n", 1))


def _tiles(p: WgmmaProduct, s: Schedule) -> Dim:
    """Return the number of tiles, of all blocks of a cluster together."""
    return p.m.ceildiv(s["bm"] * s.get("along_m", 1)) * -(-p.columns(s["bn"]) // s.get("along_n", 1))


def stage_bytes(s: Schedule) -> int:
    """Return the bytes of a buffer of the ring."""
    return int(2 * TILE_K * (s["bm"] + s["bn"]))


def sum_bytes(s: Schedule) -> int:
    """Return the bytes of the sums in shared memory, which overwrite the buffers."""
    return int(s["bm"] * (s["bn"] + PADDING) * 4 if s["split"] > 1 else 0)


def stages(s: Schedule, target: Target) -> int:
    """Return the number of buffers that fit into shared memory."""
    return min(MAX_STAGES, (target.limits.shared - ALIGN - RESERVED) // stage_bytes(s))


def _schedules(p: WgmmaProduct, target: Target) -> Iterator[Schedule]:
    """Yield whole tiles, split ones that occupy the multiprocessors if there are few tiles of tokens, and both in pairs
    that share an operand."""

    def fits(bn: int, split: int) -> bool:
        few = MIN_BLOCKS <= p.columns(bn) * split <= target.limits.units
        return split == 1 or (p.steps % split == 0 and few)

    for bm in HEIGHTS:
        yield from ({"bm": bm, "bn": bn, "split": 1} for bn in COLUMNS)
        yield from ({"bm": bm, "bn": bn, "split": n} for n in SPLITS for bn in SPLIT_COLUMNS if fits(bn, n))
    for along, bm, columns, splits in PAIRS_OF_TILES:
        for split in splits:
            for bn in columns:
                if fits(bn, split) and (along == "along_m" or p.columns(bn) > 1):
                    yield {"bm": bm, "bn": bn, "split": split, along: 2}


GEMM_WGMMA = GemmWgmma(
    "cuda/gemm_wgmma",
    ("linear", "linear_map"),
    fills_multiprocessors=True,
    opt_in=True,
    file="gemm_wgmma.cu",
    entry="llmc_linear",
    headers=("hopper.cuh", "ring.cuh", "scalar_math.cuh", "pairs.cuh"),
    before=("wgmma_ring.cuh",),
)
