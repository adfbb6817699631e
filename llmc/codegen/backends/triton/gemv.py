"""Products of few tokens as streams of weight rows, multiplied in float32 registers; no tensor cores here.

A program owns `bn` rows of every part and all the tokens of its block. It loads its first weight tiles before it waits
for the launches in front of it, and reduces once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from llmc.codegen.backends.triton.linear_problem import Product, epilogue, extra_operands, refuse
from llmc.codegen.backends.triton.template import Template, function
from llmc.codegen.backends.triton.tiling import power
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.targets.target import Target

Shape = tuple[int, int, int, int]  # bn, bk, warps, stages
Measured = tuple[int, int, Shape]
MAX_ROWS = 8  # tokens of one program
MOST = 16  # tokens beyond which the weights would be read again and again
# Rows of all parts x columns -> the fastest (bn of all parts, bk, warps, stages) of bf16 streams measured on an H200.
MEASURED: tuple[Measured, ...] = (
    (6144, 4096, (2, 2048, 8, 2)),
    (4096, 4096, (2, 2048, 8, 2)),
    (28672, 4096, (2, 2048, 4, 1)),
    (4096, 14336, (2, 2048, 8, 2)),
    (3072, 2048, (2, 1024, 4, 2)),
    (2048, 2048, (4, 2048, 2, 2)),
    (16384, 2048, (2, 1024, 4, 2)),
    (2048, 8192, (2, 2048, 8, 2)),
    (4096, 1024, (8, 1024, 2, 2)),
    (1024, 2048, (4, 2048, 2, 1)),
    (6144, 1024, (4, 512, 4, 1)),
    (1024, 3072, (2, 1024, 4, 1)),
)
# The same of norm_linear.
NORM_MEASURED: tuple[Measured, ...] = (
    (28672, 4096, (4, 2048, 8, 2)),
    (6144, 4096, (2, 1024, 4, 1)),
    (16384, 2048, (2, 1024, 4, 2)),
    (6144, 1024, (8, 1024, 2, 1)),
)
_KEYS = ("bn", "bk", "warps", "stages")
_READ = 0.96  # of the bandwidth that the best of these schedules reach


class Gemv(TritonKernel):
    """linear and linear_map of 1 to about 4 tokens; any number is right."""

    measured: ClassVar[tuple[Measured, ...]] = MEASURED

    def reject(self, node: Node, target: Target) -> str | None:
        if why := refuse(node):
            return why
        m = Product.of(node).m.const
        return f"{m} tokens; gemv takes at most {MOST}" if m is not None and m > MOST else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Product.of(node)
        best = nearest(p, self.measured)
        near = sorted((r[2] for r in self.measured), key=lambda s: _distance(s, best))
        shapes = list(dict.fromkeys(_fit(p, s) for s in near))
        m = p.m.const
        counts = (2, 4, MAX_ROWS) if m is None else (min(m, MAX_ROWS), 4, 2, 1)
        found = [[dict(zip(_KEYS, s, strict=True)) | {"rows": r} for s in shapes if _holds(p, s, r)] for r in counts]
        return [x for some in found for x in some] if m is None else next(filter(None, found))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, s = Product.of(node), schedule
        m = p.tokens(env)
        passes = -(-m // s["rows"])
        moved = (p.bytes(env) + (passes - 1) * p.weight_bytes) / target.bandwidth / _READ
        # A weight is converted once; a token's element, too, and then multiplied with the weights of all rows.
        steps = 1 + s["rows"] * (1 + 1.2 / (s["bn"] * p.parts))
        arithmetic = passes * p.parts * p.n * p.k * steps * 2 / target.peaks["f32"] / 0.85
        far = _distance(tuple(s[k] for k in _KEYS), _fit(p, nearest(p, self.measured)))
        return math.hypot(moved, arithmetic) * 1e6 * (1 + 0.02 * far) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, s = Product.of(u.node), u.schedule
        rows, m = s["rows"], p.m.const
        sums = rows * p.parts
        tokens = u.sizes(p.m)
        joint = sums > 1 and not u.interpret  # which would add such sums element by element
        return u.launch(
            Template("gemv", "gemv"),
            (D(-(-p.n // s["bn"])), p.m.ceildiv(rows)),
            s["warps"],
            1,
            (joint_sum(sums) if joint else "", epilogue(u, p)),
            **u.pointers("x_ptr weight_ptr", "out_ptr"),
            M=tokens,
            gain_ptr="x2" if p.first == 3 else None,
            extra_ptrs=extra_operands(u, p),
            N=p.n,
            K=p.k,
            PARTS=p.parts,
            ROWS=rows,
            BLOCK_N=s["bn"],
            BLOCK_K=s["bk"],
            AHEAD=min(s["stages"], -(-p.k // s["bk"])),
            EPS=u.node.attrs.get("eps"),
            ONE_BLOCK=m is not None and m <= rows,
            WHOLE_M=m is not None and m % rows == 0,
            EARLY_WEIGHTS=p.early,
            JOINT_SUM="joint_sum" if joint else None,
            LOAD_EXTRAS="load_extras",
            EPILOGUE="epilogue",
        )


def joint_sum(count: int) -> str:
    """The generated function that sums `count` tiles over their second axis at once."""
    a, b = ([f"{x}{i}" for i in range(count)] for x in "ab")
    sums = ", ".join(f"{x} + {y}" for x, y in zip(a, b, strict=True))
    plus = function(f"add_pairs({', '.join([*a, *b])})", "The sum of each pair.", [f"return {sums}"])
    total = function(
        "joint_sum(tiles)",
        "The sums of the tiles over their second axis, in one trip through shared memory.",
        ["return tl.reduce(tiles, 1, add_pairs)"],
    )
    return f"{plus}\n\n\n{total}"


def nearest(p: Product, measured: Sequence[Measured]) -> Shape:
    """The measured schedule of the shape that is nearest in size and form."""
    n, k = math.log2(p.n * p.parts), math.log2(p.k)
    return min(measured, key=lambda r: (abs(math.log2(r[0]) - n) + abs(math.log2(r[1]) - k), r[0]))[2]


def _fit(p: Product, s: Shape) -> Shape:
    """A measured schedule with its rows dealt to the parts, for this width of an element and this depth.

    A thread reads 16 bytes of each row at once and no two warps read the same columns, so x is read once a program."""
    bn, bk, warps, stages = s
    lanes = 32 * 128 // DTYPES[p.w.dtype].bits
    while warps > 1 and lanes * warps > power(p.k):
        warps //= 2
    bk = min(max(bk, lanes * warps), max(lanes * warps, power(p.k)))
    return min(max(1, bn // power(p.parts)), power(p.n)), bk, warps, stages if bk < p.k else 1


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """How many factors of two lie between two schedules."""
    return sum(abs(math.log2(x / y)) for x, y in zip(a, b, strict=True))


def _holds(p: Product, s: Shape, rows: int) -> bool:
    """True where the float32 sums of a thread, and the weights on their way to it, fit its registers."""
    bn, bk, warps, stages = s
    each = bn * bk * p.parts // (warps * 32)
    return each * rows <= 128 and each * rows + stages * each * DTYPES[p.w.dtype].bits // 32 <= 256


class NormGemv(Gemv):
    """norm_linear of 1 to about 4 tokens; any number is right. The norm takes no launch of its own: every program sums
    the squares of its tokens while it reads weights, and divides its sums by the root at the end."""

    measured: ClassVar[tuple[Measured, ...]] = NORM_MEASURED


GEMV = Gemv("triton/gemv", ("linear", "linear_map"))
NORM_GEMV = NormGemv("triton/norm_gemv", ("norm_linear",))
