"""What kernels of products share in all languages: the operands, the tiles of tokens to compare, and packed codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmc.ir.dim import Dim, product
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.packed_codes import OF_CODES
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


def tables(node: Node) -> list[int]:
    """Return the indices of the operands with an entry for each group of columns: scales, and zero points if any.

    Zero points come before the operands of the epilogue, and after the gain of a norm.
    """
    return [2, 3 + int(node.operand("gain") is not None)] if node.attrs["zeros"] else [2]


def product_layouts(node: Node, codes: str) -> dict[int, str]:
    """Return the layouts of a product with the layout op `codes` (as text) and transposed tables."""
    return {1: codes, **dict.fromkeys(tables(node), "transpose{perm=[1, 0]}")}


def pack_product(
    g: Graph, node: Node, layout: OpDef, attrs: Mapping[str, Any], product: OpDef, ops: Mapping[str, OpDef]
) -> None:
    """Replace quantized_linear by the op `product` over codes that `layout` packs and transposed tables.

    `attrs`: of `layout`; `product` has them, too.
    """
    operands = list(node.operands)
    operands[1] = g.add(layout, [operands[1]], dict(attrs), before=node, loc=node.loc).result
    for i in tables(node):
        operands[i] = g.add(ops["transpose"], [operands[i]], {"perm": (1, 0)}, before=node, loc=node.loc).result
    other_attrs = {k: v for k, v in node.attrs.items() if k not in OF_CODES}
    g.replace_op(node, product, operands, {**other_attrs, **attrs})
