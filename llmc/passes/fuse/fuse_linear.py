"""Fusion of matrix products with slices, epilogues and sibling products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.ir.scalar import E, arg, parse_expr, substitute
from llmc.passes.analysis import const_value, is_pointwise, rounds_little, weight_only
from llmc.passes.base import Ctx, Pass
from llmc.passes.rewrite import hoist

PRODUCTS = ("linear", "linear_map")


@dataclass(frozen=True)
class FuseLinear(Pass):
    """Fuse matrix products with their neighbours.

    A product that is read only through slices is split. A pointwise reader (bias, activation, residual, gate times up)
    becomes the product's epilogue. Products of one operand are merged by concatenating their weights. parts: maximum
    number of row blocks that an epilogue may join. siblings: whether to merge products, which requires slicing the
    result.
    """

    name: ClassVar[str] = "fuse-linear"
    parts: int = 2
    siblings: bool = True

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Fuse the products of a graph; return the number of changes."""
        weights = weight_only(g)
        done = sum(_split(g, n, weights, ctx) for n in list(g.nodes) if n.op.name == "linear")
        done += sum(_absorb(g, n, self.parts, ctx) for n in list(g.nodes) if is_pointwise(n) or n.op.name == "cast")
        return done + (_join_siblings(g, ctx) if self.siblings else 0)


def _split(g: Graph, n: Node, known: set[Value], ctx: Ctx) -> bool:
    """Split a linear that is only read through slices of its last axis: one per slice (phi3's gate and up)."""
    product, (x, weight) = n.result, n.operands
    readers = list(dict.fromkeys(product.uses))
    if not readers or product in g.outputs or weight not in known or not ctx.allows(n):
        return False
    if not all(_slices_columns(reader, product.type.rank) for reader in readers):
        return False
    if weight.type.format is not None and any(_cuts_block(reader, weight) for reader in readers):
        ctx.miss("split", n, "a slice would cut a block of the quantised weight")
        return False
    if not ctx.spend():
        return False
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    parts: dict[tuple[Dim, Dim], Value] = {}  # products by their columns
    for reader in readers:
        start, stop = columns = (reader.attrs["start"], reader.attrs["stop"])
        if columns not in parts:
            parts[columns] = b.linear(x, b.slice(weight, axis=0, start=start, stop=stop))
        g.replace(reader.result, parts[columns])
        g.erase(reader)
    g.erase(n)
    return True


def _slices_columns(n: Node, rank: int) -> bool:
    """Whether a node takes adjacent columns of the last axis of a value of this rank."""
    return n.op.name == "slice" and n.attrs["axis"] % rank == rank - 1 and n.attrs["step"] == 1


def _cuts_block(columns: Node, weight: Value) -> bool:
    """Whether a slice of the product's columns begins or ends inside of a block of the weight's rows."""
    ends = columns.attrs["start"], columns.attrs["stop"]
    return not all(weight.type.whole_blocks(0, end) for end in ends)


def _is_float(v: Value) -> bool:
    return DTYPES[v.type.dtype].kind == "f"


def _absorb(g: Graph, n: Node, limit: int, ctx: Ctx) -> bool:
    """Make pointwise `n` the epilogue of a product that only `n` reads; the product moves to the place of `n`."""
    y = n.results[0]
    if not _is_float(y) or not all(map(_is_float, n.operands)) or not ctx.allows(n):
        return False
    if n.op.name == "cast" and not rounds_little(n):
        return False
    candidates = [v for v in dict.fromkeys(n.operands) if _only_reader(g, v, n)]
    products = [v for v in candidates if v.type.shape == y.type.shape]
    if not products:
        for v in candidates:
            ctx.miss("epilogue", n, f"the product has shape {v.type}, the result {y.type}")
        return False
    group = _together(products, limit)
    if not ctx.spend():
        return False
    _emit(g, n, group, ctx)
    return True


def _only_reader(g: Graph, v: Value, n: Node) -> bool:
    is_product = v.node is not None and v.node.op.name in PRODUCTS
    return is_product and all(u is n for u in v.uses) and v not in g.outputs


def _together(products: Sequence[Value], limit: int) -> list[Value]:
    """Return the first product, and later ones with the same operand and weight type, up to `limit` parts."""
    first = products[0].node
    assert first is not None
    group, used = [products[0]], _parts(first)
    for v in products[1:]:
        node = v.node
        assert node is not None
        same = node.operands[0] is first.operands[0] and _alike(node.operands[1], first.operands[1])
        if same and used + _parts(node) <= limit:
            group.append(v)
            used += _parts(node)
    return group


def _alike(a: Value, b: Value) -> bool:
    """Whether two weights can be concatenated."""
    s, t = a.type, b.type
    whole = s.whole_blocks(0, s.shape[0]) and t.whole_blocks(0, t.shape[0])
    return s.dtype == t.dtype and s.format == t.format and s.shape[1:] == t.shape[1:] and whole


def _parts(n: Node) -> int:
    return int(n.attrs.get("parts", 1))


def _body(n: Node) -> E:
    return parse_expr(n.attrs["body"]) if n.op.name == "linear_map" else arg(0)


def _emit(g: Graph, n: Node, group: Sequence[Value], ctx: Ctx) -> None:
    """Build the fused product in the place of `n`.

    Arguments of its body: first the sums of the products of `group`, one per part, then the extra operands.
    """
    products = [v.node for v in group if v.node is not None]
    parts = sum(map(_parts, products))
    extras: list[Value] = []
    body = _fused_body(n, dict(zip(group, products, strict=True)), extras, parts)
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    weights = [product.operands[1] for product in products]
    weight = weights[0] if len(weights) == 1 else b.concat(*weights, axis=0)
    x, result = products[0].operands[0], n.results[0]
    dtype = "" if result.type.dtype == x.type.dtype else result.type.dtype
    out = b.linear_map(x, weight, *extras, parts=parts, body=str(body), dtype=dtype)
    g.replace_node(n, out)
    for product in products:
        g.erase(product)


def _fused_body(n: Node, products: Mapping[Value, Node], extras: list[Value], parts: int) -> E:
    """Return the body that computes `n` from the sums of `products`; its extra operands are appended to `extras`."""
    exprs: dict[Value, E] = {}  # operand of `n` -> its value as an expression of the body's arguments
    first_part = 0
    for v, product in products.items():
        sums = [arg(first_part + i) for i in range(_parts(product))]
        exprs[v] = substitute(_body(product), [*sums, *(_extra(e, extras, parts) for e in product.operands[2:])])
        first_part += _parts(product)
    for v in n.operands:
        if v not in exprs:
            value = const_value(v)
            exprs[v] = _extra(v, extras, parts) if value is None else E("const", (value,))
    scalar = n.op.scalar(n.attrs) if n.op.scalar else arg(0)  # a cast is the identity
    return substitute(scalar, [exprs[v] for v in n.operands])


def _extra(v: Value, extras: list[Value], parts: int) -> E:
    """Return the body's argument for an extra operand, which is appended to `extras` when it is first used."""
    if v not in extras:
        extras.append(v)
    return arg(parts + extras.index(v))


def _join_siblings(g: Graph, ctx: Ctx) -> int:
    """Merge products of one operand with equal epilogues over weights; return the number of merged products."""
    known = weight_only(g)
    groups: dict[object, list[Node]] = {}
    for n in g.nodes:
        if n.op.name in PRODUCTS and _joinable(n, known) and ctx.allows(n):
            x, w = n.operands[:2]
            key = (x, w.type.dtype, w.type.format, n.results[0].type.dtype, str(_body(n)), len(n.operands))
            groups.setdefault(key, []).append(n)
    done = 0
    for nodes in groups.values():
        if len(nodes) > 1 and ctx.spend():
            _join(g, nodes, ctx)
            done += 1
    return done


def _joinable(n: Node, known: set[Value]) -> bool:
    """Whether concatenating weights is valid: one part, and all extras are weight vectors over the last axis."""
    columns = n.results[0].type.shape[-1:]
    return (
        _parts(n) == 1
        and all(e in known for e in n.operands[1:])
        and all(e.type.shape == columns for e in n.operands[2:])
        and n.operands[1].type.whole_blocks(0, n.operands[1].type.shape[0])
    )


def _join(g: Graph, nodes: Sequence[Node], ctx: Ctx) -> None:
    """Replace sibling products by one product over concatenated weights, and slices of its result."""
    first = nodes[0]
    hoist(g, [v for n in nodes for v in n.operands[1:]], first)
    b = Builder(g, ctx.opset, before=first, loc=first.loc)
    columns = [b.concat(*(n.operands[i] for n in nodes), axis=0) for i in range(1, len(first.operands))]
    out = b.emit(first.op, [first.operands[0], *columns], first.attrs)
    start = Dim.of(0)
    for n in nodes:
        stop = start + n.results[0].type.shape[-1]
        part = Builder(g, ctx.opset, before=first, loc=n.loc).slice(out, axis=out.type.rank - 1, start=start, stop=stop)
        part.name = n.results[0].name
        g.replace(n.results[0], part)
        start = stop
    for n in nodes:
        g.erase(n)
