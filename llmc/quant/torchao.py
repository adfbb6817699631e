"""torchao checkpoints in safetensors (`quant_method: torchao`): the tensors of a tensor subclass, and its name.

The headers of the files describe each weight X.weight: a JSON text under that name has the subclass (`_type`) and its
attributes (`_data`). Its tensors are X._weight_PART; a stack of experts X.NAME has X._NAME_PART.

_type                      parts of a weight [n, k]
Int8Tensor                 qdata int8 [n, k]; scale and zero_point (int8, optional) of the tensor, rows or groups
IntxUnpackedToInt8Tensor   the same; the codes have fewer bits (`target_dtype`)
Float8Tensor               qdata float8_e4m3 [n, k]; scale of the tensor, rows or tiles
Int4Tensor                 qdata int8 [n, k / 2], signed, the low four bits first; scale and zero_point [groups, n]
Int4TilePackedTo4dTensor   qdata int32 [n / 8, k / 128, 32, 4], as the m16n8k16 tensor core instruction of NVIDIA reads
                           it; scale_and_zero [groups, n, 2]; n and k may be larger than the weight's (`shape`)
MXTensor                   qdata float8_e4m3 [n, k] or uint8 [n, k / 2] (4-bit floats, the low four bits first); scale
                           float8_e8m0 [n, k / 32]
NVFP4Tensor                qdata uint8 [n, k / 2]; scale float8_e4m3 [n, k / 16], times per_tensor_scale float32

Both kinds of 4-bit integers compute `(code - 8) * scale + zero_point`, with unsigned codes. `is_swizzled_scales` means
scales in tiles of 128 x 4, padded, in the order of the block-scaled instructions of NVIDIA. Products may round
activations to the dtype that a weight names (`act_quant_kwargs`); stored scales of activations are not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Value
from llmc.quant.scheme import AGAIN, Codes, Stored, nibbles, refuse, shape_of, supported, with_offsets

METHOD = "torchao"
INTEGERS = ("i8", "i16", "i32", "i64")
# The name of a weight is as short as possible: "_weight_per_tensor_scale" is not that of "weight_per_tensor".
PART = re.compile(
    r"(.+)\._(.+?)_(qdata|scale_and_zero|act_per_tensor_scale|per_tensor_scale|act_pre_scale|act_quant_scale"
    r"|act_quant_zero_point|scale|zero_point)$"
)
Facts = Mapping[str, Any]  # the attributes of a tensor subclass


class TorchAo:
    """The scheme of a checkpoint."""

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        match = PART.match(name)
        return (f"{match[1]}.{match[2]}", match[3]) if match else None

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        kind, facts = _facts(stored)
        supported(METHOD, f"type of {stored.name}", kind, KINDS)
        if "act_pre_scale" in stored.parts:
            raise refuse(METHOD, "tensor", stored.parts["act_pre_scale"].name, ("weights whose inputs are not scaled",))
        codes = KINDS[kind](stored, facts)
        return replace(codes, label=f"{METHOD} {codes.label}", act=_act(facts, codes.label))


def torchao(config: Mapping[str, Any]) -> TorchAo:
    """Return the scheme of a quantization_config, whose `quant_type` is what produced the weights; it is not needed."""
    return TorchAo()


def _facts(stored: Stored) -> tuple[str, Facts]:
    """Return the subclass of a weight and its attributes; raises Diagnostic E340."""
    text = stored.metadata().get(stored.name)
    if text is None:
        present = ", ".join(sorted(stored.parts))
        cause = f"{stored.name} has {present}, and the header of its file does not describe it"
        raise Diagnostic("E340", cause, "save the model again with transformers and torchao, as safetensors")
    try:
        description = json.loads(text)
        kind, facts = description["_type"], description["_data"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise Diagnostic("E340", f"the description of {stored.name} cannot be read: {str(e)[:200]}", AGAIN) from None
    if not isinstance(kind, str) or not isinstance(facts, dict):
        raise Diagnostic("E340", f"the description of {stored.name} is not that of a tensor", AGAIN)
    return kind, facts


def _act(facts: Facts, label: str) -> str:
    """Return the dtype of the activations that a weight names, if products can round to it."""
    named = facts.get("act_quant_kwargs") or facts.get("activation_quantization")
    return {"int8": "i8", "fp8": "f8e4m3", "mxfp8": "f8e4m3"}.get(label, "") if named else ""


def _numbers(stored: Stored, facts: Facts, key: str, count: int) -> tuple[int, ...]:
    """Return an attribute that is a list of positive numbers; raises Diagnostic E340."""
    sizes = facts.get(key)
    if not isinstance(sizes, list) or len(sizes) != count or not all(type(x) is int and x > 0 for x in sizes):
        raise Diagnostic("E340", f"the description of {stored.name} has {key} = {str(sizes)[:80]!r}", AGAIN)
    return tuple(sizes)


def _plain(label: str, code: str) -> Callable[[Stored, Facts], Codes]:
    """Return the decoder of codes that are stored one per element; experts may be in front."""

    def decode(stored: Stored, facts: Facts) -> Codes:
        b = stored.build
        qdata, scale = stored.part("qdata", (code,)), stored.scales("scale", FLOATS)
        rank = qdata.type.rank
        size = _numbers(stored, facts, "block_size", rank)
        shape = shape_of(qdata)
        if rank < 2 or any(x != 1 for x in size[:-2]):
            raise refuse(METHOD, f"block_size of {stored.name}", list(size), ("scales of rows, groups or tiles",))
        counts = (*shape[:-2], *(-(-length // part) for length, part in zip(shape[-2:], size[-2:], strict=True)))
        if shape_of(scale) in ((), (1,)) and counts[-2:] == (1, 1):
            scale = b.reshape(scale, shape=counts)
        stored.expect(scale, *counts)
        rows, columns = (0 if n == 1 else s for n, s in zip(counts[-2:], size[-2:], strict=True))
        zero: Value | int = 0
        if "zero_point" in stored.parts:
            points = stored.part("zero_point", (*INTEGERS, *FLOATS))
            if shape_of(points) in ((), (1,)):
                points = b.reshape(points, shape=counts)
            stored.expect(points, *counts)
            zero = points if stored.load(stored.parts["zero_point"].name).any() else 0
        return Codes(qdata, scale, (rows, columns), label, zero)

    return decode


def _int4(stored: Stored, facts: Facts) -> Codes:
    b, qdata, zero = stored.build, stored.part("qdata", ("i8", "u8"), 2), stored.part("zero_point", FLOATS, 2)
    n, k = shape_of(qdata)[0], shape_of(qdata)[1] * 2
    size = _numbers(stored, facts, "block_size", 2)[1]
    scale = stored.scales("scale", FLOATS, -(-k // size), n)
    stored.expect(zero, -(-k // size), n)
    code = b.unpack_bits(qdata, bits=4, axis=1, size=k, add=8)  # add=8: the codes are signed
    scale, zero = (b.transpose(x, perm=(1, 0)) for x in (scale, zero))
    return with_offsets(b, code, scale, zero, size if size < k else 0, "int4", zero=8)


def _tiles(stored: Stored, facts: Facts) -> Codes:
    """Decode tiles of tensor cores: a lane has 2 columns of each half of two tiles of 16, of 8 rows by 4 lanes."""
    b = stored.build
    qdata, pairs = stored.part("qdata", ("i32",), 4), stored.part("scale_and_zero", FLOATS, 3)
    n, k = _numbers(stored, facts, "shape", 2)
    size = _numbers(stored, facts, "block_size", 2)[1]
    row_tiles, runs, _, words = shape_of(qdata)
    stored.expect(qdata, row_tiles, runs, 32, words)
    rows, columns = row_tiles * 8, runs * words * 32
    if not (rows - 8 < n <= rows and k <= columns) or columns % size:
        raise Diagnostic("E341", f"{qdata.name} is {qdata.type}; it should hold {n} rows and {k} columns", AGAIN)
    stored.expect(pairs, columns // size, rows, 2)
    codes = b.unpack_bits(qdata, bits=4, axis=3, size=words * 8)
    # rows, runs, row in the tile, lane, word, odd column, tile, half of the tile
    parts = b.reshape(codes, shape=(row_tiles, runs, 8, 4, words, 2, 2, 2))
    code = b.reshape(b.transpose(parts, perm=(0, 2, 1, 4, 6, 7, 3, 5)), shape=(rows, columns))
    groups = -(-k // size)
    scale, zero = (
        b.transpose(b.reshape(b.slice(pairs, axis=2, start=i, stop=i + 1, step=1), shape=(columns // size, rows)),
                    perm=(1, 0))
        for i in (0, 1)
    )  # fmt: skip
    scale, zero = (_cut(stored, x, n, groups) for x in (scale, zero))
    stored.check_scales(pairs, lambda x: x[:groups, :n, 0])
    stored.check_finite(pairs, lambda x: x[:groups, :n, 1])
    return with_offsets(b, _cut(stored, code, n, k), scale, zero, size if size < k else 0, "int4", zero=8)


def _cut(stored: Stored, value: Value, n: int, k: int) -> Value:
    """Return the first rows and columns of a padded matrix."""
    for axis, size in enumerate((n, k)):
        if shape_of(value)[axis] != size:
            value = stored.build.slice(value, axis=axis, start=0, stop=size, step=1)
    return value


def _natural(stored: Stored, facts: Facts, scale: Value, n: int, groups: int) -> Value:
    """Return the scales [n, groups] in the order of the weight; raises Diagnostic E342 if one is NaN or infinite."""
    b = stored.build
    if not facts.get("is_swizzled_scales"):
        stored.expect(scale, n, groups)
        stored.check_scales(scale)
        return scale
    row_tiles, runs = -(-n // 128), -(-groups // 4)
    stored.expect(scale, row_tiles * 32, runs * 16)
    tiles = (row_tiles, runs, 32, 4, 4)
    whole = (row_tiles * 128, runs * 4)
    perm = (0, 3, 2, 1, 4)
    stored.check_scales(scale, lambda x: x.reshape(tiles).transpose(perm).reshape(whole)[:n, :groups])
    parts = b.reshape(scale, shape=tiles)
    return _cut(stored, b.reshape(b.transpose(parts, perm=perm), shape=whole), n, groups)


def _mx(stored: Stored, facts: Facts) -> Codes:
    b, scale = stored.build, stored.part("scale", ("f8e8m0", "u8"), 2)
    supported(METHOD, f"block_size of {stored.name}", facts.get("block_size"), (32,))
    code = stored.part("qdata", ("u8", "f8e4m3"), 2)
    if packed := code.type.dtype == "u8":
        code = nibbles(stored, "qdata")
    n, k = shape_of(code)
    powers = _natural(stored, facts, scale, n, -(-k // 32))
    if scale.type.dtype == "u8":
        powers = b.bitcast(powers, dtype="f8e8m0")
    return Codes(code, powers, (1, 32), "mxfp4" if packed else "mxfp8", values="e2m1" if packed else "")


def _nvfp4(stored: Stored, facts: Facts) -> Codes:
    b, scale = stored.build, stored.part("scale", ("f8e4m3",), 2)
    supported(METHOD, f"block_size of {stored.name}", facts.get("block_size"), (16,))
    code = nibbles(stored, "qdata")
    n, k = shape_of(code)
    factor = b.cast(_natural(stored, facts, scale, n, -(-k // 16)), dtype="f32")
    if "per_tensor_scale" in stored.parts:
        stored.check_scales(stored.parts["per_tensor_scale"])
        factor = b.mul(factor, stored.number("per_tensor_scale", ("f32",)))
    return Codes(code, factor, (1, 16), "nvfp4", values="e2m1")


KINDS: Mapping[str, Callable[[Stored, Facts], Codes]] = MappingProxyType(
    {
        "Int8Tensor": _plain("int8", "i8"),
        "IntxUnpackedToInt8Tensor": _plain("int8", "i8"),
        "Float8Tensor": _plain("fp8", "f8e4m3"),
        "Int4Tensor": _int4,
        "Int4TilePackedTo4dTensor": _tiles,
        "MXTensor": _mx,
        "NVFP4Tensor": _nvfp4,
    }
)
