"""Expert products over quantised stacks of weights, whose parts are separate operands (see `lower-quantized`).

A stack has one operand for the codes of all experts, one for the scales, and one for the zero points if there is one
for each scale. If `half` is not 0, codes of 4 bits are packed by `pack_nibbles` with the same `half`, and the last two
axes of scales and zero points are transposed.

`scaled_moe_up` and `scaled_moe_down` multiply rows of activations that are codes, too, as `block_scaled_linear` does:
`lower-quantized` quantises a row per token before the first product, and a row per token and expert before the second.

`fragments_moe_up` and `fragments_moe_down` read codes of 4 bits in the order in which Hopper's warpgroups multiply
them, as `packed_fragments_linear` does. The tables of scales and of zero points are transposed. In the first product's
stack, gate and up alternate in groups of eight rows: a thread of a warpgroup has two rows that are eight apart, which
are the gate and the up value of one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.contents import Drawing, Shape, factor, integers, positive, probability
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import Ints, op
from llmc.ir.ops.block_scaled import small_scales
from llmc.ir.ops.moe import SWIGLU, checked, down_type, drawn_order, drawn_starts, moe_down, moe_up, up_type
from llmc.ir.ops.packed_codes import BLOCK, nibble_bytes, unpack_fragments, unpack_nibbles
from llmc.ir.ops.quantize import VALUES, check_scales, dequantize
from llmc.ir.ops.quantized_linear import ACTIVATIONS, rounded, zeros_and_others
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

EIGHT = 8  # rows of a part that follow each other in the first stack of fragments
OF_CODES = ("half", "bits", "act", "act_block")  # attributes of quantized_moe_up that fragments_moe_up lacks


def _check_stack(env: dict[str, Any], attrs: Mapping[str, Any], columns: Dim) -> None:
    """Raise Mismatch unless codes, scales, zero points and bias agree with each other and with the attributes."""
    code, scale, extras, half = env["code"], env["scale"], list(env["extras"]), attrs["half"]
    if code.shape[2] != (nibble_bytes(columns, half) if half else columns):
        raise Mismatch(f"{code} does not contain rows of {columns} codes")
    bits = attrs["bits"]
    if half and (bits != 4 or code.dtype != "u8"):
        raise Mismatch(f"half={half}: codes of 4 bits are packed into u8, not codes of {bits} bits into {code.dtype}")
    if not 1 <= bits <= 8 or (bits < 8 and code.dtype != "u8"):
        raise Mismatch(f"bits={bits}: {code} has 8, or if it is u8, from 1 to 8")
    if attrs["values"] and attrs["values"] not in VALUES:
        raise Mismatch(f"values={attrs['values']!r} is not one of {', '.join(VALUES)}")
    if attrs["act"] and attrs["act"] not in ACTIVATIONS:
        raise Mismatch(f"act={attrs['act']!r} is not one of {', '.join(ACTIVATIONS)}")
    e, r, c = scale.shape
    check_scales(
        code.with_shape(*code.shape[:2], columns), scale.with_shape(e, c, r) if half else scale, attrs["block"]
    )
    check_extras(code, scale, extras, attrs["zeros"])


def check_extras(code: Type, scale: Type, extras: list[Type], zeros: bool) -> None:
    """Raise Mismatch unless the extras are the zero points, if there are any, and at most a bias.

    Zero points have the shape of the scales, and a bias has a float for each row of the codes.
    """
    if zeros and (not extras or extras[0].shape != scale.shape):
        raise Mismatch(f"zeros: the zero points are the first of the extras, of the shape of {scale}")
    bias = extras[int(zeros) :]
    if len(bias) > 1 or (bias and (DTYPES[bias[0].dtype].kind != "f" or bias[0].shape != code.shape[:2])):
        raise Mismatch(f"{', '.join(map(str, bias))}: a bias has a float for each row of {code}")


def _codes(d: Drawing, shape: Shape) -> Any:
    """Draw codes of `bits` bits, bytes with two codes, or small floats."""
    if DTYPES[d.dtypes["code"]].kind == "f":
        return d.rng.standard_normal(shape)
    if d.dtypes["code"] == "i8":
        return d.rng.integers(-127, 128, shape)
    return d.rng.integers(0, 256 if d.attrs["half"] else 1 << d.attrs["bits"], shape)


draw_stack_extras = zeros_and_others(3)


def _stack(code: Any, scale: Any, extras: tuple[Any, ...], attrs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the dequantised weights [experts, rows, columns], and the bias or None."""
    entries = [scale, *extras[: int(attrs["zeros"])]]
    if attrs["half"]:
        code, entries = unpack_nibbles(code, attrs["half"]), [np.swapaxes(e, 1, 2) for e in entries]
    options = {name: attrs[name] for name in ("block", "zero_point", "values")}
    return dequantize.ref(code, *entries, dtype="f32", **options), next(iter(extras[int(attrs["zeros"]) :]), None)


@op(
    "(x: f[t, d], order: i[p], starts: i[s], code: t[e, m, c], scale: f[e, r, g], extras*: t[...]) -> x[...]",
    infer=checked(_check_stack, up_type, "d"), flops="2*p*m*d",
    holds={
        "order": drawn_order, "starts": drawn_starts, "code": _codes, "scale": positive, "extras": draw_stack_extras,
    },
    example={
        "t": 7, "d": 12, "p": 14, "s": 7, "e": 6, "m": 10, "c": 12, "r": 10, "g": 3, "k": 2, "code": "u8", "bits": 4,
        "block": [1, 4], "zeros": True, "extras": [(6, 10, 3), (6, 10)],
    },
)  # fmt: skip
def quantized_moe_up(
    x: Any, order: Any, starts: Any, code: Any, scale: Any, *extras: Any, k: int, block: Ints, body: str = SWIGLU,
    zero_point: int = 0, zeros: bool = False, values: str = "", bits: int = 8, half: int = 0, act: str = "",
    act_block: int = 0,
) -> Any:  # fmt: skip
    """moe_up over the stack dequantize(code, scale, zero).

    extras: the zero points if `zeros` is set, then the bias, if there is one. block, zero_point, zeros, bits, act and
    act_block are as in quantized_linear, values as in dequantize. If `half` is not 0, codes are packed (see
    `pack_nibbles`), and scales and zero points are [experts, blocks, rows]. This op is separate from moe_up because few
    kernels read codes; `lower-quantized` chooses between the two.
    """
    options = {"block": block, "zero_point": zero_point, "zeros": zeros, "values": values, "half": half}
    w, bias = _stack(code, scale, extras, options)
    return moe_up.ref(rounded(x, act, act_block) if act else x, order, starts, w, bias, k=k, body=body)


@op(
    "(h: f[p, i], order: i[p], starts: i[s], code: t[e, d, c], scale: f[e, r, g], weights: f[t, k], extras*: t[...])"
    " -> h[...]",
    infer=checked(_check_stack, down_type, "i"), flops="2*p*d*i", attrs_of=quantized_moe_up, without=("k", "body"),
    holds={
        "order": drawn_order, "starts": drawn_starts, "code": _codes, "scale": positive, "weights": probability,
        "extras": draw_stack_extras,
    },
    example={
        "p": 14, "i": 11, "s": 7, "e": 6, "d": 8, "c": 11, "r": 8, "g": 1, "t": 7, "k": 2, "code": "i8",
        "block": [1, 0], "extras": [(6, 8)],
    },
)  # fmt: skip
def quantized_moe_down(
    h: Any, order: Any, starts: Any, code: Any, scale: Any, weights: Any, *extras: Any, dtype: str = "", **attrs: Any
) -> Any:  # fmt: skip
    """moe_down over the stack dequantize(code, scale, zero); operands and attributes are as in quantized_moe_up.

    dtype: of the result, f32 by default.
    """
    w, bias = _stack(code, scale, extras, attrs)
    h = rounded(h, attrs["act"], attrs["act_block"]) if attrs["act"] else h
    return moe_down.ref(h, order, starts, w, weights, bias)


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


def _check_fragments(env: dict[str, Any], attrs: Mapping[str, Any], columns: Any) -> None:
    """Raise Mismatch unless codes, tables and bias agree with each other and with the attributes."""
    code, scale, extras = env["code"], env["scale"], list(env["extras"])
    rows, blocks = code.shape[1], columns.divide(BLOCK)
    if rows.divide(BLOCK) is None or blocks is None or code.shape[2] != blocks * (BLOCK // 2):
        raise Mismatch(f"{code} does not contain {columns} codes a row; both are multiples of {BLOCK}")
    if attrs["values"] and attrs["values"] not in VALUES:
        raise Mismatch(f"values={attrs['values']!r} is not one of {', '.join(VALUES)}")
    e, c, r = scale.shape
    check_scales(code.with_shape(*code.shape[:2], columns), scale.with_shape(e, r, c), attrs["block"])
    check_extras(code, scale, extras, attrs["zeros"])


def _operands(code: Any, scale: Any, extras: tuple[Any, ...], zeros: int, parts: int) -> list[Any]:
    """The operands of the product over codes that are not packed."""
    tables = [np.swapaxes(t, 1, 2) for t in (scale, *extras[:zeros])]
    return [*(separate(x, parts) for x in (unpack_fragments(code), *tables)), *extras[zeros:]]


def separate(x: Any, parts: int) -> Any:
    """Return the rows [experts, rows, columns] of one part after the other, of parts that alternate."""
    e, m, c = x.shape
    return x.reshape(e, -1, parts, EIGHT, c).swapaxes(1, 2).reshape(e, m, c)


@op(
    "(x: f[t, d], order: i[p], starts: i[s], code: u8[e, m, c], scale: f[e, g, m], extras*: t[...]) -> x[...]",
    infer=checked(_check_fragments, up_type, "d"), flops="2*p*m*d", attrs_of=quantized_moe_up, without=OF_CODES,
    holds={
        "order": drawn_order, "starts": drawn_starts, "code": integers(0, 256), "scale": positive,
        "extras": draw_stack_extras,
    },
    example={
        "t": 7, "d": 64, "p": 14, "s": 7, "e": 6, "m": 128, "c": 32, "g": 2, "k": 2, "block": [1, 32], "zeros": True,
        "extras": [(6, 2, 128), (6, 128)],
    },
)  # fmt: skip
def fragments_moe_up(
    x: Any, order: Any, starts: Any, code: Any, scale: Any, *extras: Any, zeros: bool = False, **attrs: Any
) -> Any:
    """quantized_moe_up over codes that pack_fragments has packed, after gate and up have been made to alternate.

    The rows of a bias do not alternate.
    """
    code, scale, *extras_of = _operands(code, scale, extras, int(zeros), 2)
    return quantized_moe_up.ref(x, order, starts, code, scale, *extras_of, zeros=zeros, **attrs)


@op(
    "(h: f[p, i], order: i[p], starts: i[s], code: u8[e, d, c], scale: f[e, g, d], weights: f[t, k], extras*: t[...])"
    " -> h[...]",
    infer=checked(_check_fragments, down_type, "i"), flops="2*p*d*i", attrs_of=quantized_moe_down, without=OF_CODES,
    holds={
        "order": drawn_order, "starts": drawn_starts, "code": integers(0, 256), "scale": positive,
        "weights": probability, "extras": draw_stack_extras,
    },
    example={
        "p": 14, "i": 64, "s": 7, "e": 6, "d": 64, "c": 32, "g": 1, "t": 7, "k": 2, "block": [1, 64],
        "extras": [(6, 64)],
    },
)  # fmt: skip
def fragments_moe_down(
    h: Any, order: Any, starts: Any, code: Any, scale: Any, weights: Any, *extras: Any, zeros: bool = False,
    **attrs: Any,
) -> Any:  # fmt: skip
    """quantized_moe_down over codes that pack_fragments has packed."""
    code, scale, *extras_of = _operands(code, scale, extras, int(zeros), 1)
    return quantized_moe_down.ref(
        h, order, starts, code, scale, weights, *extras_of, zeros=zeros, half=0, act="", **attrs
    )
