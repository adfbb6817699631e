"""The binding of `kernels/skinny_slices.cu`: few tokens times weights of 4 bits, whose columns the warps divide."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_epilogue import pair_epilogue
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding
from llmc.codegen.backends.cuda.fragment_product import (
    NORMED,
    NORMED_PACKED,
    PACKED,
    PLAIN,
    FragmentKernel,
    FragmentProduct,
)
from llmc.codegen.backends.cuda.wgmma import ALIGN, SWIZZLE, deepest_rings
from llmc.codegen.kernel import Map, Schedule
from llmc.codegen.product import tiles_to_try
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.ir.ops.packed_codes import BLOCK
from llmc.targets.target import Target

TOKENS = (8, 16)  # tokens per tile
STRIP = 16  # rows of the weight per instruction
STRIPS = (1, 2, 3, 4)  # strips per warp
GROUPS = (1, 2, 3, 4, 7, 8, 14, 16)  # groups of rows among which the warps of a block are divided
SLICES = (8, 4, 16, 2, 7, 14, 1)  # slices of columns among which the warps of a group are divided
SPLITS = (1, 2, 4, 8)  # blocks per cluster, which have different columns
CHUNKS = (1, 2)  # blocks of 64 columns per step
STAGES = (12, 8, 6, 5, 4, 3, 2, 1)  # steps of a warp's ring
SHARES = (1.0, 0.75, 0.5)  # shares of a multiprocessor's shared memory that a block may use
MAX_WARPS = 16  # maximum warps per block
MIN_OCCUPANCY = 0.7  # minimum share of the multiprocessors that have a block
MAX_WASTE = 1.15  # maximum steps of all warps, relative to those that the columns need
# Fitted to measurements on an H200:
_BYTES_IN_FLIGHT = 6e6  # bytes in flight from which the full bandwidth is reached
_PRODUCT_US = 7.0e-6  # converting a code and multiplying it by a tile of tokens, on one multiprocessor
_FEW_WARPS = 6.0  # number of warps with which products take twice as long as with very many
_MANY_TOKENS = 24.0  # number of tokens with which products take twice as long as with one
_NOT_HIDDEN = 0.3  # share of the shorter of reading and multiplying that the longer one does not hide
_SHARED_X_US = 1.0  # sharing x among groups of warps
_START_US = 1.5  # a launch
_CLUSTER_US = 0.5  # a cluster of more than two blocks


class SlicedProduct(FragmentProduct):
    """A product whose columns are divided among the warps of a block and the blocks of a cluster."""

    def step(self, s: Schedule) -> int:
        """Return the columns per step."""
        return int(s["chunks"]) * BLOCK

    def rows(self, s: Schedule) -> int:
        """Return the columns of y per block."""
        return int(s["groups"]) * int(s["strips"]) // self.parts * STRIP

    def steps(self, s: Schedule) -> int:
        """Return the maximum number of steps per warp."""
        of_block = -(-self.k // self.step(s) // int(s["split"]))
        return -(-of_block // int(s["slices"]))

    def token_steps(self, s: Schedule) -> int:
        """Return the steps of x for which a slice has memory: all of them if several warps share x."""
        return self.steps(s) if s["groups"] > 1 else min(self.steps(s), int(s["stages"]))

    def entries(self, s: Schedule) -> int:
        """Return the number of scales per row and step."""
        return max(1, self.step(s) // self.group)

    def stage_bytes(self, s: Schedule) -> int:
        """Return the bytes per stage of a warp's ring: codes, scales, zero points, and the gain of a norm."""
        codes = s["strips"] * s["chunks"] * 512
        copies_of_16_bytes = self.entries(s) * s["strips"] * (3 if self.node.attrs["zeros"] else 2)
        gain = self.step(s) * 2 if self.normed and s["groups"] == 1 else 0
        return int(codes + copies_of_16_bytes * 16 + gain)

    def shared(self, s: Schedule) -> int:
        """Return the bytes of shared memory; sliced_weights.cuh describes its layout."""
        warps, tokens = s["groups"] * s["slices"], s["tokens"]
        x_bytes = s["slices"] * self.token_steps(s) * s["chunks"] * tokens * BLOCK * 2
        rings = warps * s["stages"] * self.stage_bytes(s)
        stride = self.parts * self.rows(s) + 4
        sums = s["slices"] * tokens * stride * 4
        received = (s["split"] - 1) * (tokens // s["split"]) * (stride + int(self.normed)) * 4
        squares = warps * tokens * 4 if self.normed else 0
        x_sums = s["slices"] * self.token_steps(s) * self.entries(s) * tokens * 4 if s["groups"] > 1 else 0
        return int(max(x_bytes + rings, sums) + -(-(received + squares) // 16) * 16 + x_sums) + ALIGN


@dataclass(frozen=True)
class SkinnySlices(FragmentKernel):
    """Few tokens: quantized_linear over codes of 4 bits, on sm_90, also of normed tokens.

    More tokens than a tile read the weights again.
    """

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = SlicedProduct(node)
        if p.m.const is not None and p.m.const > TOKENS[-1]:
            return f"{p.m} tokens; at most {TOKENS[-1]} are supported"
        return None if self.schedules(node, target) else f"{p.k} columns with {p.group} for each scale"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(SlicedProduct(node), target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: reading the weights overlaps in part with multiplying them."""
        p, s, units = SlicedProduct(node), schedule, target.limits.units
        blocks = -(-p.n // p.rows(s)) * s["split"]
        resident = max(1, min(max_resident(p, s), target.limits.shared // (p.shared(s) + ALIGN)))
        rounds = -(-blocks // (units * resident))
        occupancy = min(1.0, blocks / units)
        warps = s["groups"] * s["slices"] * min(float(resident), max(1.0, blocks / units))  # per multiprocessor
        step_bytes = s["strips"] * s["chunks"] * STRIP * BLOCK / 2
        in_flight = occupancy * units * warps * s["stages"] * step_bytes
        read_us = p.weight_bytes / (target.bandwidth * min(1.0, in_flight / _BYTES_IN_FLIGHT)) * 1e6
        slowdown = (1 + _FEW_WARPS / warps) * (1 + s["tokens"] / _MANY_TOKENS)
        multiply_us = p.parts * p.n * p.k / (units * occupancy) * _PRODUCT_US * slowdown
        us = max(read_us, multiply_us) + _NOT_HIDDEN * min(read_us, multiply_us)
        us += _SHARED_X_US if s["groups"] > 1 else 0.0
        tiles = -(-int(p.m.subs(env)) // s["tokens"])
        return tiles * rounds * us + _START_US + (_CLUSTER_US if s["split"] > 2 else 0.0) + target.launch_us

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = SlicedProduct(node), schedule
        return Binding(
            grid=(p.m.ceildiv(s["tokens"]) * (-(-p.n // p.rows(s)) * s["split"]),),
            threads=s["groups"] * s["slices"] * 32,
            constants={
                "N": p.n, "PARTS": p.parts, "K": p.k, "GROUP": p.group, "ZERO_POINT": p.zero_point,
                "TOKENS": s["tokens"], "STRIPS": s["strips"], "GROUPS": s["groups"], "SLICES": s["slices"],
                "SPLIT": s["split"], "CHUNKS": s["chunks"], "STAGES": s["stages"], "TOKEN_STEPS": p.token_steps(s),
                "SHARED": p.shared(s), "RESIDENT": max_resident(p, s), "NORMED": int(p.normed),
                "EPS": float(node.attrs.get("eps", 0.0)), "SCALE": p.scale, "OUT": CTYPES[node.result.type.dtype],
            },
            shared=p.shared(s),
            sizes=(p.m,),
            maps=(Map(0, (p.m, D(p.k)), (s["tokens"], BLOCK), SWIZZLE),),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=p.epilogue(pair_epilogue),
        )  # fmt: skip


def max_resident(p: SlicedProduct, s: Schedule) -> int:
    """Return the number of blocks per multiprocessor for which registers suffice."""
    return 2 if s["groups"] * s["slices"] * 2 <= MAX_WARPS else 1


def _schedules(p: SlicedProduct, target: Target) -> Iterator[Schedule]:
    """Yield tiles that fill the multiprocessors once, divided among warps, with the deepest rings that fit."""
    units = target.limits.units
    for tokens in tiles_to_try(TOKENS, p.m.const):
        for split, strips, groups in itertools.product(SPLITS, STRIPS, GROUPS):
            if strips % p.parts or tokens % split:
                continue
            tile = {"tokens": tokens, "strips": strips, "groups": groups, "split": split}
            blocks = -(-p.n // p.rows(tile)) * split
            has_smallest_blocks = groups == 1 and strips == p.parts
            if blocks > 2 * units or (blocks < MIN_OCCUPANCY * units and not has_smallest_blocks):
                continue
            for slices, chunks in itertools.product(SLICES, CHUNKS):
                s = {**tile, "slices": slices, "chunks": chunks}
                if _divides(p, s):
                    yield from _rings(p, s, target)


def _divides(p: SlicedProduct, s: Schedule) -> bool:
    """Whether a step has whole groups of columns, or a group whole steps, and all warps have about as many steps."""
    step, columns = p.step(s), p.k // BLOCK
    if columns % s["chunks"] or (step % p.group and p.group % step) or s["groups"] * s["slices"] > MAX_WARPS:
        return False
    return p.steps({**s, "stages": 1}) * s["slices"] * s["split"] * s["chunks"] <= MAX_WASTE * columns


def _rings(p: SlicedProduct, s: Schedule, target: Target) -> Iterator[Schedule]:
    """Yield the deepest ring for each share of a multiprocessor's memory; the next kernel can use the rest."""
    max_stages = min(p.steps({**s, "stages": 1}), STAGES[0])

    def fits(stages: int, share: float) -> bool:
        needed = p.shared({**s, "stages": stages}) + ALIGN
        return stages <= max_stages and needed <= share * target.limits.shared

    for stages in deepest_rings(STAGES, SHARES, fits):
        yield {**s, "stages": stages}


SKINNY_SLICES = SkinnySlices(
    "cuda/skinny_slices",
    (PLAIN, PACKED, NORMED, NORMED_PACKED),
    opt_in=True,  # its cost rule is coarse, so it is used where it was measured
    preloads=True,
    file="skinny_slices.cu",
    entry="llmc_skinny_slices",
    headers=("hopper.cuh", "scalar_math.cuh", "pairs.cuh", "int4_to_bf16.cuh", "streaming.cuh"),
    before=("sliced_weights.cuh", "four_columns.cuh"),
)
