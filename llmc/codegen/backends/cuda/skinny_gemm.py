"""The binding of `kernels/skinny_gemm.cu`: few tokens times weights of 4 bits, which are read once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.codegen.backends.cuda.cuda_kernel import (
    CTYPES,
    HOPPER,
    INT4_TO_BF16,
    SCALAR_MATH,
    STREAMING,
    STRIP_SUMS,
    Binding,
)
from llmc.codegen.backends.cuda.fragment_product import (
    NORMED,
    NORMED_PACKED,
    PACKED,
    PLAIN,
    FragmentKernel,
    FragmentProduct,
)
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.ir.ops.packed_fragments import BLOCK
from llmc.targets.target import Target

TOKENS = (8, 16)  # of a tile
STRIP = 16  # rows of a product
WARPS = (16, 8, 14, 12, 10)  # of a block
CHUNKS = MappingProxyType({8: (4, 2, 1, 8), 16: (4, 2, 1)})  # blocks of columns of a warp, by tokens
DEPTHS = (2, 3, 1, 4)  # strips that are copied ahead
# Blocks of a cluster. With clusters of four, an H200 took more than twice as long.
SPLITS = (1, 2)
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block
BARRIERS = 16  # bytes of shared memory
WASTE = 1.15  # maximum columns of all warps, relative to those of the weight
# Fitted to measurements on an H200 (bench.gpu.quantized_products): microseconds that do not depend on the weights, and
# the share of the bandwidth that is reached, by tokens; what a second block on a multiprocessor adds.
_START, _SHARE = MappingProxyType({8: 2.6, 16: 3.9}), MappingProxyType({8: 0.76, 16: 0.58})
_SECOND = 0.7


@dataclass(frozen=True)
class SkinnyGemm(FragmentKernel):
    """Few tokens: quantized_linear over codes of 4 bits, on sm_90, also of normed tokens.

    More tokens than a tile read the weights again.
    """

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = FragmentProduct.of(node)
        if p.m.const is not None and p.m.const > TOKENS[-1]:
            return f"{p.m} tokens; at most {TOKENS[-1]} are supported"
        return None if list(_schedules(p, target)) else f"{p.k} columns with {p.group} for each scale"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(FragmentProduct.of(node), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the copies of all blocks in whole rounds, plus a constant per number of tokens."""
        p, s = FragmentProduct.of(node), schedule
        tokens, columns = s["tokens"], s["warps"] * s["chunks"] * s["split"] * BLOCK
        copied = _units(p, s, target) * _clusters(s, target) * STRIP * columns
        nbytes = p.weight_bytes / (p.parts * p.n * p.k) * copied
        tiles = -(-int(p.m.subs(env)) // tokens)
        us = tiles * nbytes / (target.bandwidth * _SHARE[tokens]) * 1e6 + _START[tokens]
        return us + _SECOND * (_resident(s) - 1)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = FragmentProduct.of(node), schedule
        clusters, tokens = _clusters(s, target), s["tokens"]
        return Binding(
            grid=(p.m.ceildiv(tokens) * (clusters * s["split"]),),
            threads=s["warps"] * 32,
            constants={
                "N": p.n, "PARTS": p.parts, "K": p.k, "GROUP": p.group, "ZERO_POINT": p.zero_point, "TOKENS": tokens,
                "WARPS": s["warps"], "CHUNKS": s["chunks"], "SPLIT": s["split"], "CLUSTERS": clusters,
                "DEPTH": s["depth"], "RESIDENT": _registers(s), "NORMED": int(p.normed),
                "EPS": float(node.attrs.get("eps", 0.0)), "SCALE": p.scale,
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=_shared(p, s, target),
            sizes=(p.m,),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=p.epilogue(),
        )  # fmt: skip


def _clusters(s: Schedule, target: Target) -> int:
    """Clusters that run at once."""
    return target.limits.units * _resident(s) // int(s["split"])


def _units(p: FragmentProduct, s: Schedule, target: Target) -> int:
    """Strips of a block, in all parts."""
    return -(-(p.n // STRIP) // _clusters(s, target)) * p.parts


def _resident(s: Schedule) -> int:
    """Resident blocks of a multiprocessor."""
    return max(1, WARPS[0] // int(s["warps"]))


def _registers(s: Schedule) -> int:
    """Blocks of a multiprocessor for which registers suffice; spare ones let the next kernel begin early."""
    return _resident(s) * (2 if s["chunks"] * s["tokens"] <= 16 else 1)


def _shared(p: FragmentProduct, s: Schedule, target: Target) -> int:
    """Bytes of shared memory: sums of two strips of all warps, of all strips, of squares and of x, slots, barriers."""
    sums, columns = STRIP * s["tokens"] * 4, s["chunks"] * BLOCK
    entries = max(1, columns // p.group)
    slot = STRIP * (columns // 2 + entries * (3 if p.node.attrs["zeros"] else 2))
    squares = (s["warps"] + 1) * s["tokens"] * 4 if p.normed else 0
    of_x = s["warps"] * entries * s["tokens"] * 4
    totals = (2 * s["warps"] + _units(p, s, target)) * sums
    return int(totals + squares + of_x + s["warps"] * s["depth"] * slot + BARRIERS)


def _schedules(p: FragmentProduct, target: Target) -> Iterator[Schedule]:
    """Yield the divisions of all columns among warps and blocks with little waste, with the depths that fit."""
    fitting = [t for t in TOKENS if p.m.const is None or t >= p.m.const]
    for tokens in fitting if p.m.const is None else fitting[:1]:
        for chunks, split, warps in itertools.product(CHUNKS[tokens], SPLITS, WARPS):
            columns = chunks * BLOCK
            even = columns % p.group == 0 or p.group % columns == 0
            if even and 1 <= warps * columns * split / p.k <= WASTE:
                for depth in DEPTHS:
                    s = {"tokens": tokens, "warps": warps, "chunks": chunks, "split": split, "depth": depth}
                    if (_shared(p, s, target) + RESERVED) * _resident(s) <= target.limits.shared:
                        yield s


SKINNY_GEMM = SkinnyGemm(
    "cuda/skinny_gemm",
    (PLAIN, PACKED, NORMED, NORMED_PACKED),
    file="llmc.codegen.backends.cuda.kernels:skinny_gemm.cu",
    entry="llmc_skinny_gemm",
    headers=(HOPPER, SCALAR_MATH, INT4_TO_BF16, STREAMING, STRIP_SUMS),
)
