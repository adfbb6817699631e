"""Ops of quantised weights: unpacking integers from words, and converting between floats and codes with scales.

A value of a quantised type (`Type.format`) stands for its dequantised numbers, and ops compute with these numbers.
`quantize` and `assemble` create such values; the pass `lower-quantized` replaces them by their parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir.contents import index, integers, positive, probability
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.opdef import Ints, op
from llmc.ir.ops.common import axis_of
from llmc.ir.qformat import ENCODINGS, QFormat, scale_shape
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

# Values of codes that are not integers, by the name of their encoding. e2m1: OCP Microscaling Formats 1.0, FP4.
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
    holds={"x": integers(0, 1 << 31)}, example={"x": "i32", "*s": (3, 6), "bits": 3, "axis": 1, "size": 61},
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
    """Return the first `size` values of `bits` bits in the words [..., n], some of which cross words."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    stream = np.unpackbits(octets, axis=-1, bitorder="little")[..., : size * bits]
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return (stream.reshape(*words.shape[:-1], size, bits) * weights).sum(-1, dtype=np.uint8)


@op(
    "(x: t[*b, c], idx: i[k]) -> x[*b, k]", bytes="2*out*bytes_x",
    holds={"idx": index("x", -1)}, example={"*b": (3,), "c": 4, "k": 9},
)  # fmt: skip
def take_columns(x: Any, idx: Any) -> Any:
    """Columns of x by index, for example the scales of the group of each column (`g_idx`)."""
    return x[..., idx]


@op(
    "(x: i[n]) -> i32[n]",
    holds={"x": integers(0, 4)}, example={"n": 9},
)  # fmt: skip
def argsort(x: Any) -> Any:
    """The indices that sort x in ascending order; equal elements keep their order."""
    return np.argsort(x, kind="stable").astype(np.int32)


def _bitcast_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, dtype = env["x"], attrs["dtype"]
    if dtype not in DTYPES or DTYPES[dtype].bits != DTYPES[x.dtype].bits:
        raise Mismatch(f"{x} cannot be read as {dtype}: their elements differ in size")
    return [Type(dtype, x.shape)]


@op(
    "(x: i[*s]) -> dtype[*s]", infer=_bitcast_type, bytes="0",
    holds={"x": integers(0, 255)}, example={"x": "u8", "*s": (3, 5), "dtype": "f8e8m0"},
)  # fmt: skip
def bitcast(x: Any, *, dtype: str) -> Any:
    """The same bits as another dtype of the same width."""
    return np.asarray(x).view(DTYPES[dtype].np)


@op(
    "(code: f8e4m3[*s]) -> f8e4m3fnuz[*s]",
    example={"code": "f8e4m3", "*s": (3, 5)},
)  # fmt: skip
def fnuz_codes(code: Any) -> Any:
    """Half of each number, exactly, in the 8-bit floats of AMD's CDNA 3: bias 8, no infinities and no negative zero.

    The bits are the same, except that -0 becomes 0, and that the two NaN become the only one.
    """
    return code * 0.5


def check_block(block: Ints) -> None:
    """Raise Mismatch unless `block` has the numbers of rows and of columns that share a scale."""
    if len(block) != 2 or min(block) < 0:
        raise Mismatch(f"block={list(block)}: expected [rows, columns] that share a scale, 0 for all")


def check_scales(code: Type, scale: Type, block: Ints) -> None:
    """Raise Mismatch unless `scale` has one element for each block of codes [*b, n, k]."""
    check_block(block)
    if scale.shape != scale_shape(code.shape, block):
        raise Mismatch(f"{scale} does not scale blocks of {list(block)} of {code}")


def _dequantize_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    code, scale, zero = env["code"], env["scale"], env.get("zero")
    check_scales(code, scale, attrs["block"])
    if zero is not None and attrs["zero_point"]:
        raise Mismatch("zero points are both an operand and the attribute zero_point")
    if attrs["values"] and attrs["values"] not in VALUES:
        raise Mismatch(f"values={attrs['values']!r} is not one of {', '.join(VALUES)}")
    if attrs["dtype"] not in DTYPES or DTYPES[attrs["dtype"]].kind != "f":
        raise Mismatch(f"dtype={attrs['dtype']!r} is not a float dtype")
    return [Type(attrs["dtype"], code.shape)]


@op(
    "(code: t[*b, n, k], scale: f[*b, r, c], zero?: t[*b, r, c]) -> dtype[*b, n, k]", infer=_dequantize_type,
    flops="2*b*n*k",
    holds={"code": integers(0, 16), "scale": probability, "zero": integers(0, 16)},
    example={
        "code": "u8", "zero": "u8", "*b": (), "n": 6, "k": 10, "r": 6, "c": 3, "block": [1, 4], "dtype": "f32",
    },
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
        number = _with_blocks(np.subtract, number, np.asarray(zero).astype(np.float32), block)
    elif zero_point:
        number = number - np.float32(zero_point)
    return _with_blocks(np.multiply, number, np.asarray(scale).astype(np.float32), block)


def _with_blocks(f: np.ufunc, x: np.ndarray, entries: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """f(element of x, entry of its block), without a copy of the entries for each element if all blocks are whole."""
    n, k = x.shape[-2:]
    rows, columns = (max(1, min(size or length, length)) for size, length in zip(block, (n, k), strict=True))
    if n % rows or k % columns:
        return np.asarray(f(x, _spread(entries, block, x.shape)))
    whole = x.reshape(*x.shape[:-2], n // rows, rows, k // columns, columns)
    return np.asarray(f(whole, entries[..., :, None, :, None])).reshape(x.shape)


def _spread(x: np.ndarray, block: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Repeat the entry of each block for its elements; axes of one block are left to broadcasting."""
    for axis, size in zip((-2, -1), block, strict=True):
        if size > 1:
            x = np.repeat(x, size, axis)
            x = x[..., : shape[-1]] if axis == -1 else x[..., : shape[-2], :]
    return x


def _format(attrs: Mapping[str, Any], logical: str) -> QFormat:
    check_block(attrs["block"])
    try:
        return QFormat.of(attrs["code"], attrs["block"], attrs["scale"], attrs["zero"], logical, attrs.get("act", ""))
    except (KeyError, ValueError) as e:
        raise Mismatch(str(e)) from None


def _quantize_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    w = env["w"]
    if attrs["zero"] in DTYPES:
        raise Mismatch(f"zero={attrs['zero']!r}: rounding to nearest takes one zero point for all codes")
    if attrs["code"] in ENCODINGS:
        raise Mismatch(f"code={attrs['code']!r}: rounding makes integers and floats of 8 bits")
    return [Type(w.dtype, w.shape, format=_format(attrs, w.dtype))]


@op(
    "(w: f[*b, n, k]) -> w[*b, n, k]", infer=_quantize_type, flops="4*b*n*k",
    example={"*b": (2,), "n": 6, "k": 10, "code": "u4", "block": [1, 4], "scale": "f32", "zero": "8"},
)  # fmt: skip
def quantize(w: Any, *, code: str, block: Ints, scale: str, zero: str = "", act: str = "") -> Any:
    """Round w to the nearest codes, with one scale for each block; the attributes are those of a QFormat.

    See `quantize_scale` and `quantize_code` for the arithmetic.
    """
    scales = quantize_scale.ref(w, code=code, block=block, dtype=scale)
    codes = quantize_code.ref(w, scales, code=code, block=block, zero_point=int(zero or 0))
    return dequantize.ref(codes, scales, None, block=block, dtype="f32", zero_point=int(zero or 0))


def _assemble_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    codes, scales, zeros = env["codes"], env["scales"], env.get("zeros")
    format = _format({**attrs, "scale": scales.dtype}, attrs["dtype"])
    if codes.dtype != format.storage:
        raise Mismatch(f"{codes} are not codes of {format.name}, which are stored as {format.storage}")
    check_scales(codes, scales, attrs["block"])
    if format.has_zeros != (zeros is not None) or (zeros is not None and zeros.shape != scales.shape):
        raise Mismatch(f"zero={attrs['zero']!r} does not agree with the zero points {zeros}")
    return [Type(attrs["dtype"], codes.shape, format=format)]


@op(
    "(codes: t[*b, n, k], scales: f[*b, r, c], zeros?: t[*b, r, c]) -> dtype[*b, n, k]",
    infer=_assemble_type, bytes="0",
    holds={"codes": integers(0, 16), "scales": probability, "zeros": integers(0, 16)},
    example={
        "codes": "u8", "zeros": "u8", "*b": (2,), "n": 6, "k": 10, "r": 6, "c": 3, "code": "u4", "block": [1, 4],
        "zero": "u8", "dtype": "f32",
    },
)  # fmt: skip
def assemble(
    codes: Any, scales: Any, zeros: Any = None, *, code: str, block: Ints, zero: str = "", act: str = "", dtype: str
) -> Any:  # fmt: skip
    """The quantised tensor with these parts; `dequantize` defines its numbers.

    code, block, zero and act are those of the QFormat; codes of less than 8 bits are stored as u8. dtype is the logical
    one.
    """
    point = 0 if zeros is not None else int(zero or 0)
    values = ENCODINGS.get(code, "")
    return dequantize.ref(codes, scales, zeros, block=block, dtype="f32", zero_point=point, values=values)


def _code_range(code: str) -> tuple[float, float]:
    """Return the smallest and largest value of a code minus the zero point, which is in the middle of the range."""
    if DTYPES[code].kind == "f":
        limit = float(np.finfo(DTYPES[code].np).max) if DTYPES[code].bits > 8 else FLOAT_CODES[code]
        return -limit, limit
    half = 1 << (DTYPES[code].bits - 1)
    return -half, half - 1


# The largest value of a float code.
FLOAT_CODES: Mapping[str, float] = MappingProxyType({"f8e4m3": 448.0, "f8e4m3fnuz": 240.0, "f8e5m2": 57344.0})


def _scale_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    shape = _format({**attrs, "scale": attrs["dtype"], "zero": ""}, "f32").scale_shape(env["w"].shape)
    return [Type(attrs["dtype"], shape)]


@op(
    "(w: f[*b, n, k]) -> dtype[...]", infer=_scale_type, flops="b*n*k",
    example={"*b": (2,), "n": 6, "k": 10, "code": "u4", "block": [1, 4], "dtype": "f32"},
)  # fmt: skip
def quantize_scale(w: Any, *, code: str, block: Ints, dtype: str) -> Any:
    """The scale of each block of w: max|w| over the middle of the code's range, as compressed-tensors computes it.

    For integers of b bits that is max|w| / ((2^b - 1) / 2), for floats max|w| / the largest code. It is rounded to
    dtype, and codes are computed with the rounded scale.
    """
    low, high = _code_range(code)
    w = np.abs(np.asarray(w, np.float32))
    for axis, size in zip((-2, -1), block, strict=True):
        length = w.shape[axis]
        if length and size != 1:
            w = np.maximum.reduceat(w, np.arange(0, length, size or length), axis)
    return (w / np.float32((high - low) / 2)).astype(DTYPES[dtype].np).astype(np.float32)


@op(
    "(w: f[*b, n, k], scale: f[*b, r, c]) -> t[*b, n, k]", infer=lambda env, attrs: [Type(
        QFormat.of(attrs["code"], (1, 0), "f32").storage, env["w"].shape)],
    flops="3*b*n*k", holds={"scale": positive},
    example={"*b": (2,), "n": 6, "k": 10, "r": 6, "c": 3, "code": "u4", "block": [1, 4], "zero_point": 8},
)  # fmt: skip
def quantize_code(w: Any, scale: Any, *, code: str, block: Ints, zero_point: int = 0) -> Any:
    """The codes of w: w / scale rounded to nearest even, limited to the code's range, plus the zero point.

    A block whose scale is 0 has the codes of 0.
    """
    low, high = _code_range(code)
    scale = np.asarray(scale, np.float32)
    divisor = np.where(scale == 0, np.float32(np.inf), scale)
    limited = _with_blocks(np.divide, np.asarray(w, np.float32), divisor, block)
    np.clip(limited, low, high, out=limited)
    if DTYPES[code].kind == "f":
        return limited.astype(DTYPES[code].np).astype(np.float32)
    np.rint(limited, out=limited)
    limited += zero_point
    return limited
