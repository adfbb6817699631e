"""Products with quantised weights whose parts are separate operands, which the pass `lower-quantized` emits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.contents import Content, integers, positive
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import Ints, op
from llmc.ir.ops.common import NUMPY
from llmc.ir.ops.linear import epilogue_type, rows_per_part, split_parts
from llmc.ir.ops.quantize import FLOAT_CODES, check_scales, dequantize
from llmc.ir.qformat import QFormat
from llmc.ir.scalar import evaluate, parse_expr
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

# Dtypes to which activations may be rounded, and the largest value of each.
ACTIVATIONS: Mapping[str, float] = MappingProxyType(
    {"i8": 127.0, **{dtype: FLOAT_CODES[dtype] for dtype in ("f8e4m3", "f8e4m3fnuz")}}
)


def multiplies_codes(f: QFormat) -> bool:
    """Whether products may multiply codes of activations and weights: one scale per row, no zero points."""
    return f.act == f.code in ACTIVATIONS and f.block == (1, 0) and not f.zero and not f.table


def multiplies_tiles(f: QFormat) -> bool:
    """Whether products may multiply codes of activations and weights in blocks of columns; no zero points."""
    return f.act == f.code in ACTIVATIONS and f.block[1] > 0 and not f.zero and not f.table


def round_rows(x: Any, dtype: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise the rows of x [*b, k]: return (codes as float32 [*b, k], scales float32 [*b, blocks]).

    Each `block` columns of a row (0: all of them) share the scale max|x| / L, where L is the largest value of dtype.
    Codes are x * (L / max|x|) in float32, rounded to nearest even; a block of zeros has the scale 0 and codes 0.
    """
    limit = np.float32(ACTIVATIONS[dtype])
    x = np.asarray(x, np.float32)
    k = x.shape[-1]
    size = block or k
    blocks = -(-k // size)
    padded = np.zeros((*x.shape[:-1], blocks * size), np.float32)
    padded[..., :k] = x
    padded = padded.reshape(*x.shape[:-1], blocks, size)
    largest = np.abs(padded).max(-1, initial=0)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, limit / largest, np.float32(0))
    codes = padded * inverse[..., None]
    codes = np.rint(codes) if DTYPES[dtype].kind == "i" else codes.astype(DTYPES[dtype].np).astype(np.float32)
    return codes.reshape(*x.shape[:-1], -1)[..., :k], largest / limit


def rounded(x: Any, dtype: str, block: int) -> Any:
    """Return the values of x [*b, k] after `round_rows`, in x's precision."""
    codes, scales = round_rows(x, dtype, block)
    spread = np.repeat(scales, block or codes.shape[-1], -1)[..., : codes.shape[-1]]
    return codes.astype(np.asarray(x).dtype) * spread


def _type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    code, extras = env["code"], list(env["extras"])
    parts, act = attrs["parts"], attrs.get("act")
    n = rows_per_part(env["m"], parts)
    if not 1 <= attrs["bits"] <= 8 or (attrs["bits"] < 8 and code.dtype != "u8"):
        raise Mismatch(f"bits={attrs['bits']}: {code} has 8, or if it is u8, from 1 to 8")
    if act and act not in ACTIVATIONS:
        raise Mismatch(f"act={act!r} is not one of {', '.join(ACTIVATIONS)}")
    check_scales(code, env["scale"], attrs["block"])
    return result_type(env, attrs, extras, n)


def result_type(env: dict[str, Any], attrs: Mapping[str, Any], extras: list[Type], n: Dim) -> list[Type]:
    """Infer the result [*b, n] of a quantised product. With `zeros`, the first of `extras` are the zero points."""
    scale = env["scale"]
    if attrs["zeros"]:
        if not extras or extras[0].shape != scale.shape:
            raise Mismatch(f"zeros: the zero points are the first of the extras, of the shape of {scale}")
        extras = extras[1:]
    return epilogue_type(attrs["parts"], extras, attrs["body"], Type(attrs["dtype"] or env["x"].dtype, (*env["*b"], n)))


def zeros_and_others(rank: int) -> Content:
    """Declare the extras of a quantised product: zero points, which have this rank, and any other operands."""
    return lambda d, shape: d.rng.integers(0, 16, shape) if len(shape) == rank else d.rng.standard_normal(shape)


draw_extras = zeros_and_others(2)


@op(
    "(x: f[*b, k], code: t[m, k], scale: f[r, c], extras*: t[...]) -> x[...]", infer=_type, flops="2*b*m*k",
    holds={"code": integers(0, 16), "scale": positive, "extras": draw_extras},
    example={
        "*b": (3,), "k": 10, "m": 14, "r": 14, "c": 3, "code": "u8", "extras": [(14, 3), (7,)], "block": [1, 4],
        "zeros": True, "parts": 2, "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)",
    },
)  # fmt: skip
def quantized_linear(
    x: Any, code: Any, scale: Any, *extras: Any, block: Ints, zero_point: int = 0, zeros: bool = False, act: str = "",
    act_block: int = 0, parts: int = 1, body: str = "a0", dtype: str = "", bits: int = 8,
) -> Any:  # fmt: skip
    """linear_map over the weight dequantize(code, scale, zero): (code - zero) * scale, a scale for each block.

    zero_point: the zero point of all blocks; zeros: zero points are the first of the extras, one for each scale. Codes
    are u8, i8, f8e4m3 or f8e4m3fnuz; bits: of a code, below 8 for u8 codes (and zero points) below 2 ** bits. act: the
    dtype to which the rows of x are rounded first, each `act_block` columns by a scale of their own (see `round_rows`);
    "" leaves x unchanged. parts, body and dtype are as in linear_map.
    """
    zero, extras = (extras[0], extras[1:]) if zeros else (None, extras)
    w = dequantize.ref(code, scale, zero, block=block, dtype="f32", zero_point=zero_point)
    if act:
        x = rounded(x, act, act_block)
    return evaluate(parse_expr(body), NUMPY, [*split_parts(x @ w.T, parts), *extras])


def normed(x: Any, gain: Any, eps: float) -> Any:
    """rms_norm(x, gain) without rounding: x [*b, k], gain [k]."""
    return x * gain / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


@op(
    "(x: f[*b, k], code: t[m, k], scale: f[r, c], gain: f[k], extras*: t[...]) -> x[...]", infer=_type,
    flops="2*b*m*k + 4*b*k", holds={"code": integers(0, 16), "scale": positive, "extras": draw_extras},
    attrs_of=quantized_linear, without=("act", "act_block"),
    example={
        "*b": (3,), "k": 10, "m": 14, "r": 14, "c": 3, "code": "u8", "extras": [(14, 3), (7,)], "block": [1, 4],
        "zeros": True, "parts": 2, "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)", "eps": 1e-5,
    },
)  # fmt: skip
def norm_quantized_linear(x: Any, code: Any, scale: Any, gain: Any, *extras: Any, eps: float, **attrs: Any) -> Any:
    """quantized_linear of rms_norm(x, gain), with the norm unrounded and activations that are not rounded to codes."""
    return quantized_linear.ref(normed(x, gain, eps), code, scale, *extras, **attrs)
