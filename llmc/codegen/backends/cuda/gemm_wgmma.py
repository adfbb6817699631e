"""The binding of `kernels/gemm_wgmma.cu`: large bf16 products on Hopper by wgmma and tensor maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_kernel import HOPPER, Binding, CudaKernel
from llmc.codegen.kernel import Map, Schedule
from llmc.ir.cost import node_cost
from llmc.ir.dim import D, product
from llmc.ir.graph import Node
from llmc.targets.target import Target

TILE_M, TILE_K = 128, 64
TILES = ((256, 4), (128, 6), (128, 4))  # columns of a tile, stages
GROUPS = (16, 8)  # row tiles that are processed together, to share tiles of the weight in the L2 cache
THREADS = 384  # one producer warpgroup and two consumer warpgroups
SWIZZLE = 3  # 128 bytes
ALIGN = 1024  # alignment of the buffers in shared memory, in bytes
_SHARE = 0.75  # share of peak arithmetic that the kernel reaches; an estimate, not measured


@dataclass(frozen=True)
class GemmWgmma(CudaKernel):
    """linear in bf16 with a weight whose sizes are constant multiples of 8, on sm_90."""

    def reject(self, node: Node, target: Target) -> str | None:
        if target.family != "cuda" or target.arch != "sm_90" or target.has("interpret"):
            return f"{target.name} does not have wgmma, the matrix instructions of sm_90"
        for v in [*node.operands, *node.results]:
            if v.type.format is not None or v.type.dtype != "bf16":
                return f"operand type {v.type} is not bf16"
        n, k = (d.const for d in node.operands[1].type.shape)
        if not n or not k or n % 8 or k % 8:
            return f"the weight's sizes {n} x {k} are not constant multiples of 8"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return self.all_schedules()

    def all_schedules(self) -> list[Schedule]:
        """Return all schedules; each is valid for every node."""
        return [{"bn": bn, "stages": stages, "group": g} for g in GROUPS for bn, stages in TILES]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the larger of arithmetic time, in whole waves of tiles, and memory time, in microseconds."""
        x, w = (v.type for v in node.operands)
        m, n, k = int(product(x.shape[:-1]).subs(env)), int(w.shape[0]), int(w.shape[1])
        tiles = -(-m // TILE_M) * -(-n // schedule["bn"])
        rounds = -(-tiles // target.limits.units)
        flops = 2.0 * TILE_M * schedule["bn"] * k * rounds * target.limits.units
        moved = int(node_cost(node)[1].subs(env)) / target.bandwidth
        return max(flops / target.peaks["bf16"] / _SHARE, moved) * 1e6 + target.launch_us

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        x, w = (v.type for v in node.operands)
        m, n, k = product(x.shape[:-1]), int(w.shape[0]), int(w.shape[1])
        bn, stages = schedule["bn"], schedule["stages"]
        stage = 2 * TILE_K * (TILE_M + bn)  # bytes
        return Binding(
            grid=(m.ceildiv(TILE_M) * -(-n // bn),),
            threads=THREADS,
            constants={"N": n, "K": k, "TILE_N": bn, "STAGES": stages, "GROUP": schedule["group"]},
            shared=stages * stage + ALIGN,
            sizes=(m,),
            maps=(Map(0, (m, D(k)), (TILE_M, TILE_K), SWIZZLE), Map(1, (D(n), D(k)), (bn, TILE_K), SWIZZLE)),
        )


GEMM_WGMMA = GemmWgmma(
    "cuda/gemm_wgmma",
    ("linear",),
    crowds=True,
    opt_in=True,
    file="llmc.codegen.backends.cuda.kernels:gemm_wgmma.cu",
    entry="llmc_linear",
    headers=(HOPPER,),
)
