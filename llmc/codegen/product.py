"""The operands of a product node, as the problems of all back ends read them, and the tiles of tokens to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llmc.ir.dim import Dim, product
from llmc.ir.graph import Node
from llmc.ir.types import Type


@dataclass(frozen=True)
class ProductNode:
    """A node that multiplies x [*b, k] by a weight of `parts` times n rows, followed by an epilogue."""

    node: Node

    @cached_property
    def parts(self) -> int:
        """The number of row blocks of the weight, each of which gives the epilogue a sum."""
        return int(self.node.attrs.get("parts", 1))

    @property
    def body(self) -> str:
        """The expression of the epilogue: of the sums a0 .. a{parts-1}, then of the extras."""
        return str(self.node.attrs.get("body", "a0"))

    @property
    def x(self) -> Type:
        """The type of the left operand."""
        return self.node.operands[0].type

    @property
    def w(self) -> Type:
        """The type of the weight, packed or not."""
        return self.node.operands[1].type

    @property
    def out(self) -> Type:
        """The type of the result."""
        return self.node.results[0].type

    @property
    def first_extra(self) -> int:
        """The index of the first operand of the epilogue."""
        return 2

    @property
    def extras(self) -> list[Type]:
        """The types of the epilogue's operands besides the sums."""
        return [v.type for v in self.node.operands[self.first_extra :]]

    @property
    def m(self) -> Dim:
        """The number of tokens: the product of the leading axes of x."""
        return product(self.x.shape[:-1])


class ConstantProduct(ProductNode):
    """A product whose weight has constant sizes."""

    @cached_property
    def n(self) -> int:
        """The number of weight rows per part."""
        return int(self.w.shape[0]) // self.parts

    @cached_property
    def k(self) -> int:
        """The number of columns of x and of the weight."""
        return int(self.x.shape[-1])


def sufficient_tile(sizes: Sequence[int], tokens: int) -> int:
    """Return the smallest of the ascending `sizes` that is at least `tokens`, or the largest if none is."""
    return next((size for size in sizes if size >= tokens), sizes[-1])


def tiles_to_try(sizes: Sequence[int], tokens: int | None) -> Sequence[int]:
    """Return the numbers of tokens of a tile to compare: all ascending `sizes` if `tokens` is known only at run time,
    else the smallest sufficient one.
    """
    return sizes if tokens is None else [sufficient_tile(sizes, tokens)]
