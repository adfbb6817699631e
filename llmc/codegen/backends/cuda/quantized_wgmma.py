"""The binding of `kernels/quantized_wgmma.cu`: bf16 activations times weights of 4 bits on Hopper's tensor cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_epilogue import pair_epilogue
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding
from llmc.codegen.backends.cuda.fragment_product import PACKED, PLAIN, FragmentKernel, FragmentProduct
from llmc.codegen.backends.cuda.wgmma import ALIGN, SWIZZLE, WARPGROUP, deepest_rings
from llmc.codegen.kernel import TRIGGER_AFTER_LOADS, Map, Schedule
from llmc.codegen.product import sufficient_tile
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.ir.ops.packed_codes import BLOCK
from llmc.targets.gpu_targets import REGISTERS
from llmc.targets.target import Target

TOKENS = (8, 16, 32, 64, 128, 256)  # tokens per tile
WIDTH = 128  # maximum tokens of a box and of an instruction
PRODUCER = 32  # threads of the producer
ROWS = (64, 128, 192)  # columns of y per tile; 192 are for 128 tokens
STAGES = (12, 8, 6, 4, 3, 2)
SPLITS = (1, 2, 4, 8)  # blocks per cluster, which have different columns of the weight
SLICES = (1, 2, 4)  # warpgroups per block that have different columns of the same rows of the weight
MAX_SLICED_TOKENS, MAX_CONSUMERS = 64, 4  # with several slices: maximum tokens per tile, and consumers per block
# Minimum buffers with several slices: with two, NVCC 13.0 converts codes into registers that a product still reads.
MIN_SLICED_STAGES = 3
RESIDENT = (2, 3, 4, 1, 6, 8)  # blocks per multiprocessor that a schedule leaves room for, best guess first
MAX_THREADS = 2048  # per multiprocessor
THREAD_REGISTERS = ((32, 96), (128, 136), (256, 168))  # (maximum tokens per tile, registers per thread)
# Fitted to 950 measurements on an H200 (bench.gpu.quantized_products):
_START_US = 2.68  # start of a block
_STEP_US = 0.419  # latency of a step
_COPY_US = 1.246  # latency of the copies of a step
_SCALED_SUMS_US = 0.041  # instructions of a warpgroup in a step that multiplies sums by the scales
_SCALED_FACTORS_US = 0.177  # instructions of a warpgroup in a step that multiplies factors by the scales
_END_US = 0.92  # end of a block, for 4096 sums
_CLUSTER_US = 1.13  # synchronization of a cluster
_PEER_US = 0.17  # sums of each block of a cluster
_LARGE_CLUSTERS = 0.9  # share of the multiprocessors that clusters of more than two blocks can use
_WIDE_SLICES = 1.15  # factor of the time if slices have more than 64 rows
_HALVED_ROUND = 0.55  # time of a round of halved tiles, relative to a round of whole tiles
_BANDWIDTH_SHARE = 0.72  # share of the bandwidth that is reached
_CACHE_RATE = 9.9e12  # bytes per second of copies from the L2 cache


def slices(s: Schedule) -> int:
    """Return the warpgroups per block that have different columns of the same rows; schedules of one omit the key."""
    return int(s.get("slices", 1))


class TiledProduct(FragmentProduct):
    """A product in tiles of tokens and columns."""

    @property
    def step(self) -> int:
        """The number of columns per step."""
        return 2 * BLOCK if self.k % (2 * BLOCK) == 0 else BLOCK

    def consumers(self, s: Schedule) -> int:
        """Return the number of consumer warpgroups per block."""
        return self.parts * int(s["rows"]) // BLOCK * slices(s)

    def producer(self, s: Schedule) -> int:
        """Return the threads of the producer: a warpgroup if it releases registers to the consumers, else a warp."""
        return WARPGROUP if s["tokens"] > 128 and self.consumers(s) > 1 else PRODUCER

    def resident(self, s: Schedule, target: Target) -> int:
        """Return the number of resident blocks per multiprocessor."""
        threads = self.consumers(s) * WARPGROUP + self.producer(s)
        registers = next(count for tokens, count in THREAD_REGISTERS if s["tokens"] <= tokens)
        fit = target.limits.shared // (self.shared(s) + ALIGN), MAX_THREADS // threads
        return max(1, min(*fit, REGISTERS // (threads * registers)))

    def shared(self, s: Schedule) -> int:
        """Return the bytes of shared memory, which holds the ring of buffers and, at the end, the sums."""
        scales = max(1, self.step // self.group)
        entry = 2 * BLOCK + BLOCK * bool(self.node.attrs["zeros"])
        of_x = slices(s) * s["tokens"] * self.step * 2
        stage = of_x + self.consumers(s) * (BLOCK * self.step // 2 + scales * entry)
        ring = s["stages"] * (-(-stage // ALIGN) * ALIGN)
        sums = slices(s) * s["tokens"] * (self.parts * s["rows"] + 4) * 4
        return int(max(ring, sums)) + ALIGN


@dataclass(frozen=True)
class QuantizedWgmma(FragmentKernel):
    """Products of any number of tokens: quantized_linear over codes of 4 bits, on sm_90."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        p = TiledProduct(node)
        if p.step % p.group and p.group % p.step:
            return f"{p.group} columns that share a scale; divisors and multiples of {p.step} are supported"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = TiledProduct(node)
        return list(_schedules(p, target))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: rounds of resident blocks, whose steps are bound by latency or by a shared resource."""
        p, s, units = TiledProduct(node), schedule, target.limits.units
        blocks = -(-int(p.m.subs(env)) // s["tokens"]) * (p.n // s["rows"]) * s["split"]
        seats = int(units * _LARGE_CLUSTERS) if s["split"] > 2 else units
        last_is_halved = s.get("halves") and 0 < 2 * (blocks % units) <= units
        steps = p.k // p.step // (s["split"] * slices(s))
        waiting, max_resident, us = -(-blocks // seats), p.resident(s, target), 0.0
        while waiting > 0:
            resident = min(max_resident, waiting)
            waiting -= resident
            step = _step_us(p, s, resident, min(1.0, blocks / units), target)
            us += _START_US + steps * step * (_HALVED_ROUND if last_is_halved and not waiting else 1.0)
        us += _END_US * s["tokens"] * s["rows"] * p.parts / 4096
        us += (_CLUSTER_US + _PEER_US * s["split"] if s["split"] > 1 else 0.0) + target.launch_us
        return us * (_WIDE_SLICES if slices(s) > 1 and s["rows"] > BLOCK else 1.0)

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = TiledProduct(node), schedule
        return Binding(
            grid=(_blocks(p.m.ceildiv(s["tokens"]) * (p.n // s["rows"]), halved(s, target)) * s["split"],),
            threads=p.consumers(s) * WARPGROUP + p.producer(s),
            constants={
                "WARPGROUP": WARPGROUP, "BLOCK": BLOCK, "N": p.n, "PARTS": p.parts, "K": p.k, "GROUP": p.group,
                "ZERO_POINT": p.zero_point, "TOKENS": s["tokens"], "ROWS": s["rows"],
                "STAGES": s["stages"], "SLICES": slices(s), "SPLIT": s["split"], "ROUND": halved(s, target),
                "TRIGGER_AFTER_LOADS": int(bool(s.get(TRIGGER_AFTER_LOADS))), "SCALE": p.scale,
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=p.shared(s),
            sizes=(p.m,),
            maps=(Map(0, (p.m, D(p.k)), (min(s["tokens"], WIDTH), BLOCK), SWIZZLE),),
            cluster=(s["split"], 1, 1) if s["split"] > 1 else (),
            text=p.epilogue(pair_epilogue),
        )  # fmt: skip


def halved(s: Schedule, target: Target) -> int:
    """Return the number of blocks per round if the tiles that are left after whole rounds may be halved, else 0."""
    return target.limits.units if s.get("halves") else 0


def _blocks(tiles: Dim, units: int) -> Dim:
    """Return the number of blocks: one per tile, and another one for each tile that may be halved."""
    return tiles * 2 - (tiles - (units - 1)).ceildiv(units) * units if units else tiles


def _step_us(p: TiledProduct, s: Schedule, resident: int, busy: float, target: Target) -> float:
    """Predict the microseconds of a step of `resident` blocks per multiprocessor.

    busy: share of the multiprocessors in use.
    """
    units, consumers = target.limits.units, p.consumers(s)
    codes, tokens = consumers * BLOCK * p.step / 2, slices(s) * s["tokens"] * p.step * 2  # bytes
    instructions = _SCALED_SUMS_US if s["tokens"] <= 32 and p.group >= p.step else _SCALED_FACTORS_US
    flops = 2.0 * consumers * BLOCK * p.step * s["tokens"]
    shared = (
        consumers * instructions,
        codes * busy * units / (target.bandwidth * _BANDWIDTH_SHARE) * 1e6,
        (codes + tokens) * units / _CACHE_RATE * 1e6,
        flops * units / target.peaks["bf16"] * 1e6,
    )
    return max(_STEP_US, _COPY_US / (s["stages"] - 1), resident * max(shared))


def _schedules(p: TiledProduct, target: Target) -> Iterator[Schedule]:
    """Yield tiles of the smallest sufficient number of tokens and of half of it, with the deepest rings that fit."""
    counts: Sequence[int] = TOKENS
    if p.m.const is not None:
        sufficient = sufficient_tile(TOKENS, p.m.const)
        counts = sorted({sufficient, max(TOKENS[0], sufficient // 2)}, reverse=True)
    for tokens in counts:
        for rows, split, sliced in itertools.product(ROWS if p.parts == 1 else ROWS[:1], SPLITS, SLICES):
            if rows == ROWS[-1] and tokens != WIDTH:
                continue
            tile = {"tokens": tokens, "rows": rows, "split": split} | ({"slices": sliced} if sliced > 1 else {})
            if p.n % rows == 0 and _divides(p, tile):
                yield from _rings(p, tile, target)


def _divides(p: TiledProduct, s: Schedule) -> bool:
    """Whether the columns of a tile can be divided among its blocks and their warpgroups."""
    steps = p.k // p.step
    shares = int(s["split"]) * slices(s)
    sliced = slices(s)
    if sliced > 1 and (s["tokens"] > MAX_SLICED_TOKENS or s["split"] > 2 or p.consumers(s) > MAX_CONSUMERS):
        return False
    return (shares == 1 or (steps % shares == 0 and steps >= 4 * shares)) and (s["split"] <= 2 or s["tokens"] <= 64)


def _rings(p: TiledProduct, tile: Schedule, target: Target) -> Iterator[Schedule]:
    """Yield the deepest ring for each number of resident blocks per multiprocessor."""
    min_stages = MIN_SLICED_STAGES if slices(tile) > 1 else 1

    def fits(stages: int, resident: int) -> bool:
        available = target.limits.shared // resident - ALIGN
        return stages >= min_stages and p.shared({**tile, "stages": stages}) <= available

    for stages in deepest_rings(STAGES, RESIDENT, fits):
        s = {**tile, "stages": stages}
        yield s
        if s["tokens"] == 2 * WIDTH and s["split"] == 1:
            yield {**s, "halves": 1}


QUANTIZED_WGMMA = QuantizedWgmma(
    "cuda/quantized_wgmma",
    (PLAIN, PACKED),
    fills_multiprocessors=True,
    can_trigger_after_loads=True,
    preloads=True,
    file="quantized_wgmma.cu",
    entry="llmc_quantized_linear",
    headers=("hopper.cuh", "wgmma_registers.cuh", "scalar_math.cuh", "pairs.cuh", "int4_to_bf16.cuh"),
    before=("code_factors.cuh", "four_columns.cuh"),
)
