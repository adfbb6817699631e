"""The binding of `kernels/skinny_gemm.cu`: few tokens times weights of 4 bits, which are read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, INT4_TO_BF16, SCALAR_MATH, STREAMING, Binding
from llmc.codegen.backends.cuda.fragment_product import PACKED, FragmentKernel, FragmentProduct
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.ir.ops.packed_fragments import BLOCK
from llmc.targets.target import Target

TOKENS = (8, 16)  # of a product
STRIP = 16  # rows of a product
WARPS = (16, 8, 14, 12, 10)  # of a block
CHUNKS = (2, 1, 4)  # blocks of columns of a warp
DEPTHS = (4, 2)  # strips that are loaded ahead
SPLITS = (1, 2, 4, 8)  # blocks of a cluster
CLUSTER_UNITS = 16  # the blocks of a cluster run on one group of so many multiprocessors, or a few more
AHEAD_BYTES = 16 << 20  # of weights, copied to the L2 cache before the previous kernel has completed
MOST_CODES = 16  # four registers each: codes on their way, and tokens
RESERVED = 1024  # bytes of shared memory that the system takes for each block
WASTE = 1.15  # at most this many times the columns that there are
_SHARE, _START, _STRIP, _CLUSTER = 0.8, 3.0, 0.12, 0.8  # of the bandwidth; microseconds


@dataclass(frozen=True)
class SkinnyGemm(FragmentKernel):
    """quantized_linear over codes of 4 bits for at most 16 tokens, on sm_90."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = FragmentProduct.of(node)
        if p.m.const is None or p.m.const > TOKENS[-1]:
            return f"{p.m} tokens; a constant number of at most {TOKENS[-1]} is supported"
        return None if list(_schedules(p, target)) else f"{p.k} columns with {p.group} for each scale"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(FragmentProduct.of(node), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the bytes of the weights, in whole strips of the clusters, and what surrounds them."""
        p, s = FragmentProduct.of(node), schedule
        strips, clusters = p.n // STRIP, _clusters(s, target)
        uneven = (
            -(-strips // clusters) * clusters / strips * target.limits.units * _resident(s) / (clusters * s["split"])
        )
        columns = s["warps"] * s["chunks"] * s["split"] * BLOCK / p.k
        us = p.weight_bytes / (target.bandwidth * _SHARE) * 1e6 * uneven * columns
        return us + _START + _STRIP * -(-strips // clusters) + (s["split"] > 1) * _CLUSTER

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = FragmentProduct.of(node), schedule
        clusters, tokens = _clusters(s, target), _tokens(p)
        ahead = AHEAD_BYTES // (clusters * s["split"] * s["warps"] * s["chunks"] * STRIP * BLOCK // 2)
        units = -(-p.n // STRIP // clusters) * p.parts
        return Binding(
            grid=(p.m.ceildiv(tokens) * (clusters * s["split"]),),
            threads=s["warps"] * 32,
            constants={
                "N": p.n, "PARTS": p.parts, "K": p.k, "GROUP": p.group, "ZERO_POINT": p.zero_point, "TOKENS": tokens,
                "WARPS": s["warps"], "CHUNKS": s["chunks"], "SPLIT": s["split"], "CLUSTERS": clusters,
                "DEPTH": s["depth"], "AHEAD": max(0, min(ahead, units - s["depth"])), "SCALE": p.scale,
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=_shared(p, s, target),
            sizes=(p.m,),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=p.epilogue(),
        )  # fmt: skip


def _tokens(p: FragmentProduct) -> int:
    return next((t for t in TOKENS if t >= (p.m.const or 0)), TOKENS[-1])


def _clusters(s: Schedule, target: Target) -> int:
    """Clusters that run at once."""
    units, split = target.limits.units, int(s["split"])
    return (units if split <= 2 else units // CLUSTER_UNITS * CLUSTER_UNITS) * _resident(s) // split


def _resident(s: Schedule) -> int:
    """Blocks of a multiprocessor."""
    return max(1, WARPS[0] // int(s["warps"]))


def _shared(p: FragmentProduct, s: Schedule, target: Target) -> int:
    """Bytes of shared memory: two rounds of every warp's sums, and the sums of all strips of the block."""
    sums, depth = STRIP * _tokens(p) * 4, int(s["depth"])
    units = -(-(p.n // STRIP) // _clusters(s, target)) * p.parts
    return (2 * depth * s["warps"] + -(-units // depth) * depth) * sums


def _schedules(p: FragmentProduct, target: Target) -> Iterator[Schedule]:
    """The ways to give all columns to warps and blocks, with few left over."""
    for chunks in CHUNKS:
        for split in SPLITS:
            for warps in WARPS:
                columns = chunks * BLOCK
                share = warps * columns * split / p.k
                fits = not (columns % p.group and p.group % columns) and 1 <= share <= WASTE
                if fits:
                    for depth in DEPTHS:
                        s = {"warps": warps, "chunks": chunks, "split": split, "depth": depth}
                        if (
                            chunks * (depth + _tokens(p) // 4) <= MOST_CODES
                            and (_shared(p, s, target) + RESERVED) * _resident(s) <= target.limits.shared
                        ):
                            yield s


SKINNY_GEMM = SkinnyGemm(
    "cuda/skinny_gemm",
    ("quantized_linear", PACKED),
    file="llmc.codegen.backends.cuda.kernels:skinny_gemm.cu",
    entry="llmc_skinny_gemm",
    headers=(SCALAR_MATH, INT4_TO_BF16, STREAMING),
)
