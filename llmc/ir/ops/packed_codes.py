"""Codes of 4 bits in the layout that GPU products read, and the product over it.

A byte holds two codes of one row, `half` columns apart. Adjacent bytes then hold adjacent columns, and a tile of bytes
yields two tiles of codes: one from the low and one from the high four bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.ir.contents import integers, positive
from llmc.ir.dim import Dim
from llmc.ir.opdef import op
from llmc.ir.ops.linear import rows_per_part
from llmc.ir.ops.quantized_linear import draw_extras, quantized_linear, result_type
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

OF_CODES = ("act", "act_block", "bits")  # attributes of quantized_linear that ops over packed codes do not have


def nibble_bytes(k: Dim, half: int) -> Dim:
    """Return the bytes of a row of k codes; raises Mismatch unless k is a multiple of 2 * half."""
    spans = k.divide(2 * half) if half > 0 else None
    if spans is None:
        raise Mismatch(f"{k} columns are not a multiple of 2 * half = {2 * half}")
    return spans * half


def _pack_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    return [Type("u8", (*env["*b"], env["m"], nibble_bytes(env["k"], attrs["half"])))]


@op(
    "(code: u8[*b, m, k]) -> u8[...]", infer=_pack_type,
    holds={"code": integers(0, 16)}, example={"*b": (2,), "m": 5, "k": 24, "half": 4},
)  # fmt: skip
def pack_nibbles(code: Any, *, half: int) -> Any:
    """Pack codes [*b, m, k] below 16 into bytes [*b, m, k / 2].

    Byte i * half + j of a row has the code of column 2 * i * half + j in its low four bits and that of column
    (2 * i + 1) * half + j in its high ones, for j < half.
    """
    *rows, k = code.shape
    spans = np.asarray(code).astype(np.uint8).reshape(*rows, k // (2 * half), 2, half)
    return (spans[..., 0, :] | spans[..., 1, :] << np.uint8(4)).reshape(*rows, k // 2)


def unpack_nibbles(packed: np.ndarray, half: int) -> np.ndarray:
    """Invert pack_nibbles."""
    *rows, width = packed.shape
    spans = np.asarray(packed).astype(np.uint8).reshape(*rows, -1, 1, half)
    return np.concatenate([spans & 15, spans >> 4], -2).reshape(*rows, 2 * width)


def packed_type(env: dict[str, Any], attrs: Mapping[str, Any], row_bytes: Dim) -> list[Type]:
    """Infer the result of a product over packed codes of 4 bits whose rows have `row_bytes` bytes."""
    k, scale, extras = env["k"], env["scale"], list(env["extras"])
    parts, block = attrs["parts"], attrs["block"]
    n = rows_per_part(env["m"], parts)
    if env["packed"].shape[1] != row_bytes:
        raise Mismatch(f"{env['packed']} does not contain rows of {k} codes")
    if len(block) != 2 or block[0] != 1:
        raise Mismatch(f"block={list(block)}: a scale must belong to columns of one row ([1, columns], 0 for all)")
    if scale.shape != (k.ceildiv(block[1]) if block[1] else Dim.of(1), env["m"]):
        raise Mismatch(f"{scale} does not scale blocks of {list(block)} of {env['m']} rows of {k} codes")
    return result_type(env, attrs, extras, n)


def _type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    return packed_type(env, attrs, nibble_bytes(env["k"], attrs["half"]))


def product_of_codes(x: Any, code: Any, scale: Any, extras: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """quantized_linear over unpacked codes, with transposed scales and zero points."""
    zeros = int(attrs.get("zeros", False))
    entries = [np.transpose(e) for e in (scale, *extras[:zeros])]
    return quantized_linear.ref(x, code, *entries, *extras[zeros:], **attrs)


@op(
    "(x: f[*b, k], packed: u8[m, h], scale: f[c, r], extras*: t[...]) -> x[...]", infer=_type, flops="2*b*m*k",
    holds={"packed": integers(0, 256), "scale": positive, "extras": draw_extras},
    attrs_of=quantized_linear, without=OF_CODES,
    example={
        "*b": (3,), "k": 64, "m": 14, "h": 32, "r": 14, "c": 2, "extras": [(2, 14), (7,)], "half": 16,
        "block": [1, 32], "zeros": True, "parts": 2, "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)",
    },
)  # fmt: skip
def packed_nibbles_linear(x: Any, packed: Any, scale: Any, *extras: Any, half: int, **attrs: Any) -> Any:
    """quantized_linear over codes that pack_nibbles has packed with the same `half`.

    The scales and the zero points are transposed, so that those of neighbouring rows are neighbours.
    """
    return product_of_codes(x, unpack_nibbles(packed, half), scale, extras, attrs)
