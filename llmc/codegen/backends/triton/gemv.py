"""Products of few tokens that stream weight rows through float32 registers, without tensor cores.

A program computes `bn` rows of every part for `rows` tokens. It loads its first weight tiles before it waits for the
previous kernels, and reduces its sums once, at the end. The template is `kernels/gemv.py`.

- `reject`: more than MAX_TOKENS tokens, and what `reject_product` names for every product.
- `schedules`: tiles that were the fastest for some weight on an H200 (MEASURED), nearest to this weight's first.
- `cost_us`: reading and arithmetic overlap in part: the root of the sum of their squares. Schedules are slower the more
  they differ from the nearest measured one.
- `code`: one program for each `bn` rows and `rows` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeVar

from llmc.codegen.backends.triton.linear_problem import Product, epilogue, output, reject_product
from llmc.codegen.backends.triton.template import Template, function
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.targets.target import Target


class StreamTile(NamedTuple):
    """The tile of a program that streams weight rows; the fields are entries of its schedule.

    bn: rows, in `Measured` those of all parts. bk: columns of a step. stages: steps in flight.
    """

    bn: int
    bk: int
    warps: int
    stages: int


class Measured(NamedTuple):
    """The fastest tile of a weight with these rows of all parts and columns."""

    rows: int
    columns: int
    tile: StreamTile


Tile = TypeVar("Tile", bound=NamedTuple)
MAX_ROWS = 8  # maximum tokens per program
MAX_TOKENS = 16  # maximum tokens; with more, every weight would be read too often
# Of bf16 streams, measured on an H200.
MEASURED = (
    Measured(6144, 4096, StreamTile(2, 2048, 8, 2)),
    Measured(4096, 4096, StreamTile(2, 2048, 8, 2)),
    Measured(28672, 4096, StreamTile(2, 2048, 4, 1)),
    Measured(4096, 14336, StreamTile(2, 2048, 8, 2)),
    Measured(3072, 2048, StreamTile(2, 1024, 4, 2)),
    Measured(2048, 2048, StreamTile(4, 2048, 2, 2)),
    Measured(16384, 2048, StreamTile(2, 1024, 4, 2)),
    Measured(2048, 8192, StreamTile(2, 2048, 8, 2)),
    Measured(4096, 1024, StreamTile(8, 1024, 2, 2)),
    Measured(1024, 2048, StreamTile(4, 2048, 2, 1)),
    Measured(6144, 1024, StreamTile(4, 512, 4, 1)),
    Measured(1024, 3072, StreamTile(2, 1024, 4, 1)),
)
# The same of norm_linear.
NORM_MEASURED = (
    Measured(28672, 4096, StreamTile(4, 2048, 8, 2)),
    Measured(6144, 4096, StreamTile(2, 1024, 4, 1)),
    Measured(16384, 2048, StreamTile(2, 1024, 4, 2)),
    Measured(6144, 1024, StreamTile(8, 1024, 2, 1)),
)
_PASS_SLOWDOWN = 0.025  # slowdown for each pass over the weights after the first, measured on an H200
_DISTANCE_SLOWDOWN = 0.02  # slowdown for each factor of two between a tile and the nearest measured one: it ranks them
_BANDWIDTH_SHARE = 0.96  # share of the bandwidth that the best of these schedules reach
_PEAK_SHARE = 0.85  # share of the peak that the arithmetic reaches
_I8_OPERATIONS = 8  # operations that converting an i8 to float32 costs, fitted to an H200
_X_OPERATIONS = 1.2  # operations to convert and scale an element of x, which all rows of a program share


def by_tokens(tokens: int | None, tiles: Iterable[Tile], fits: Callable[[Tile, int], bool]) -> list[Schedule]:
    """Return the schedules of `tiles` with tokens per program (`rows`) that fit.

    If `tokens` is known, only the largest number of tokens per program that fits with some tile; else, all that fit.
    """
    if tokens is None:
        counts: tuple[int, ...] = (2, 4, MAX_ROWS)
    else:
        counts = (min(tokens, MAX_ROWS), 4, 2, 1)
    schedules: list[Schedule] = []
    for rows in counts:
        schedules += [t._asdict() | {"rows": rows} for t in tiles if fits(t, rows)]
        if schedules and tokens is not None:
            break
    return schedules


class Gemv(TritonKernel):
    """linear and linear_map; fast for 1 to about 4 tokens, correct for any number."""

    measured: ClassVar[tuple[Measured, ...]] = MEASURED

    def reject(self, node: Node, target: Target) -> str | None:
        if why := reject_product(node, target):
            return why
        m = Product(node).m.const
        return f"{m} tokens; the maximum is {MAX_TOKENS}" if m is not None and m > MAX_TOKENS else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Product(node)
        best = nearest(p, self.measured)
        near = sorted((m.tile for m in self.measured), key=lambda t: _distance(t, best))
        tiles = list(dict.fromkeys(_fit(p, t) for t in near))
        return by_tokens(p.m.const, tiles, lambda tile, rows: _fits_registers(p, tile, rows))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = Product(node), schedule
        m = p.tokens(env)
        passes = -(-m // s["rows"])
        moved = (p.bytes(env) + (passes - 1) * p.weight_bytes) / target.bandwidth / _BANDWIDTH_SHARE
        # Operations per weight: a conversion, and per token one product plus its share of converting and scaling x.
        conversion = _I8_OPERATIONS if p.w.dtype == "i8" else 1
        steps = conversion + s["rows"] * (1 + _X_OPERATIONS / (s["bn"] * p.parts))
        arithmetic = passes * p.parts * p.n * p.k * steps * 2 / target.peaks["f32"] / _PEAK_SHARE
        tile = StreamTile(*(s[key] for key in StreamTile._fields))
        distance = _distance(tile, _fit(p, nearest(p, self.measured)))
        slower = (1 + _DISTANCE_SLOWDOWN * distance) * (1 + _PASS_SLOWDOWN * (passes - 1))
        return math.hypot(moved, arithmetic) * 1e6 * slower + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = Product(u.node), u.schedule
        rows, m = s["rows"], p.m.const
        sums = rows * p.parts
        joint = sums > 1 and not u.interpret  # the interpreter would reduce them element by element
        return u.launch(
            Template("gemv", "gemv"),
            (D(-(-p.n // s["bn"])), p.m.ceildiv(rows)),
            s["warps"],
            1,
            (joint_sum(sums) if joint else "", epilogue(u, p)),
            **u.pointers("x_ptr weight_ptr", ""),
            output=output(u, p, rows),
            gain_ptr="x2" if p.first_extra == 3 else None,
            K=p.k,
            PARTS=p.parts,
            ROWS=rows,
            BLOCK_N=s["bn"],
            BLOCK_K=s["bk"],
            AHEAD=min(s["stages"], -(-p.k // s["bk"])),
            EPS=u.node.attrs.get("eps"),
            ONE_BLOCK=m is not None and m <= rows,
            EARLY_WEIGHTS=p.weight_before_wait,
            JOINT_SUM="joint_sum" if joint else None,
        )


def joint_sum(count: int, axis: int = 1) -> str:
    """Generate the function that sums `count` tiles over an axis in one reduction."""
    parameters = [f"{operand}{i}" for operand in "ab" for i in range(count)]
    sums = ", ".join(f"a{i} + b{i}" for i in range(count))
    plus = function(f"add_pairs({', '.join(parameters)})", "Return the sum of each pair.", [f"return {sums}"])
    total = function(
        "joint_sum(tiles)",
        f"Sum the tiles over their {'second' if axis else 'first'} axis, in one pass through shared memory.",
        [f"return tl.reduce(tiles, {axis}, add_pairs)"],
    )
    return f"{plus}\n\n\n{total}"


def nearest(p: Product, measured: Sequence[Measured]) -> StreamTile:
    """Return the measured tile of the weight that is nearest in both sizes, on a logarithmic scale."""
    n, k = math.log2(p.n * p.parts), math.log2(p.k)

    def distance(m: Measured) -> tuple[float, int]:
        return abs(math.log2(m.rows) - n) + abs(math.log2(m.columns) - k), m.rows

    return min(measured, key=distance).tile


def _fit(p: Product, tile: StreamTile) -> StreamTile:
    """Adapt a measured tile to the number of parts, the element size and the depth.

    A thread reads 16 bytes of each row at once, and no two warps read the same columns, so that x is read once per
    program.
    """
    bn, bk, warps, stages = tile
    lanes = 32 * 128 // DTYPES[p.w.dtype].bits
    while warps > 1 and lanes * warps > next_power_of_2(p.k):
        warps //= 2
    bk = min(max(bk, lanes * warps), max(lanes * warps, next_power_of_2(p.k)))
    bn = min(max(1, bn // next_power_of_2(p.parts)), next_power_of_2(p.n))
    return StreamTile(bn, bk, warps, stages if bk < p.k else 1)


def _distance(a: StreamTile, b: StreamTile) -> float:
    """Return the distance of two tiles: the sum of the factors of two between their values."""
    return sum(abs(math.log2(x / y)) for x, y in zip(a, b, strict=True))


def _fits_registers(p: Product, tile: StreamTile, rows: int) -> bool:
    """Whether a thread's float32 sums and the weights that it has loaded ahead fit its registers."""
    bn, bk, warps, stages = tile
    sums = bn * bk * p.parts // (warps * 32)
    return sums * rows <= 128 and sums * rows + stages * sums * DTYPES[p.w.dtype].bits // 32 <= 256


class NormGemv(Gemv):
    """norm_linear; fast for 1 to about 4 tokens, correct for any number.

    Every program sums the squares of its tokens while it reads weights, and divides its sums by the root at the end.
    """

    measured: ClassVar[tuple[Measured, ...]] = NORM_MEASURED


GEMV = Gemv("triton/gemv", ("linear", "linear_map"), preloads=True)
NORM_GEMV = NormGemv("triton/norm_gemv", ("norm_linear",))
