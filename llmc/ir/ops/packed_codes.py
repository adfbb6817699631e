"""Codes of 4 bits in the layouts that GPU products read, and the products over them.

A byte of `pack_nibbles` holds two codes of one row, `half` columns apart. Adjacent bytes then hold adjacent columns,
and a tile of bytes yields two tiles of codes: one from the low and one from the high four bits.

The bytes of `pack_fragments` are in the order in which Hopper's warpgroups multiply them. The left factor of the
instruction wgmma is a block of 64 rows and 16 columns in registers of 128 threads: warp w has rows 16 w to 16 w + 15,
and thread 4 g + q of it has the columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the rows g and g + 8 (PTX ISA, "Register
Fragments for wgmma.mma_async.m64nNk16"). The eight codes that a thread needs are one word of 32 bits, and the words of
four steps of 16 columns are next to each other, so that a thread loads 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.ir.contents import integers, positive
from llmc.ir.dim import Dim
from llmc.ir.opdef import op
from llmc.ir.ops.linear import rows_per_part
from llmc.ir.ops.quantized_linear import draw_extras, normed, quantized_linear, result_type
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


BLOCK = 64  # rows of a block of codes, and columns
# The axes of a matrix of codes: rows are (block, warp, half, g), columns are (block, step, half, q, pair).
_AXES = (4, 2, 8), (4, 2, 4, 2)
_ORDER = (0, 4, 1, 3, 7, 5, 8, 6, 2)
# The order of a row's columns in a block: from (step, half, q, pair) to (q, step, pair, half).
_COLUMNS = np.arange(BLOCK).reshape(4, 2, 4, 2).transpose(2, 0, 3, 1).reshape(-1)


def _blocks(size: Dim, axis: str) -> Dim:
    blocks = size.divide(BLOCK)
    if blocks is None:
        raise Mismatch(f"{size} {axis} are not a multiple of {BLOCK}")
    return blocks


def _pack_fragments_type(env: dict[str, Any], attrs: Any) -> list[Type]:
    _blocks(env["m"], "rows")
    return [Type("u8", (*env["*b"], env["m"], _blocks(env["k"], "columns") * (BLOCK // 2)))]


@op(
    "(code: u8[*b, m, k]) -> u8[...]", infer=_pack_fragments_type,
    holds={"code": integers(0, 16)}, example={"*b": (2,), "m": 128, "k": 64},
)  # fmt: skip
def pack_fragments(code: Any) -> Any:
    """Pack codes [*b, m, k] below 16 into bytes [*b, m, k / 2]; m and k are multiples of 64.

    The bytes are those of blocks of 64 rows and 64 columns, in row-major order of the blocks. Within a block they are
    ordered by warp, thread and step (see the module). In the word of a thread, bits 4 p to 4 p + 3 are the code of the
    first column of register p, and the bits 16 above them that of the second.
    """
    *batch, k = code.shape
    m = int(np.prod(batch))
    halves = np.asarray(code).astype(np.uint8, copy=False).reshape(m // 16, 2, 8, k)
    pairs = (halves[:, 0] | halves[:, 1] << np.uint8(4)).reshape(-1, BLOCK)[:, _COLUMNS]  # codes of rows g and g + 8
    blocks = pairs.reshape(m // BLOCK, 32, k // BLOCK, BLOCK).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks).reshape(*batch, k // 2)


def unpack_fragments(packed: np.ndarray) -> np.ndarray:
    """Invert pack_fragments."""
    *batch, k = *packed.shape[:-1], 2 * packed.shape[-1]
    m = int(np.prod(batch))
    raw = np.asarray(packed).astype(np.uint8).reshape(-1, 1)
    rows, columns = _AXES
    sizes = (m // BLOCK, *rows, k // BLOCK, *columns)
    parts = np.concatenate([raw & 15, raw >> 4], 1).reshape([sizes[i] for i in _ORDER])
    return parts.transpose(np.argsort(_ORDER)).reshape(*batch, k)


def _fragments_type(env: dict[str, Any], attrs: Any) -> list[Type]:
    _blocks(env["m"], "rows")
    return packed_type(env, attrs, _blocks(env["k"], "columns") * (BLOCK // 2))


@op(
    "(x: f[*b, k], packed: u8[m, h], scale: f[c, r], extras*: t[...]) -> x[...]", infer=_fragments_type,
    flops="2*b*m*k", holds={"packed": integers(0, 256), "scale": positive, "extras": draw_extras},
    attrs_of=quantized_linear, without=OF_CODES,
    example={
        "*b": (3,), "k": 64, "m": 128, "h": 32, "r": 128, "c": 2, "extras": [(2, 128), (64,)], "block": [1, 32],
        "zeros": True, "parts": 2, "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)",
    },
)  # fmt: skip
def packed_fragments_linear(x: Any, packed: Any, scale: Any, *extras: Any, **attrs: Any) -> Any:
    """quantized_linear over codes that pack_fragments has packed.

    The scales and the zero points are transposed, so that those of neighbouring rows are neighbours.
    """
    return product_of_codes(x, unpack_fragments(packed), scale, extras, attrs)


@op(
    "(x: f[*b, k], packed: u8[m, h], scale: f[c, r], gain: f[k], extras*: t[...]) -> x[...]", infer=_fragments_type,
    flops="2*b*m*k + 4*b*k", holds={"packed": integers(0, 256), "scale": positive, "extras": draw_extras},
    attrs_of=packed_fragments_linear,
    example={
        "*b": (3,), "k": 64, "m": 128, "h": 32, "r": 128, "c": 2, "extras": [(2, 128), (64,)], "block": [1, 32],
        "zeros": True, "parts": 2, "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)", "eps": 1e-5,
    },
)  # fmt: skip
def norm_fragments_linear(x: Any, packed: Any, scale: Any, gain: Any, *extras: Any, eps: float, **attrs: Any) -> Any:
    """packed_fragments_linear of rms_norm(x, gain), with the norm unrounded."""
    return packed_fragments_linear.ref(normed(x, gain, eps), packed, scale, *extras, **attrs)
