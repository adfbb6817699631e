"""Separates products that the checkpoint fuses (queries, keys and values; gate and up), so that each divides."""

from __future__ import annotations

from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.passes.base import Ctx


def separate(g: Graph, ctx: Ctx) -> int:
    """Compute slices of a product, biased or not, as products with slices of the weight; return the number of slices.

    A product that has other readers stays unchanged.
    """
    done = 0
    for node in list(g.nodes):
        product_and_bias = _product_of(node) if node.op.name == "slice" and ctx.allows(node) else None
        if product_and_bias is None:
            continue
        product, bias = product_and_bias
        b = Builder(g, ctx.opset, before=node, loc=product.loc)
        x, weight = product.operands
        cut = {name: node.attrs[name] for name in ("start", "stop", "step")}
        part: Value = b.linear(x, b.slice(weight, axis=0, **cut))
        if bias is not None:
            part = b.add(part, b.slice(bias, axis=0, **cut))
        part.name = node.result.name
        g.replace(node.result, part)
        done += 1
    for node in reversed(list(g.nodes)) if done else ():
        if node.op.name in ("slice", "add", "linear") and not g.is_used(node):
            g.erase(node)
    return done


def _product_of(n: Node) -> tuple[Node, Value | None] | None:
    """Return the product and the bias that a slice of columns reads, if all readers are such slices."""
    v, bias = n.operands[0], None
    if n.attrs["axis"] % v.type.rank != v.type.rank - 1 or not _only_slices(v):
        return None
    if v.node is not None and v.node.op.name == "add":
        biased = v.node
        x, bias = biased.operands
        if bias.type.rank != 1:
            x, bias = bias, x
        if bias.type.rank != 1 or bias.type.shape != v.type.shape[-1:] or set(x.uses) != {biased}:
            return None
        v = x
    product = v.node
    if product is None or product.op.name != "linear" or product.result.type.dtype != n.result.type.dtype:
        return None
    return product, bias


def _only_slices(v: Value) -> bool:
    last = v.type.rank - 1
    return all(n.op.name == "slice" and n.attrs["axis"] % (last + 1) == last for n in v.uses)
