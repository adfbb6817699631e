"""The operands of a product node, as the problems of all back ends read them."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.ir.dim import Dim, product
from llmc.ir.graph import Node
from llmc.ir.types import Type


@dataclass(frozen=True)
class ProductNode:
    """A node that multiplies x [*b, k] by a weight of `parts` times n rows, followed by an epilogue."""

    node: Node
    parts: int

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
