"""Packing the codes of quantized_linear for kernels that read them in another order: the layouts, and the new node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.packed_codes import OF_CODES


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
