"""Products with quantised weights on tensor cores, for any number of tokens."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.gemm_small import GROUP
from llmc.codegen.backends.triton.linear_problem import epilogue, peak
from llmc.codegen.backends.triton.quantized_problem import (
    QuantizedKernel,
    QuantizedProduct,
    element_bytes,
    shared_arguments,
)
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import power
from llmc.codegen.backends.triton.triton_kernel import Code, Unit, element
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target

Tile = tuple[int, int, int, int, int]  # bm, bn of all parts, bk, warps, stages
_KEYS = ("bm", "bn", "bk", "warps", "stages")
# bk is the bytes of a step where a byte is one code.
TILES: tuple[Tile, ...] = (
    (16, 64, 128, 4, 4),
    (16, 128, 128, 4, 4),
    (16, 32, 256, 4, 4),
    (32, 64, 128, 4, 4),
    (32, 128, 128, 4, 3),
    (64, 64, 128, 4, 4),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (256, 128, 64, 8, 3),
)
# float32 factors are multiplied without tensor cores.
FLOAT_TILES: tuple[Tile, ...] = ((16, 32, 32, 4, 2), (32, 32, 32, 4, 2), (32, 64, 32, 4, 2))
SMALLEST = (16, 16, 32, 4, 2)  # fits every target
_MATRIX = 16  # rows of a tensor core's smallest instruction
_SUMS = 128  # maximum float32 sums per thread, those of one step included
_CONVERSION = 5.0  # operations per code: mask or shift, subtraction, conversion, move
_READ = 0.8  # share of the bandwidth that these tiles reach


class QuantizedGemm(QuantizedKernel):
    """quantized_linear by tl.dot of converted codes; the weight is the left factor."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = QuantizedProduct.of(node)
        tiles = FLOAT_TILES if p.dot == "f32" else TILES
        shapes = dict.fromkeys(self._fit(p, t, target) for t in tiles)
        fitting = [s for s in shapes if _fits(p, s, target)]
        return [dict(zip(_KEYS, s, strict=True)) for s in fitting or [self._fit(p, SMALLEST, target)]]

    @staticmethod
    def _fit(p: QuantizedProduct, tile: Tile, target: Target) -> Tile:
        """Adapt a tile to the parts and the layout of the codes."""
        bm, bn, bk, warps, stages = tile
        bk = p.half or max(_MATRIX, min(bk, power(p.k)))
        return bm, max(_MATRIX, bn // power(p.parts)), bk, warps, 2 if target.family == "hip" else stages

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the larger of reading and computing, in whole waves of tiles, plus half of the smaller."""
        p, s, units = QuantizedProduct.of(node), schedule, target.limits.units
        rows, columns = -(-p.tokens(env) // s["bm"]), -(-p.n // s["bn"])
        blocks, area = rows * columns, s["bm"] * s["bn"] * p.parts
        ahead = (s["stages"] - 1) * s["bn"] * p.parts * s["bk"]
        resident = min(blocks, units * max(1, min(target.limits.shared // _shared(p, s), 32 // s["warps"])))
        busy = min(1.0, 1.6 * min(blocks, units) / units, resident * ahead / (target.bandwidth * 1e-6))
        moved = p.bytes(env) + 0.1 * (rows - 1) * p.weight_bytes
        reading = moved / target.bandwidth / (_READ * max(busy, 0.01))
        codes = rows * columns * s["bn"] * p.parts * p.k
        share = 0.3 if area < 8192 else 0.45 if area < 16384 else 0.55
        products = 2.0 * codes * s["bm"] / peak(p, target) / share
        computing = (products + 2 * _CONVERSION * codes / target.peaks["f32"]) * (-(-blocks // units) * units / blocks)
        return (max(reading, computing) + 0.5 * min(reading, computing)) * 1e6 + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = QuantizedProduct.of(u.node), u.schedule
        rows = p.m.ceildiv(s["bm"])
        return u.launch(
            Template("quantized_gemm", "quantized_gemm"),
            (rows * -(-p.n // s["bn"]),),
            s["warps"],
            s["stages"],
            (epilogue(u, p),),
            **shared_arguments(u, p),
            ROW_TILES=u.sizes(rows),
            HALF=p.half,
            BLOCK_M=s["bm"],
            BLOCK_N=s["bn"],
            BLOCK_K=s["bk"],
            STAGES=s["stages"],
            TILE_GROUP=GROUP,
            WHOLE_M=p.m.const is not None and p.m.const % s["bm"] == 0,
            FACTOR="tl.float32" if u.interpret else element(p.x),
            LATE_LAUNCH=u.late,
        )


def _shared(p: QuantizedProduct, s: Schedule) -> int:
    """Bytes of shared memory: the tiles of every stage, and the codes of one step as factors."""
    size, columns = element_bytes(p), s["bk"] * (2 if p.half else 1)
    stage = s["bn"] * p.parts * s["bk"] + s["bm"] * columns * size
    return int(s["stages"] * stage + s["bn"] * columns * size)


def _fits(p: QuantizedProduct, tile: Tile, target: Target) -> bool:
    """Whether a tile fits shared memory and its sums fit registers."""
    s = dict(zip(_KEYS, tile, strict=True))
    sums = s["bm"] * s["bn"] * (p.parts + bool(p.half))
    return _shared(p, s) <= target.limits.shared and sums <= _SUMS * s["warps"] * target.limits.warp


QUANTIZED_GEMM = QuantizedGemm(
    "triton/quantized_gemm", ("quantized_linear", "packed_nibbles_linear"), crowds=True, yields=True
)
