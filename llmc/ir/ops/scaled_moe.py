"""Expert products of quantised activations and quantised weights.

`scaled_moe_up` and `scaled_moe_down` correspond to `quantized_moe_up` and `quantized_moe_down` as `block_scaled_linear`
does to `quantized_linear`. The pass `lower-quantized` quantises the activations: a row per token before the first
product, and a row per token and expert before the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.contents import factor, probability
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import Ints, op
from llmc.ir.ops.block_scaled import small_scales
from llmc.ir.ops.moe import SWIGLU, checked, down_type, drawn_order, drawn_starts, moe_down, moe_up, up_type
from llmc.ir.ops.quantize import check_scales, dequantize
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


def _check_scales(env: dict[str, Any], attrs: Mapping[str, Any], columns: Dim) -> None:
    """Raise Mismatch unless both tables of scales agree with the codes and with the attribute `block`."""
    code, scale, x_scale, block = env["code"], env["scale"], env["x_scale"], attrs["block"]
    check_scales(code, scale, block)
    if block[1] and columns.divide(block[1]) is None:
        raise Mismatch(f"block={list(block)}: {columns} columns are not a multiple of {block[1]}")
    if x_scale.shape[1] != scale.shape[2]:
        raise Mismatch(f"{scale} and {x_scale} have different numbers of groups of columns")


def _up_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if DTYPES[attrs["dtype"]].kind != "f":
        raise Mismatch(f"dtype={attrs['dtype']!r} is not a float")
    return [Type(attrs["dtype"], t.shape) for t in up_type(env, attrs)]


def _values(x: Any, x_scale: Any, block: tuple[int, ...]) -> Any:
    """Return the rows that the codes stand for."""
    return x * np.repeat(x_scale, block[1] or x.shape[1], 1)


@op(
    "(x: t[t, d], order: i[p], starts: i[s], code: t[e, m, d], scale: f[e, r, g], x_scale: f32[t, h], bias?: f[e, m])"
    " -> dtype[...]",
    infer=checked(_check_scales, _up_type, "d"), flops="2*p*m*d",
    holds={
        "x": factor("x"), "order": drawn_order, "starts": drawn_starts, "code": factor("code"), "scale": small_scales,
        "x_scale": small_scales,
    },
    example={
        "t": 7, "d": 12, "p": 14, "s": 7, "e": 6, "m": 10, "r": 2, "g": 3, "h": 3, "k": 2, "block": [5, 4],
        "dtype": "f32",
    },
)  # fmt: skip
def scaled_moe_up(
    x: Any, order: Any, starts: Any, code: Any, scale: Any, x_scale: Any, bias: Any = None, *, k: int, block: Ints,
    dtype: str, body: str = SWIGLU,
) -> Any:  # fmt: skip
    """moe_up of the rows x * x_scale over the stack dequantize(code, scale).

    Row i of x has the scale x_scale[i, j] for its j-th group of block[1] columns (0: of all columns), and each expert a
    scale for each tile of block[0] x block[1] codes. dtype: of the result.
    """
    w = dequantize.ref(code, scale, None, block=block, dtype="f32")
    return moe_up.ref(_values(x, x_scale, block), order, starts, w, bias, k=k, body=body)


@op(
    "(h: t[p, i], order: i[p], starts: i[s], code: t[e, d, i], scale: f[e, r, g], x_scale: f32[p, c], weights: f[t, k],"
    " bias?: f[e, d]) -> weights[...]",
    infer=checked(_check_scales, down_type, "i"), flops="2*p*d*i",
    holds={
        "h": factor("h"), "order": drawn_order, "starts": drawn_starts, "code": factor("code"), "scale": small_scales,
        "x_scale": small_scales, "weights": probability,
    },
    example={
        "p": 14, "i": 11, "s": 7, "e": 6, "d": 8, "r": 8, "g": 1, "c": 1, "t": 7, "k": 2, "h": "i8", "code": "i8",
        "block": [1, 0],
    },
)  # fmt: skip
def scaled_moe_down(
    h: Any, order: Any, starts: Any, code: Any, scale: Any, x_scale: Any, weights: Any, bias: Any = None, *,
    block: Ints, dtype: str = "",
) -> Any:  # fmt: skip
    """moe_down of the rows h * x_scale over the stack dequantize(code, scale); as in scaled_moe_up.

    dtype: of the result, f32 by default.
    """
    w = dequantize.ref(code, scale, None, block=block, dtype="f32")
    return moe_down.ref(_values(h, x_scale, block), order, starts, w, weights, bias)
