"""A norm and the product that reads it as one stream of weight rows, for few tokens: no launch for the norm alone.

Every program sums the squares of its tokens while it streams, and divides its sums by the root in the end.
"""

from __future__ import annotations

from typing import ClassVar

from llmc.codegen.backends.triton.gemv import Gemv, Measured

# As in `gemv`, of norm_linear.
MEASURED: tuple[Measured, ...] = (
    (28672, 4096, (4, 2048, 8, 2)),
    (6144, 4096, (2, 1024, 4, 1)),
    (16384, 2048, (2, 1024, 4, 2)),
    (6144, 1024, (8, 1024, 2, 1)),
)


class NormGemv(Gemv):
    """norm_linear of 1 to about 4 tokens; any number is right."""

    measured: ClassVar[tuple[Measured, ...]] = MEASURED


NORM_GEMV = NormGemv("triton/norm_gemv", ("norm_linear",))
