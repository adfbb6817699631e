"""A norm and the product that reads it as one stream of weight rows, for few tokens: no launch for the norm alone.

Every program sums the squares of its tokens while it streams, and divides its sums by the root in the end.
"""

from __future__ import annotations

from typing import ClassVar

from llmc.codegen.triton.base import Unit
from llmc.codegen.triton.linear import Product, other
from llmc.codegen.triton.stream import Measured, Stream, Tile

# As in `stream`, of norm_linear.
MEASURED: tuple[Measured, ...] = (
    (28672, 4096, (4, 2048, 8, 2)),
    (6144, 4096, (2, 1024, 4, 1)),
    (16384, 2048, (2, 1024, 4, 2)),
    (6144, 1024, (8, 1024, 2, 1)),
)


class NormStream(Stream):
    """norm_linear of 1 to about 4 tokens; any number is right."""

    measured: ClassVar[tuple[Measured, ...]] = MEASURED

    def tile(self, u: Unit, p: Product, bn: int, bk: int, rows: int) -> Tile:
        return NormTile(u, p, bn, bk, rows)


class NormTile(Tile):
    """One program's text; `e{i}` are sums of squares, column by column."""

    def start(self) -> list[str]:
        zeros = [f"e{i} = tl.zeros([{self.bk}], tl.float32)" for i in range(self.rows)]
        return [*super().start(), "g = x2 + c", *zeros]

    def sums(self, k: str, slot: int) -> list[str]:
        mask = other(self.inside(k))
        return [f"gain = tl.load(g + ({k}){mask}).to(tl.float32)", *super().sums(k, slot)]

    def tokens(self, i: int, loaded: str) -> list[str]:
        return [f"t{i} = {loaded}", f"e{i} += t{i} * t{i}", f"t{i} = t{i} * gain"]

    def scaled(self) -> list[str]:
        eps = self.u.node.attrs["eps"]
        lines = [f"d{i} = tl.rsqrt(tl.sum(e{i}, axis=0) / {self.p.k} + {eps!r})" for i in range(self.rows)]
        return [*lines, *(f"a{i}_{j} = a{i}_{j} * d{i}" for i, j in self.cells)]


NORM_STREAM = NormStream("triton/norm_stream", ("norm_linear",))
