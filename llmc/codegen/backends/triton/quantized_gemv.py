"""Products of few tokens that stream quantised weight rows through float32 registers, without tensor cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from llmc.codegen.backends.triton.gemv import MAX_TOKENS, by_tokens, joint_sum
from llmc.codegen.backends.triton.linear_problem import epilogue, output
from llmc.codegen.backends.triton.quantized_problem import QuantizedKernel, QuantizedProduct, weight_codes
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, Unit
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.targets.target import Target

# Rows of all parts, bytes of a row in a step, warps.
_TILES = (
    (4, 2048, 4), (2, 2048, 4), (4, 1024, 4), (4, 1024, 2), (8, 512, 4), (2, 1024, 2), (4, 2048, 8), (8, 1024, 4),
    (8, 2048, 8), (1, 2048, 4), (2, 4096, 8), (4, 8192, 16),
)  # fmt: skip
_CHUNK = 8  # bytes of codes of 8 bits per load of a thread; the elements of x of the same columns have 16
_TILE = 128  # maximum float32 factors per thread
_STEP = 512  # maximum products per thread in a step
_READ = 0.85  # share of the bandwidth that these streams reach
_CONVERSION = 2.4  # operations per code, counted in machine code


class CodeTile(NamedTuple):
    """The tile of a program; the fields are entries of its schedule. bn: weight rows of each part. bytes: of a row."""

    bn: int
    bytes: int
    warps: int


class QuantizedGemv(QuantizedKernel):
    """quantized_linear; fast for 1 to about 4 tokens, correct for any number."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        m = QuantizedProduct(node).m.const
        return f"{m} tokens; the maximum is {MAX_TOKENS}" if m is not None and m > MAX_TOKENS else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = QuantizedProduct(node)
        row_bytes = next_power_of_2(p.k // (2 if p.half else 1))
        tiles: dict[CodeTile, None] = {}  # without duplicates, in order
        for rows_of_parts, nbytes, warps in _TILES:
            bn = min(max(1, rows_of_parts // next_power_of_2(p.parts)), next_power_of_2(p.n))
            tiles[CodeTile(bn, max(_CHUNK, min(nbytes, row_bytes)), warps)] = None
        return by_tokens(p.m.const, tiles, lambda tile, rows: self._fits(p, tile, rows, target))

    @staticmethod
    def _fits(p: QuantizedProduct, tile: CodeTile, rows: int, target: Target) -> bool:
        """Whether a thread's factors fit its registers; tiles of one token always do."""
        bn, nbytes, warps = tile
        factors = bn * nbytes * p.parts * (2 if p.half else 1) // (warps * target.limits.warp)  # per thread
        return rows == 1 or (factors <= _TILE and rows * factors <= _STEP)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = QuantizedProduct(node), schedule
        passes = -(-p.tokens(env) // s["rows"])
        moved = (p.bytes(env) + (passes - 1) * p.weight_bytes) / target.bandwidth / _READ
        steps = _CONVERSION + s["rows"] * (1.5 + 1.6 / (s["bn"] * p.parts))
        arithmetic = passes * p.parts * p.n * p.k * steps * 2 / target.peaks["f32"]
        return math.hypot(moved, arithmetic) * 1e6 + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = QuantizedProduct(u.node), u.schedule
        sums = s["rows"] * p.parts
        joint = sums > 1 and not u.interpret  # the interpreter would reduce them element by element
        return u.launch(
            Template("quantized_gemv", "quantized_gemv"),
            (D(-(-p.n // s["bn"])), p.m.ceildiv(s["rows"])),
            s["warps"],
            1,
            (joint_sum(sums, 0) if joint else "", epilogue(u, p)),
            x_ptr="x0",
            codes=weight_codes(u, p),
            output=output(u, p, s["rows"]),
            ROWS=s["rows"],
            BLOCK_N=s["bn"],
            STEP=s["bytes"],
            CHUNK=_CHUNK,
            EARLY_WEIGHTS=p.weight_before_wait,
            JOINT_SUM="joint_sum" if joint else None,
        )


QUANTIZED_GEMV = QuantizedGemv("triton/quantized_gemv", ("quantized_linear", "packed_nibbles_linear"))
