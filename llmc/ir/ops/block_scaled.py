"""Products of quantised activations and weights, with a scale for each group of columns and each tile of the weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.contents import Drawing, Shape, factor, positive
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import Ints, op
from llmc.ir.ops.common import NUMPY
from llmc.ir.ops.linear import epilogue_type, rows_per_part, split_parts
from llmc.ir.ops.pointwise import expr_shape
from llmc.ir.ops.quantize import check_scales
from llmc.ir.ops.quantized_linear import ACTIVATIONS, round_rows
from llmc.ir.scalar import evaluate, parse_expr
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


def _round_groups_types(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    dtype, group = attrs["dtype"], attrs["group"]
    shape = expr_shape(parse_expr(attrs["body"]), [t.shape for t in env["xs"]])
    if dtype not in ACTIVATIONS:
        raise Mismatch(f"dtype={dtype!r} is not one of {', '.join(ACTIVATIONS)}")
    groups = shape[-1].divide(group) if shape and group > 0 else None
    if groups is None:
        raise Mismatch(f"rows of [{', '.join(map(str, shape))}] are not a multiple of group={group}")
    return [Type(dtype, shape), Type("f32", (*shape[:-1], groups))]


@op(
    "(xs*: f[...]) -> f32[]", infer=_round_groups_types, flops="out",
    example={
        "xs": [(3, 12), (12,)], "dtype": "f8e4m3", "group": 4,
        "body": "mul(mul(a0, rsqrt(add(row_mean(mul(a0, a0)), 1e-06))), a1)",
    },
)  # fmt: skip
def round_groups(*xs: Any, body: str, dtype: str, group: int) -> Any:
    """Quantise the rows of `body`, with one scale for each `group` columns (see `round_rows`).

    body: a scalar expression over the broadcast operands a0, a1, ..., as in `fused`; it may reduce whole rows. Results:
    the codes [*b, k] and the scales [*b, k / group].
    """
    with np.errstate(all="ignore"):
        x = np.asarray(evaluate(parse_expr(body), NUMPY, xs))
    return round_rows(x, dtype, group)


def _product_types(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    parts, block = attrs["parts"], attrs["block"]
    n = rows_per_part(env["m"], parts)
    if len(block) != 2 or block[0] < 0 or block[1] <= 0 or env["k"].divide(block[1]) != env["g"]:
        raise Mismatch(f"block={list(block)}: {env['g']} groups of columns do not divide {env['k']} columns")
    check_scales(env["code"], env["scale"], block)
    if DTYPES[attrs["dtype"]].kind != "f":
        raise Mismatch(f"dtype={attrs['dtype']!r} is not a float")
    return epilogue_type(parts, env["extras"], attrs["body"], Type(attrs["dtype"], (*env["*b"], n)))


def small_scales(d: Drawing, shape: Shape) -> Any:
    """Draw scales with which sums of codes stay near 1."""
    return positive(d, shape) / 8


@op(
    "(x: t[*b, k], code: t[m, k], x_scale: f32[*b, g], scale: f32[r, c], extras*: f[...]) -> dtype[...]",
    infer=_product_types, flops="2*b*m*k",
    holds={"x": factor("x"), "code": factor("code"), "x_scale": small_scales, "scale": small_scales},
    example={
        "*b": (3,), "k": 12, "m": 14, "g": 3, "r": 3, "c": 3, "extras": [(3, 7)], "block": [5, 4], "parts": 2,
        "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)", "dtype": "f32",
    },
)  # fmt: skip
def block_scaled_linear(
    x: Any, code: Any, x_scale: Any, scale: Any, *extras: Any, block: Ints, dtype: str, parts: int = 1, body: str = "a0"
) -> Any:
    """linear_map over codes with one scale for each block.

    Row i of x has the scale x_scale[i, j] for its j-th group of block[1] columns. The weight has a scale for each tile
    of block[0] x block[1] codes (0: all rows); the last tile of rows may be partial. The products of each group are
    summed separately, and multiplied by both scales before they are added. parts, body and dtype are as in linear_map.

    This is a separate op because the scales vary along k. An epilogue can apply only scales of whole rows, which are
    constant along k; as operands of linear_map, other scales would affect every pass and kernel that splits, fuses or
    streams products.
    """
    rows, columns = block[0] or code.shape[0], block[1]
    w = code * np.repeat(np.repeat(scale, rows, 0)[: code.shape[0]], columns, 1)
    sums = (x * np.repeat(x_scale, columns, -1)) @ w.T
    return evaluate(parse_expr(body), NUMPY, [*split_parts(sums, parts), *extras])
