"""Ops that decode quantised weights: unpack integers from words, and turn codes, scales and zero points into floats."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import Ints, op
from llmc.ir.ops.common import axis_of
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

# Values of codes that stand for no integer, by the name of their encoding. e2m1: OCP Microscaling Formats 1.0, FP4.
VALUES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)}
)


def _unpack_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, bits, size, order = env["x"], attrs["bits"], attrs["size"], attrs["order"]
    width = DTYPES[x.dtype].bits
    axis = axis_of(x.rank, attrs["axis"])
    if not 1 <= bits <= 8:
        raise Mismatch(f"bits={bits}: from 1 to 8 are supported")
    words = x.shape[axis].const
    if words is not None and size > words * width // bits:
        raise Mismatch(f"{words} words of {width} bits do not hold {size} values of {bits} bits")
    if order and (width % bits or sorted(order) != list(range(width // bits))):
        raise Mismatch(f"order {list(order)} does not permute the values of {bits} bits in a word of {width}")
    return [Type("u8", (*x.shape[:axis], Dim.of(size), *x.shape[axis + 1 :]))]


@op(
    "(x: i[*s]) -> u8[...]", infer=_unpack_type,
    example=lambda rng: ([rng.integers(0, 1 << 31, (3, 6), np.int32)], {"bits": 3, "axis": 1, "size": 61}),
)  # fmt: skip
def unpack_bits(x: Any, *, bits: int, axis: int, size: int, order: Ints = (), word_add: int = 0, add: int = 0) -> Any:
    """Unpack `size` unsigned integers of `bits` bits along one axis.

    The words along the axis are one stream of bits, least significant first: value i is bits i * bits to (i + 1) * bits
    and may cross words. With an `order`, value j of each word is the value at place order[j] of the stream's word.
    `word_add` is added to each word, modulo its width, before the values are cut out; `add` to each value, modulo
    2 ** bits.
    """
    words = np.moveaxis(np.asarray(x), axis, -1)
    width = words.dtype.itemsize * 8
    words = words.view(np.dtype(f"u{width // 8}"))
    if word_add:
        words = words + words.dtype.type(word_add)
    if width % bits:
        values = _stream(words, bits, size)
    else:
        places = np.array(order or range(width // bits))
        shifts = (places * bits).astype(words.dtype)
        values = (words[..., None] >> shifts).astype(np.uint8) & np.uint8((1 << bits) - 1)
        values = values.reshape(*words.shape[:-1], words.shape[-1] * len(places))[..., :size]
    if add:
        values = (values + np.uint8(add)) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(np.moveaxis(values, -1, axis))


def _stream(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """The first `size` values of `bits` bits in the words [..., n], some of which cross words."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    stream = np.unpackbits(octets, axis=-1, bitorder="little")[..., : size * bits]
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return (stream.reshape(*words.shape[:-1], size, bits) * weights).sum(-1, dtype=np.uint8)


@op(
    "(x: t[*b, c], idx: i[k]) -> x[*b, k]", bytes="2*out*bytes_x",
    example=lambda rng: ([rng.random((3, 4)), rng.integers(0, 4, (9,))], {}),
)  # fmt: skip
def take_columns(x: Any, idx: Any) -> Any:
    """Columns of x by index, such as the scales of the groups that `g_idx` names."""
    return x[..., idx]


def _bitcast_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, dtype = env["x"], attrs["dtype"]
    if dtype not in DTYPES or DTYPES[dtype].bits != DTYPES[x.dtype].bits:
        raise Mismatch(f"{x} cannot be read as {dtype}: their elements differ in size")
    return [Type(dtype, x.shape)]


@op(
    "(x: i[*s]) -> dtype[*s]", infer=_bitcast_type, bytes="0",
    example=lambda rng: ([rng.integers(0, 255, (3, 5)).astype(np.uint8)], {"dtype": "f8e8m0"}),
)  # fmt: skip
def bitcast(x: Any, *, dtype: str) -> Any:
    """The same bits as another dtype of the same width."""
    return np.asarray(x).view(DTYPES[dtype].np)


def _dequantize_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    code, scale, zero = env["code"], env["scale"], env.get("zero")
    if len(attrs["block"]) != 2 or min(attrs["block"]) < 0:
        raise Mismatch(f"block={list(attrs['block'])}: rows and columns that share a scale are wanted, 0 for all")
    for axis, size in zip((-2, -1), attrs["block"], strict=True):
        want = code.shape[axis].ceildiv(size) if size else Dim.of(1)
        if scale.shape[axis] != want:
            raise Mismatch(f"{scale} does not scale blocks of {list(attrs['block'])} of {code}")
    if zero is not None and attrs["zero_point"]:
        raise Mismatch("zero points are given twice: as an operand and as zero_point")
    if attrs["values"] and attrs["values"] not in VALUES:
        raise Mismatch(f"values={attrs['values']!r} is not one of {', '.join(VALUES)}")
    if attrs["dtype"] not in DTYPES or DTYPES[attrs["dtype"]].kind != "f":
        raise Mismatch(f"dtype={attrs['dtype']!r} is not a float dtype")
    return [Type(attrs["dtype"], code.shape)]


@op(
    "(code: t[*b, n, k], scale: f[*b, r, c], zero?: t[*b, r, c]) -> dtype[*b, n, k]", infer=_dequantize_type,
    flops="2*b*n*k",
    example=lambda rng: (
        [rng.integers(0, 16, (6, 10)).astype(np.uint8), rng.random((6, 3)).astype(np.float32),
         rng.integers(0, 16, (6, 3)).astype(np.uint8)],
        {"block": [1, 4], "dtype": "f32"},
    ),
)  # fmt: skip
def dequantize(
    code: Any, scale: Any, zero: Any = None, *, block: Ints, dtype: str, zero_point: int = 0, values: str = ""
) -> Any:
    """(code - zero) * scale, with one scale and zero point for each block [rows, columns] of the last two axes.

    A block size of 0 is the whole axis. `zero_point` is the zero point of all blocks. `values` names the encoding of
    codes that are not numbers (see VALUES). `dtype` is the result's.
    """
    number = np.array(VALUES[values], np.float32)[code] if values else np.asarray(code).astype(np.float32)
    if zero is not None:
        number = number - _spread(np.asarray(zero).astype(np.float32), block, number.shape)
    elif zero_point:
        number = number - np.float32(zero_point)
    return number * _spread(np.asarray(scale).astype(np.float32), block, number.shape)


def _spread(x: np.ndarray, block: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Repeat the entry of each block for its elements; axes of one block are left to broadcasting."""
    for axis, size in zip((-2, -1), block, strict=True):
        if size > 1:
            x = (
                np.repeat(x, size, axis)[..., : shape[axis], :]
                if axis == -2
                else np.repeat(x, size, -1)[..., : shape[-1]]
            )
    return x


OPS = (unpack_bits, take_columns, bitcast, dequantize)
