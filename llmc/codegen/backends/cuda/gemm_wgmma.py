"""The binding of `kernels/gemm_wgmma.cu`: bf16 products of many tokens on Hopper by wgmma, tensor maps and clusters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc_runtime.format.install_command import install_command

from llmc.codegen.backends.cuda.cuda_epilogue import pair_epilogue, reject_operands
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, FLOATS, HOPPER, PAIRS, SCALAR_MATH, Binding, CudaKernel
from llmc.codegen.backends.cuda.nvrtc_toolchain import nvrtc_version
from llmc.codegen.backends.cuda.wgmma_text import multiply
from llmc.codegen.kernel import Map, Schedule
from llmc.codegen.product import ProductNode
from llmc.ir.cost import node_cost
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

TILE_M, TILE_K = 128, 64
COLUMNS = (256, 224, 192, 160, 128, 96, 64)  # of a tile, in all parts
CLUSTERS = (2, 1)  # blocks that share tiles of the weight
GROUP = 16  # tiles of tokens that are processed together, to share tiles of the weight in the L2 cache
MOST_STAGES, MAX_PARTS = 8, 2
THREADS = 384  # one producer warpgroup and two consumer warpgroups
SWIZZLE = 3  # 128 bytes
ALIGN = 1024  # alignment of the buffers in shared memory, in bytes
RESERVED = 1024  # bytes of shared memory for barriers
_SHARE = 0.86  # share of the peak that the instructions of a tile reach
_TILE_US, _START_US = 1.6, 3.5  # of a tile: its epilogue; of a launch


@dataclass(frozen=True)
class WgmmaProduct(ProductNode):
    """y[m, n] = epilogue(x @ w_0.T, x @ w_1.T, others) of k columns."""

    n: int
    k: int

    @staticmethod
    def of(node: Node) -> WgmmaProduct:
        """Read the problem from a node whose weight has constant sizes."""
        parts, w = node.attrs.get("parts", 1), node.operands[1].type
        return WgmmaProduct(node, parts, int(w.shape[0]) // parts, int(w.shape[1]))

    def tiles(self, schedule: Schedule, tokens: int) -> int:
        """Tiles of all blocks of a launch, in whole clusters."""
        cluster = schedule["cluster"]
        return -(-tokens // (TILE_M * cluster)) * cluster * -(-self.n * self.parts // schedule["bn"])


@dataclass(frozen=True)
class GemmWgmma(CudaKernel):
    """linear and linear_map of one or two parts in bf16, with a weight whose sizes are multiples of 8, on sm_90."""

    def reject(self, node: Node, target: Target) -> str | None:
        if target.family != "cuda" or target.arch != "sm_90" or target.has("interpret"):
            return f"{target.name} does not have wgmma, the matrix instructions of sm_90"
        for v in node.operands[:2]:
            if v.type.format is not None or v.type.dtype != "bf16":
                return f"operand type {v.type} is not bf16"
        parts, (rows, k) = node.attrs.get("parts", 1), (d.const for d in node.operands[1].type.shape)
        if not 1 <= parts <= MAX_PARTS:
            return f"{parts} parts; the maximum is {MAX_PARTS}"
        if not rows or not k or rows % (8 * parts) or k % 8:
            return f"the weight's sizes {rows} x {k} are not constant multiples of {8 * parts} and 8"
        if node.result.type.dtype not in FLOATS:
            return f"a result of {node.result.type.dtype}"
        return reject_operands(WgmmaProduct.of(node).extras, node.result.type)

    def missing(self) -> str:
        try:
            nvrtc_version()
        except ModuleNotFoundError as e:
            return f"{e}; {install_command('nvrtc')} (no GPU is needed to compile)"
        return ""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: whole rounds of tiles on all multiprocessors, or the bytes of the operands."""
        p, units = WgmmaProduct.of(node), target.limits.units
        rounds = -(-p.tiles(schedule, int(p.m.subs(env))) // units)
        flops = 2.0 * TILE_M * max(128, schedule["bn"]) * p.k  # narrow tiles are bound by reads of shared memory
        tile = flops * units / target.peaks["bf16"] / _SHARE * 1e6 + _TILE_US
        moved = int(node_cost(node)[1].subs(env)) / target.bandwidth * 1e6
        return max(rounds * tile, moved) + _START_US + target.launch_us

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, bn, cluster = WgmmaProduct.of(node), schedule["bn"], schedule["cluster"]
        half = Map(1, (D(p.parts * p.n), D(p.k)), (bn // 2, TILE_K), SWIZZLE)
        return Binding(
            grid=(target.limits.units // cluster * cluster,),
            threads=THREADS,
            constants={
                "N": p.n, "K": p.k, "PARTS": p.parts, "TILE_N": bn, "STAGES": stages(bn, target),
                "GROUP": GROUP // cluster, "CLUSTER": cluster,
                "EARLY": int(origin(node.operands[1]) is not Origin.INPUTS), "OUT": CTYPES[node.result.type.dtype],
            },
            shared=stages(bn, target) * stage_bytes(bn) + ALIGN,
            sizes=(p.m,),
            maps=(Map(0, (p.m, D(p.k)), (TILE_M, TILE_K), SWIZZLE), half),
            cluster=(cluster, 1, 1) if cluster > 1 else (),
            text="\n\n".join(
                (multiply(bn), pair_epilogue(node.attrs.get("body", "a0"), p.parts, p.extras, node.result.type))
            ),
        )  # fmt: skip


def stage_bytes(columns: int) -> int:
    """Bytes of a buffer of the ring."""
    return 2 * TILE_K * (TILE_M + columns)


def stages(columns: int, target: Target) -> int:
    """Buffers that fit into shared memory."""
    return min(MOST_STAGES, (target.limits.shared - ALIGN - RESERVED) // stage_bytes(columns))


def _schedules(target: Target) -> Iterator[Schedule]:
    for cluster in CLUSTERS:
        yield from ({"bn": bn, "cluster": cluster} for bn in COLUMNS)


GEMM_WGMMA = GemmWgmma(
    "cuda/gemm_wgmma",
    ("linear", "linear_map"),
    crowds=True,
    opt_in=True,
    file="llmc.codegen.backends.cuda.kernels:gemm_wgmma.cu",
    entry="llmc_linear",
    headers=(HOPPER, SCALAR_MATH, PAIRS),
)
