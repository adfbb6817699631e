"""Products with quantised weights on tensor cores, for any number of tokens.

Codes are converted to the dtype of the activations in registers. The template is `kernels/quantized_gemm.py`.

- `reject`: in `QuantizedKernel`: formats of codes and scales that the kernels of quantised products lack.
- `schedules`: the tiles of FEW or MANY, by the number of tokens, fitted to the layout of the codes.
- `cost_us`: reading, and multiplying with the conversion of codes; the longer time and half of the shorter one.
- `code`: one program for each tile of the result. The weight is the left factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmc.codegen.backends.triton.gemm_small import (
    GROUP,
    LINE_BYTES,
    MATRIX,
    REREAD,
    SMALL,
    TOKENS,
    UNIT_BANDWIDTH,
    WARPGROUP,
)
from llmc.codegen.backends.triton.linear_problem import epilogue, output, peak
from llmc.codegen.backends.triton.quantized_problem import (
    FEW_TOKENS,
    QuantizedKernel,
    QuantizedProduct,
    element_bytes,
    scales_factors,
    weight_codes,
)
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import GemmTile, next_power_of_2, previous_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, Unit, element
from llmc.codegen.kernel import Schedule
from llmc.codegen.product import sufficient_tile
from llmc.ir.graph import Node
from llmc.targets.target import Target

# bn of all parts, bytes of a row in a step, warps, stages, slices of tiles of up to 32 tokens. A step of several slices
# has one for each warp.
FEW = (
    (16, 256, 4, 4, 4), (32, 256, 4, 4, 4), (32, 256, 4, 6, 4), (16, 256, 4, 6, 4), (32, 128, 2, 6, 2),
    (64, 64, 4, 6, 1), (64, 64, 4, 10, 1), (64, 128, 4, 4, 2), (64, 256, 4, 3, 4), (16, 512, 8, 4, 8),
    (32, 512, 8, 4, 8), (128, 64, 4, 4, 1), (128, 64, 4, 8, 1),
)  # fmt: skip
# The same of tiles of 64 tokens and more.
MANY = (
    (64, 64, 4, 4, 1), (64, 64, 4, 6, 1), (128, 64, 8, 4, 1), (128, 64, 8, 3, 1), (128, 64, 8, 2, 1),
    (64, 64, 4, 3, 1), (64, 64, 4, 2, 1), (256, 64, 16, 3, 1), (64, 128, 4, 3, 2), (32, 256, 4, 3, 4),
)  # fmt: skip
# float32 factors are multiplied without tensor cores.
FLOAT = (GemmTile(16, 32, 32, 4, 2), GemmTile(32, 32, 32, 4, 2), GemmTile(32, 64, 32, 4, 2))
_SUMS = 128  # maximum float32 sums per thread of up to 8 warps, which have 255 registers; more warps share those of 8
# Operations to convert a code, counted in machine code:
_CONVERSION = 2.5  # if single warps multiply
_CONVERSION_OF_GROUPS = 4.7  # if warpgroups multiply, which read codes from shared memory two bytes at a time
_READ = 0.8  # share of the bandwidth that these tiles reach


class QuantizedGemm(QuantizedKernel):
    """quantized_linear by tl.dot of converted codes; the weight is the left factor."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = QuantizedProduct(node)
        tiles = dict.fromkeys(_fit(p, t, target) for t in _tiles(p))
        fitting = [t for t in tiles if _fits(p, t, target)]
        return [t._asdict() for t in fitting or [_fit(p, SMALL, target)]]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the larger of reading and computing, in whole waves of tiles, plus half of the smaller."""
        p, s, units = QuantizedProduct(node), schedule, target.limits.units
        rows = -(-p.tokens(env) // s["bm"])
        columns = -(-p.n // s["bn"])
        blocks, area = rows * columns, s["bm"] * s["bn"] * p.parts
        ahead = (s["stages"] - 1) * s["bn"] * p.parts * s["bk"]
        resident = min(blocks, units * max(1, min(target.limits.shared // _shared(p, s), 32 // s["warps"])))
        busy = min(1.0, UNIT_BANDWIDTH * min(blocks, units) / units, resident * ahead / (target.bandwidth * 1e-6))
        moved = p.bytes(env) + REREAD * (rows - 1) * p.weight_bytes
        reading = moved / target.bandwidth / (_READ * max(busy, 0.01))
        codes = rows * columns * s["bn"] * p.parts * p.k
        products = 2.0 * codes * s["bm"] / peak(p, target) / _peak_share(area)
        computing = (products + 2 * _conversion(p, s) * codes / target.peaks["f32"]) * (
            -(-blocks // units) * units / blocks
        )
        return (max(reading, computing) + 0.5 * min(reading, computing)) * 1e6 + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = QuantizedProduct(u.node), u.schedule
        rows = p.m.ceildiv(s["bm"])
        lines = previous_power_of_2(max(1, s["bk"] // LINE_BYTES))
        return u.launch(
            Template("quantized_gemm", "quantized_gemm"),
            (rows * -(-p.n // s["bn"]),),
            s["warps"],
            s["stages"],
            (epilogue(u, p),),
            x_ptr="x0",
            codes=weight_codes(u, p),
            output=output(u, p, s["bm"]),
            ROW_TILES=u.sizes(rows),
            JOINED=p.parts == 2,
            BLOCK_M=s["bm"],
            BLOCK_N=s["bn"],
            BLOCK_K=s["bk"] // s["split"],
            SLICES=s["split"],
            STAGES=s["stages"],
            TILE_GROUP=GROUP,
            SCALED=scales_factors(p.half, s["bm"], p.scale.dtype, p.x.dtype),
            PREFETCH_LINES=lines if u.pdl and p.weight_before_wait else 0,
            FACTOR="tl.float32" if u.interpret else element(p.x),
            LATE_LAUNCH=u.triggers_after_loads,
        )


def _tiles(p: QuantizedProduct) -> Iterator[GemmTile]:
    """Yield the tiles to try for a product, before they are fitted to it."""
    if p.dot == "f32":
        yield from FLOAT
        return
    counts: Sequence[int] = TOKENS
    if p.m.const is not None:
        sufficient = sufficient_tile(TOKENS, p.m.const)
        counts = sorted({sufficient, min(sufficient, TOKENS[-1] // 2)})
    for bm in counts:
        tiles = FEW if bm <= FEW_TOKENS else MANY
        yield from (GemmTile(bm, *t) for t in tiles)


def _peak_share(elements: int) -> float:
    """Return the share of the peak that tiles with this number of elements reach."""
    if elements < 8192:
        return 0.3
    return 0.45 if elements < 16384 else 0.55


def _fit(p: QuantizedProduct, tile: GemmTile, target: Target) -> GemmTile:
    """Adapt a tile to the parts and the layout of the codes: with nibbles, a slice has `half` bytes of a row."""
    bm, bn, bk, warps, stages, split = tile
    if p.half:
        spans = p.k // (2 * p.half)
        while spans % split:
            split //= 2
        bk = p.half * split
    else:
        bk = max(MATRIX * split, min(bk, next_power_of_2(p.k)))
    if target.family == "hip":
        bm, stages = max(bm, MATRIX), 2
    return GemmTile(bm, max(MATRIX, bn // next_power_of_2(p.parts)), bk, warps, stages, split)


def _conversion(p: QuantizedProduct, s: Schedule) -> float:
    """Operations per code to make it a factor."""
    groups = s["split"] == 1 and s["bn"] * min(p.parts, 2) >= WARPGROUP and s["bm"] >= MATRIX
    return _CONVERSION_OF_GROUPS if groups else _CONVERSION


def _shared(p: QuantizedProduct, s: Schedule) -> int:
    """Bytes of shared memory: the tiles of every stage. Codes become factors in registers."""
    columns = s["bk"] * (2 if p.half else 1)
    return int(s["stages"] * (s["bn"] * p.parts * s["bk"] + s["bm"] * columns * element_bytes(p)))


def _fits(p: QuantizedProduct, t: GemmTile, target: Target) -> bool:
    """Whether a tile fits shared memory and its sums fit registers."""
    if _shared(p, t._asdict()) > target.limits.shared:
        return False
    return t.bm * t.bn * p.parts * t.split <= _SUMS * min(t.warps, 8) * target.limits.warp


QUANTIZED_GEMM = QuantizedGemm(
    "triton/quantized_gemm",
    ("quantized_linear", "packed_nibbles_linear"),
    fills_multiprocessors=True,
    can_trigger_after_loads=True,
)
