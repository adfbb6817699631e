"""The binding of `kernels/quantized_tiles.cu`: many tokens times weights of 4 bits on Hopper's tensor cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_epilogue import pair_epilogue
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding
from llmc.codegen.backends.cuda.fragment_product import PACKED, PLAIN, FragmentKernel, FragmentProduct
from llmc.codegen.backends.cuda.wgmma import ALIGN, RESERVED, SWIZZLE, WARPGROUP, multiply_registers
from llmc.codegen.kernel import Map, Schedule
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.ir.ops.packed_codes import BLOCK
from llmc.targets.target import Target

# (tokens, rows of w) per tile; tiles of 256 tokens can be halved.
TILES = ((256, 128), (128, 256), (128, 192), (192, 128), (160, 128), (128, 128))
MAX_TOKENS, MIN_ROWS = 256, 128
CLUSTERS = (1, 2)  # blocks per cluster, which share tokens
GROUPED_TOKENS = 2048  # tokens of the tiles that are processed together, to share the weight in the L2 cache
MAX_STAGES, PADDING = 8, 4  # maximum buffers; floats after the sums of a token
MIN_TOKENS = 129  # minimum tokens of a product
# Fitted to 600 measurements on an H200 (bursts of 2 ms):
_PEAK_SHARE = 1.0  # share of the peak that instructions reach
_TILE_US = 1.5  # time of the end of a tile
_START_US = 5.0  # time of a launch
_CLUSTER_US = 1.0  # further time of clusters of two blocks
_HALVED_ROUND = 0.85  # time of a round of halved tiles, relative to a round of whole tiles


class TiledProduct(FragmentProduct):
    """A product in tiles of tokens and columns."""

    def columns(self, s: Schedule) -> int:
        """Return the columns of y per tile."""
        return int(s["rows"]) // self.parts

    def chunks(self, s: Schedule) -> int:
        """Return the number of blocks of columns per buffer of the ring."""
        return 2 if s["tokens"] == 128 else 1

    def width(self, s: Schedule) -> int:
        """Return the tokens per copy, which are also those of a halved tile."""
        return int(s["tokens"]) // (2 if s["tokens"] == MAX_TOKENS else 1)

    def blocks(self, s: Schedule) -> int:
        """Return the number of blocks of 64 rows of w per consumer warpgroup."""
        return 2 if s["rows"] == 256 else 1

    def stage(self, s: Schedule) -> int:
        """Return the bytes of a buffer of the ring."""
        step = self.chunks(s) * BLOCK
        scales = max(1, step // self.group) * (2 + bool(self.node.attrs["zeros"])) * s["rows"]
        return int(-(-(2 * s["tokens"] * step + s["rows"] * step // 2 + scales) // ALIGN) * ALIGN)

    def staged(self, s: Schedule) -> int:
        """Return the tokens whose sums are staged in one of two places."""
        return 16 if s["rows"] == 256 else 32

    def sum_bytes(self, s: Schedule) -> int:
        """Return the bytes of the staged sums."""
        return int(2 * self.staged(s) * (s["rows"] + PADDING) * 4)

    def stages(self, s: Schedule, target: Target) -> int:
        """Return the number of buffers that fit into shared memory."""
        return min(MAX_STAGES, (target.limits.shared - ALIGN - RESERVED - self.sum_bytes(s)) // self.stage(s))


@dataclass(frozen=True)
class QuantizedTiles(FragmentKernel):
    """Products of many tokens: quantized_linear over codes of 4 bits, on sm_90."""

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = TiledProduct(node)
        if BLOCK % p.group and p.group % (2 * BLOCK):
            return f"{p.group} columns that share a scale; divisors of {BLOCK}, multiples of {2 * BLOCK} are supported"
        if p.k % (2 * BLOCK) or not list(_schedules(p)):
            multiples = f"{MIN_ROWS // p.parts} x {2 * BLOCK}"
            return f"{p.parts} parts of {p.n} x {p.k}; multiples of {multiples} are supported"
        if p.m.const and p.m.const < MIN_TOKENS:
            return f"{p.m.const} tokens; at least {MIN_TOKENS} are supported"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(TiledProduct(node)))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: rounds of tiles on all multiprocessors, the last of which may be halved."""
        p, s, units = TiledProduct(node), schedule, target.limits.units
        tiles = -(-int(p.m.subs(env)) // s["tokens"]) * (p.n // p.columns(s))
        rounds, left = divmod(tiles, units)
        if left:
            can_halve = p.width(s) < s["tokens"] and 2 * left <= units
            rounds += _HALVED_ROUND if can_halve else 1.0
        flops = 2.0 * s["tokens"] * s["rows"] * p.k * units
        tile = flops / (target.peaks["bf16"] * _PEAK_SHARE) * 1e6 + _TILE_US
        return rounds * tile + _START_US + (_CLUSTER_US if s["along_n"] > 1 else 0.0) + target.launch_us

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = TiledProduct(node), schedule
        stages, blocks = p.stages(s, target), s["along_n"]
        return Binding(
            grid=(target.limits.units // blocks * blocks,),
            threads=(s["rows"] // BLOCK // p.blocks(s) + 1) * WARPGROUP,
            constants={
                "WARPGROUP": WARPGROUP, "BLOCK": BLOCK, "N": p.n, "PARTS": p.parts, "K": p.k, "GROUP": p.group,
                "ZERO_POINT": p.zero_point, "TOKENS": s["tokens"], "WIDTH": p.width(s), "STAGED": p.staged(s),
                "ROWS": p.columns(s), "BLOCKS": p.blocks(s), "CHUNKS": p.chunks(s), "STAGES": stages, "ALONG_N": blocks,
                "GROUP_SIZE_M": GROUPED_TOKENS // s["tokens"], "SCALE": p.scale, "OUT": CTYPES[node.result.type.dtype],
            },
            shared=stages * p.stage(s) + p.sum_bytes(s) + ALIGN,
            sizes=(p.m,),
            maps=(Map(0, (p.m, D(p.k)), (p.width(s), BLOCK), SWIZZLE),),
            cluster=(blocks, 1, 1) if blocks > 1 else (),
            text="\n\n".join(
                (*(multiply_registers(n) for n in sorted({p.width(s), s["tokens"]})), p.epilogue(pair_epilogue))
            ),
        )  # fmt: skip


def _schedules(p: TiledProduct) -> Iterator[Schedule]:
    """Yield the tiles that divide the columns of y, alone and in pairs that share tokens."""
    for (tokens, rows), blocks in itertools.product(TILES, CLUSTERS):
        columns = rows // p.parts
        if columns % BLOCK == 0 and p.n % (columns * blocks) == 0:
            yield {"tokens": tokens, "rows": rows, "along_n": blocks}


QUANTIZED_TILES = QuantizedTiles(
    "cuda/quantized_tiles",
    (PLAIN, PACKED),
    fills_multiprocessors=True,
    file="quantized_tiles.cu",
    entry="llmc_quantized_tiles",
    headers=("hopper.cuh", "ring.cuh", "scalar_math.cuh", "pairs.cuh", "int4_to_bf16.cuh"),
    before=("code_factors.cuh", "transposed_sums.cuh", "four_columns.cuh"),
)
