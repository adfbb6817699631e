"""The bindings of `kernels/skinny_gemm.cu` and `skinny_fixed.cu`: few tokens times weights of 4 bits, read once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding
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
from llmc.ir.ops.packed_codes import BLOCK
from llmc.targets.target import Target

Tiles = Mapping[int, tuple[int, ...]]
# Tokens per tile -> numbers of blocks of columns per warp to try, for tokens in bf16 and in fixed point.
BF16: Tiles = MappingProxyType({8: (4, 2, 1, 8), 16: (4, 2, 1)})
FIXED: Tiles = MappingProxyType({4: (4, 8, 2, 1)})  # for more tokens, an H200 is faster in bf16
STRIP = 16  # rows of the weight per instruction
ENTRY = 256  # maximum columns that share a scale of tokens in fixed point
WARPS = (16, 8, 14, 12, 10)  # warps per block
DEPTHS = (2, 3, 1, 4)  # strips that are copied ahead
# Blocks per cluster. With clusters of four, an H200 took more than twice as long.
SPLITS = (1, 2)
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block
BARRIERS = 16  # bytes of two barriers
WASTE = 1.15  # maximum columns of all warps, relative to those of the weight
# Fitted to measurements on an H200 (bench.gpu.quantized_products):
_START_US = MappingProxyType({4: 2.4, 8: 2.6, 16: 3.9})  # tokens per tile -> time that does not depend on the weights
_BANDWIDTH_SHARE = MappingProxyType({4: 0.76, 8: 0.76, 16: 0.58})  # tokens per tile -> share that is reached
_FURTHER_BLOCK_US = 0.7  # each further resident block of a multiprocessor


@dataclass(frozen=True)
class SkinnyGemm(FragmentKernel):
    """Few tokens: quantized_linear over codes of 4 bits, on sm_90, also of normed tokens.

    More tokens than a tile read the weights again. fixed: tokens become codes of 16 bits, and sums are integers.
    """

    fixed: bool = False

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = FragmentProduct(node)
        max_tokens = max(self.tiles)
        if p.m.const is not None and p.m.const > max_tokens:
            return f"{p.m} tokens; at most {max_tokens} are supported"
        if self.fixed and p.group % 32:
            return f"groups of {p.group} columns are not a multiple of 32"
        return None if self.schedules(node, target) else f"{p.k} columns with {p.group} for each scale"

    @property
    def tiles(self) -> Tiles:
        """The numbers of blocks of columns per warp, by tokens per tile."""
        return FIXED if self.fixed else BF16

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = FragmentProduct(node)
        schedules = _schedules(p, self.tiles)
        return [s for s in schedules if (self._shared(p, s, target) + RESERVED) * _resident(s) <= target.limits.shared]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the copies of all blocks in whole rounds, plus a constant per number of tokens."""
        p, s = FragmentProduct(node), schedule
        tokens = s["tokens"]
        columns = s["warps"] * s["chunks"] * s["split"] * BLOCK
        copied = _units(p, s, target) * _clusters(s, target) * STRIP * columns
        nbytes = p.weight_bytes / (p.parts * p.n * p.k) * copied
        tiles = -(-int(p.m.subs(env)) // tokens)
        us = tiles * nbytes / (target.bandwidth * _BANDWIDTH_SHARE[tokens]) * 1e6 + _START_US[tokens]
        return us + _FURTHER_BLOCK_US * (_resident(s) - 1)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = FragmentProduct(node), schedule
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
            shared=self._shared(p, s, target),
            sizes=(p.m,),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=p.epilogue(),
        )  # fmt: skip

    def _shared(self, p: FragmentProduct, s: Schedule, target: Target) -> int:
        """Return the bytes of shared memory.

        It holds the sums of two strips of all warps, of all strips, of squares and of x; slots for strips; barriers.
        """
        sums, columns = STRIP * s["tokens"] * 4, s["chunks"] * BLOCK
        entries = max(1, columns // p.group)
        slot = STRIP * (columns // 2 + entries * (3 if p.node.attrs["zeros"] else 2))
        squares = (s["warps"] + 1) * s["tokens"] * 4 if p.normed else 0
        of_x = s["warps"] * s["tokens"] * (8 * columns // min(p.group, columns, ENTRY) if self.fixed else 4 * entries)
        totals = (2 * s["warps"] + _units(p, s, target)) * sums
        return int(totals + squares + of_x + s["warps"] * s["depth"] * slot + BARRIERS)


def _clusters(s: Schedule, target: Target) -> int:
    """Return the number of clusters that run at once."""
    return target.limits.units * _resident(s) // int(s["split"])


def _units(p: FragmentProduct, s: Schedule, target: Target) -> int:
    """Return the maximum number of strips per block, of all parts together."""
    return -(-(p.n // STRIP) // _clusters(s, target)) * p.parts


def _resident(s: Schedule) -> int:
    """Return the number of resident blocks per multiprocessor."""
    return max(1, WARPS[0] // int(s["warps"]))


def _registers(s: Schedule) -> int:
    """Return the blocks per multiprocessor for which registers suffice; spare ones let the next kernel begin early."""
    return _resident(s) * (2 if s["chunks"] * s["tokens"] <= 16 else 1)


def _schedules(p: FragmentProduct, tiles: Tiles) -> Iterator[Schedule]:
    """Yield the divisions of all columns among warps and blocks with little waste."""
    fitting = [t for t in tiles if p.m.const is None or t >= p.m.const]
    for tokens in fitting if p.m.const is None else fitting[:1]:
        for chunks, split, warps in itertools.product(tiles[tokens], SPLITS, WARPS):
            columns = chunks * BLOCK
            even = columns % p.group == 0 or p.group % columns == 0
            if even and 1 <= warps * columns * split / p.k <= WASTE:
                for depth in DEPTHS:
                    yield {"tokens": tokens, "warps": warps, "chunks": chunks, "split": split, "depth": depth}


SKINNY_GEMM = SkinnyGemm(
    "cuda/skinny_gemm",
    (PLAIN, PACKED, NORMED, NORMED_PACKED),
    preloads=True,
    file="skinny_gemm.cu",
    entry="llmc_skinny_gemm",
    headers=("hopper.cuh", "scalar_math.cuh", "int4_to_bf16.cuh", "streaming.cuh", "strip_sums.cuh"),
    before=("skinny_weights.cuh",),
)

SKINNY_FIXED = SkinnyGemm(
    "cuda/skinny_fixed",
    (PLAIN, PACKED, NORMED, NORMED_PACKED),
    preloads=True,
    fixed=True,
    file="skinny_fixed.cu",
    entry="llmc_skinny_fixed",
    headers=("hopper.cuh", "scalar_math.cuh", "streaming.cuh", "strip_sums.cuh"),
    before=("skinny_weights.cuh",),
)
