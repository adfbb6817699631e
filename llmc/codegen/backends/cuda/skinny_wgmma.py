"""The binding of `kernels/skinny_wgmma.cu`: few tokens times weights of 8 bits or bf16 on Hopper's tensor cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from llmc.codegen.backends.cuda.cuda_epilogue import pair_epilogue, reject_product
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding, OptionalCudaKernel
from llmc.codegen.backends.cuda.wgmma import ALIGN, INSTRUCTIONS, SWIZZLE, WARPGROUP, lacks_wgmma, multiply
from llmc.codegen.kernel import Map, Schedule
from llmc.codegen.product import ConstantProduct, ProductNode, tiles_to_try
from llmc.ir.dim import D
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

CODES = ("f8e4m3", "i8")
TOKENS = (8, 16, 32, 64)  # tokens per tile
HEIGHT = 64  # rows of the weight per consumer
WIDTH = 128  # bytes per row of a box
ROWS = (64, 128, 192, 256)  # rows of the weight per tile, of all parts together
MAX_ROWS = 128  # maximum rows per tile of each part
SPLITS = (1, 2, 4)  # blocks that share the columns of a tile
CHUNKS = (1, 2)  # boxes per step
RESIDENT = (2, 3, 1, 4)  # blocks per multiprocessor that a schedule leaves room for
MAX_STAGES, MIN_STAGES, MAX_PARTS = 24, 3, 4
ALIGNED = 16  # the bytes of a row of a tensor map are a multiple of it
PRODUCER = 32  # threads of the producer
PADDING = 4  # floats after a token's sums in shared memory
# Fitted to measurements on an H200:
_BANDWIDTH_SHARE = 0.9  # share of the bandwidth that is reached
_X_BYTE_COST = 0.22  # cost of a byte of x, relative to a byte of the weight
_START_US = 0.2  # a launch after a short kernel
_ROUND_US = 2.5  # each further round of blocks
_STEP_US = 0.03  # each step
_TOKEN_US = 0.02  # each token of a tile
_CLUSTER_US = 0.15  # each further block of a cluster
_TALL_US = 0.7  # further time of tiles of more than HEIGHT rows
_CLUSTERS_OF_4 = 0.9  # share of the multiprocessors that clusters of four blocks can use


class SkinnyProduct(ConstantProduct):
    """y[m, n] = epilogue(x @ w_0.T, x @ w_1.T, .., others) of k columns."""

    @cached_property
    def item(self) -> int:
        """The bytes of an element of x and of the weight."""
        return DTYPES[self.w.dtype].bits // 8

    @property
    def columns(self) -> int:
        """The number of columns per box."""
        return WIDTH // self.item

    def steps(self, s: Schedule) -> int:
        """Return the steps per tile, of all blocks of a cluster together."""
        return -(-self.k // (s["chunks"] * self.columns))

    def tiles(self, s: Schedule) -> int:
        """Return the number of tiles along the columns of the result."""
        return -(-self.n // int(s["rows"]))

    def shared(self, s: Schedule) -> int:
        """Return the bytes of shared memory, which holds the ring of buffers and, at the end, the sums."""
        rows = self.parts * s["rows"]
        ring = s["stages"] * s["chunks"] * WIDTH * (rows + s["tokens"])
        return int(max(ring, s["tokens"] * (rows + PADDING) * 4)) + ALIGN


@dataclass(frozen=True)
class SkinnyWgmma(OptionalCudaKernel):
    """linear_map, and linear of bf16, of few tokens, both factors of one of `dtypes`, on sm_90.

    More tokens than a tile read the weights again.
    """

    dtypes: tuple[str, ...] = CODES

    def reject(self, node: Node, target: Target) -> str | None:
        if why := lacks_wgmma(target):
            return why
        x, w = (v.type for v in node.operands[:2])
        if x.dtype != w.dtype or x.dtype not in self.dtypes or w.format is not None:
            return f"factors of {x} and {w}; two of {' or of '.join(self.dtypes)} are supported"
        p = ProductNode(node)
        if why := reject_product(p, MAX_PARTS, ALIGNED * 8 // DTYPES[w.dtype].bits):
            return why
        if origin(node.operands[1]) is Origin.INPUTS:
            return "the weight is not known before the previous kernel has completed"
        if p.m.const is not None and p.m.const > TOKENS[-1]:
            return f"{p.m} tokens; at most {TOKENS[-1]} are supported"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(SkinnyProduct(node), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: reading the weights, which bytes in flight bound, and what each step and round adds."""
        p, s, units = SkinnyProduct(node), schedule, target.limits.units
        tiles = -(-int(p.m.subs(env)) // s["tokens"])
        rows = p.parts * s["rows"]
        steps = -(-p.steps(s) // s["split"])
        blocks = tiles * p.tiles(s) * s["split"]
        fit = max(1, target.limits.shared // (p.shared(s) + ALIGN))
        seats = int(units * fit * (_CLUSTERS_OF_4 if s["split"] == SPLITS[-1] else 1))
        ahead = min(blocks, seats) * s["stages"] * s["chunks"] * WIDTH * rows
        busy = min(1.0, 1.6 * min(blocks, units) / units, ahead / (target.bandwidth * 1e-6))
        of_x = blocks * steps * s["chunks"] * WIDTH * s["tokens"]  # bytes that all blocks read
        moved = tiles * p.parts * p.n * p.k * p.item / (_BANDWIDTH_SHARE * busy) + _X_BYTE_COST * of_x
        us = moved / target.bandwidth * 1e6 + _START_US + _ROUND_US * (-(-blocks // seats) - 1) + _STEP_US * steps
        return us + _TOKEN_US * s["tokens"] + _CLUSTER_US * (s["split"] - 1) + (_TALL_US if s["rows"] > HEIGHT else 0.0)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s, dtype = SkinnyProduct(node), schedule, node.operands[1].type.dtype
        return Binding(
            grid=(p.m.ceildiv(s["tokens"]) * (p.tiles(s) * s["split"]),),
            threads=p.parts * s["rows"] // HEIGHT * WARPGROUP + PRODUCER,
            constants={
                "N": p.n, "K": p.k, "ITEM": p.item, "PARTS": p.parts, "TOKENS": s["tokens"], "ROWS": s["rows"],
                "CHUNKS": s["chunks"], "STAGES": s["stages"], "SPLIT": s["split"],
                "SUM": INSTRUCTIONS[dtype].sum, "OUT": CTYPES[node.result.type.dtype],
            },
            shared=p.shared(s),
            sizes=(p.m,),
            maps=(
                Map(0, (p.m, D(p.k)), (s["tokens"], p.columns), SWIZZLE),
                Map(1, (D(p.parts * p.n), D(p.k)), (s["rows"], p.columns), SWIZZLE),
            ),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text="\n\n".join(
                (multiply(s["tokens"], dtype), pair_epilogue(p))
            ),
        )  # fmt: skip


def _schedules(p: SkinnyProduct, target: Target) -> Iterator[Schedule]:
    """Yield tiles of the smallest sufficient number of tokens, with the deepest rings that fit."""
    for tokens, rows, split, chunks in itertools.product(tiles_to_try(TOKENS, p.m.const), ROWS, SPLITS, CHUNKS):
        if rows % (8 * p.parts) or rows // p.parts > MAX_ROWS or (rows == 192 and p.parts != 3):
            continue
        s = {"tokens": tokens, "rows": rows // p.parts, "chunks": chunks, "split": split, "stages": 1}
        steps = -(-p.steps(s) // split)  # per block
        if split > 1 and (steps < 4 or (split - 1) * steps >= p.steps(s)):
            continue
        yield from _rings(p, s, min(MAX_STAGES, steps), target)


def _rings(p: SkinnyProduct, s: Schedule, limit: int, target: Target) -> Iterator[Schedule]:
    """Yield the deepest ring for each number of resident blocks per multiprocessor."""
    seen = set()
    stage = s["chunks"] * WIDTH * (p.parts * s["rows"] + max(TOKENS[1], s["tokens"]))
    for resident in RESIDENT:
        stages = min(limit, (target.limits.shared // resident - 2 * ALIGN) // stage)
        schedule = {**s, "stages": stages}
        if stages >= min(MIN_STAGES, limit) and stages not in seen and p.shared(schedule) <= target.limits.shared:
            seen.add(stages)
            yield schedule


SKINNY_WGMMA = SkinnyWgmma(
    "cuda/skinny_wgmma",
    ("linear_map",),  # the result of `linear` has the dtype of the factors
    fills_multiprocessors=True,
    preloads=True,
    file="skinny_wgmma.cu",
    entry="llmc_skinny_wgmma",
    headers=("hopper.cuh", "scalar_math.cuh", "pairs.cuh"),
)
# Its cost rule was fitted to codes, so it is used where it was measured.
SKINNY_WGMMA_BF16 = replace(
    SKINNY_WGMMA, name="cuda/skinny_wgmma_bf16", ops=("linear", "linear_map"), opt_in=True, dtypes=("bf16",)
)
