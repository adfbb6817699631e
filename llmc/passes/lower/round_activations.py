"""Quantises the activations of products to the dtype of the weight's codes, so that codes are multiplied by codes.

Scales are computed from the largest element when a row is rounded (dynamic quantisation): one for each row, which the
product's epilogue applies together with those of the weight's rows, or one for each group of columns, if the weight has
scales of blocks with the same number of columns (block_scaled_linear). A norm before the product rounds its own result.
"""

from __future__ import annotations

from typing import Any

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.ir.ops.quantized_linear import ACTIVATIONS
from llmc.ir.scalar import E, arg, call, parse_expr, substitute
from llmc.passes.base import Ctx
from llmc.passes.fuse.fuse_linear import PRODUCTS
from llmc.passes.fuse.fuse_pointwise import expression

MIN_MAXIMUM = 1e-30  # a row whose largest element is smaller has codes of 0


def rounding(dtype: str, x: E) -> tuple[E, E]:
    """Return the codes and the scale of the row x, as expressions.

    Codes of i8 are rounded to nearest, halves up; those of floats are rounded when they are stored.
    """
    largest = call("row_max", call("abs", x))
    codes = x * (ACTIVATIONS[dtype] / call("max", largest, MIN_MAXIMUM))
    if DTYPES[dtype].kind == "i":
        codes = call("floor", codes + 0.5)
    return codes, largest * (1.0 / ACTIVATIONS[dtype])


class Rounded:
    """The rounded activations of a graph, each made once."""

    def __init__(self, g: Graph, ctx: Ctx) -> None:
        self.g, self.ctx = g, ctx
        self.known: dict[tuple[Value, str, int], tuple[Value, Value]] = {}

    def of(self, x: Value, dtype: str, group: int, before: Node) -> tuple[Value, Value]:
        """Return the codes of x [*b, k] and the scales of groups of columns, f32 [*b, k / group]; 0: of whole rows."""
        key = x, dtype, group
        if key not in self.known:
            expr, operands = self._source(x)
            b: Any = Builder(self.g, self.ctx.opset, before=before, loc=before.loc)
            if group:
                codes, scale = b.round_groups(*operands, body=str(expr), dtype=dtype, group=group)
            else:
                bodies = [str(e) for e in rounding(dtype, expr)]
                codes, scale = b.fused(*operands, body=bodies, dtypes=[dtype, "f32"])
            codes.name, scale.name = f"{x.name}.codes", f"{x.name}.scale"
            self.known[key] = codes, scale
        return self.known[key]

    def drop(self, codes: Value) -> None:
        """Remove codes and their scales if no product reads them."""
        if codes.node is not None and not self.g.is_used(codes.node):
            self.known = {key: rounded for key, rounded in self.known.items() if rounded[0] is not codes}
            self.g.erase(codes.node)

    def _source(self, x: Value) -> tuple[E, list[Value]]:
        """Return x as an expression over values: the norm that computes x, if only products read x; otherwise x."""
        n, shape = x.node, x.type.shape
        e = expression(n) if n is not None and all(u.op.name in PRODUCTS for u in x.uses) else None
        if n is None or e is None or x in self.g.outputs:
            return arg(0), [x]
        wide = any(v.type.shape == shape for v in n.operands)
        fits = all(DTYPES[v.type.dtype].kind == "f" and v.type.rank <= len(shape) for v in n.operands)
        return (e, list(n.operands)) if wide and fits else (arg(0), [x])


def product_of_codes(b: Any, n: Node, factors: tuple[Value, Value], weight_scale: Value, row_scale: Value) -> Value:
    """Emit the product `n` over the codes of x and of the weight, with their scales in the epilogue.

    weight_scale: [parts * n, 1]. row_scale: [*b, 1].
    """
    parts, extras = n.attrs.get("parts", 1), n.operands[2:]
    rows = weight_scale.type.shape[0].divide(parts)
    assert rows is not None
    scales = [_part(b, weight_scale, rows, i, parts) for i in range(parts)]
    sums = [arg(i) * arg(parts + i) * arg(2 * parts) for i in range(parts)]
    others = [arg(2 * parts + 1 + i) for i in range(len(extras))]
    body = substitute(parse_expr(n.attrs.get("body", "a0")), [*sums, *others])
    dtype = n.attrs.get("dtype", "") or n.result.type.dtype
    return b.linear_map(*factors, *scales, row_scale, *extras, parts=parts, body=str(body), dtype=dtype)


def product_of_tiles(
    b: Any, n: Node, factors: tuple[Value, Value], scales: tuple[Value, Value], block: tuple[int, int]
) -> Value:
    """Emit the product `n` over the codes of x and of the weight, which has a scale for each block.

    scales: f32 [*b, groups] of x, and those of the weight, [blocks of rows, groups].
    """
    x_scale, scale = scales[0], _float32(b, scales[1])
    return b.block_scaled_linear(
        *factors, x_scale, scale, *n.operands[2:], block=block, parts=n.attrs.get("parts", 1),
        body=n.attrs.get("body", "a0"), dtype=n.attrs.get("dtype", "") or n.result.type.dtype,
    )  # fmt: skip


def product_of_experts(
    b: Any, n: Node, factors: tuple[Value, Value], scales: tuple[Value, Value], block: tuple[int, int]
) -> Value:
    """Emit the product of experts `n` over the codes of its rows and of the stack, which has a scale for each block.

    scales: f32 [rows, groups] of the rows, and those of the stack, [experts, blocks of rows, groups].
    """
    codes, stack = factors
    operands = codes, *n.operands[1:3], stack, _float32(b, scales[1]), scales[0], *n.operands[4:]
    if n.op.name == "moe_up":
        return b.scaled_moe_up(*operands, block=block, dtype=n.result.type.dtype, **n.attrs)
    return b.scaled_moe_down(*operands, block=block, **n.attrs)


def _float32(b: Any, scale: Value) -> Value:
    """Return scales in float32."""
    return scale if scale.type.dtype == "f32" else b.cast(scale, dtype="f32")


def _part(b: Any, scale: Value, rows: Dim, part: int, parts: int) -> Value:
    """Return the scales of one part, f32 [rows]."""
    if parts > 1:
        scale = b.slice(scale, axis=0, start=rows * part, stop=rows * (part + 1))
    return _float32(b, b.reshape(scale, shape=(rows,)))
