"""How products of few tokens by strips of a weight are divided among warps, blocks and clusters.

`kernels/strip_sums.cuh` has the loop that both kernels of such products share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from llmc.codegen.kernel import Schedule
from llmc.ir.dim import Dim
from llmc.targets.target import Target

TOKENS = (8, 16)  # of a tile
STRIP = 16  # rows of a product
BLOCK = 64  # columns of a chunk
WARPS = (16, 8, 14, 12, 10)  # of a block
CHUNKS = (4, 2, 1)  # blocks of columns of a warp
DEPTHS = (3, 2, 4, 6, 1)  # strips that are copied ahead
SPLITS = (1, 2, 4)  # blocks of a cluster
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block
BARRIERS = 16  # bytes of shared memory
WASTE = 1.15  # maximum columns of all warps, relative to those of the weight


def divisions(m: Dim, k: int) -> Iterator[Schedule]:
    """Yield the divisions of k columns with little waste, for the smallest tile of m tokens, or for all tiles."""
    fitting = [t for t in TOKENS if m.const is None or t >= m.const]
    for tokens in fitting if m.const is None else fitting[:1]:
        for chunks, split, warps in itertools.product(CHUNKS, SPLITS, WARPS):
            if 1 <= warps * chunks * BLOCK * split / k <= WASTE:
                for depth in DEPTHS:
                    yield {"tokens": tokens, "warps": warps, "chunks": chunks, "split": split, "depth": depth}


def columns(s: Schedule) -> int:
    """Columns of all warps of a cluster."""
    return int(s["warps"] * s["chunks"] * s["split"] * BLOCK)


def clusters(s: Schedule, target: Target) -> int:
    """Clusters that run at once. Those of four leave a few multiprocessors idle: an H200, of 132, runs 32 at once."""
    idle = resident(s) if s["split"] > 2 else 0
    return target.limits.units * resident(s) // int(s["split"]) - idle


def units(n: int, parts: int, s: Schedule, target: Target) -> int:
    """Strips of a block, in all parts."""
    return -(-(n // STRIP) // clusters(s, target)) * parts


def resident(s: Schedule) -> int:
    """Resident blocks of a multiprocessor."""
    return max(1, WARPS[0] // int(s["warps"]))


def registers(s: Schedule) -> int:
    """Blocks of a multiprocessor for which registers suffice; spare ones let the next kernel begin early."""
    return resident(s) * (2 if s["chunks"] * s["tokens"] <= 16 else 1)


def shared(n: int, parts: int, slot: int, s: Schedule, target: Target) -> int:
    """Bytes of shared memory: the sums of two strips of all warps and of all strips, slots of this size, barriers."""
    sums = STRIP * s["tokens"] * 4
    return int((2 * s["warps"] + units(n, parts, s, target)) * sums + s["warps"] * s["depth"] * slot + BARRIERS)


def fits(nbytes: int, s: Schedule, target: Target) -> bool:
    """Return whether a multiprocessor has shared memory for its resident blocks, of `nbytes` each."""
    return (nbytes + RESERVED) * resident(s) <= target.limits.shared
