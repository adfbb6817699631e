"""HQQ checkpoints in safetensors (`quant_method: hqq`): each weight has its own description, as tensors.

A weight [n, k] is regrouped to a matrix, [n * k / group_size, group_size] if `axis` is 1 and [group_size, n * k /
group_size] if it is 0; scale and zero have one entry for each of its rows, or columns. W_q holds its rows in packed
form: if a word has f fields, field i of row r, from the highest bits down, is row i * R + r, where R is the number of
packed rows. Zero points are floats: a value is `(code - zero) * scale`.

packing   word and fields
8bit_u8   uint8, 1 (also for 5 and 6 bits)
4bit_u8   uint8, 2
3bit_32   int32, 10 of the low 30 bits; rows are padded
2bit_u8   uint8, 4 (also for 1.58 bits)
1bit_u8   uint8, 8
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Value
from llmc.quant.scheme import AGAIN, Codes, PartNames, Stored, refuse, shape_of, supported

METHOD = "hqq"
FLOATS = ("f16", "bf16", "f32")
PARTS = (
    "W_q", "weight", "nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "unpack_view_dtype",
    "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
# Packing -> bits of a field, dtype of a word.
PACKINGS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {"8bit_u8": (8, "u8"), "4bit_u8": (4, "u8"), "3bit_32": (3, "i32"), "2bit_u8": (2, "u8"), "1bit_u8": (1, "u8")}
)
MUST_BE_FALSE = ("view_as_float", "quant_scale", "quant_zero")  # what must not be true


class Hqq(PartNames):
    """The scheme of a checkpoint."""

    parts = PARTS

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        if "weight" in stored.parts:
            raise Diagnostic("E340", f"{stored.module} is stored both quantised and unquantised", AGAIN)
        for key in MUST_BE_FALSE:
            if key in stored.parts and _number(stored, key):
                raise refuse(METHOD, f"{key} of {stored.module}", True, (False,))
        n, k = stored.rows_and_columns("shape")
        axis = _number(stored, "axis")
        size = k if axis == 1 else n
        if "group_size" in stored.parts:
            size = _number(stored, "group_size")
        if axis not in (0, 1) or min(n, k, size) < 1 or n * k % size:
            cause = f"{stored.module} has the shape {[n, k]}, axis {axis} and groups of {size}"
            raise Diagnostic("E341", cause, AGAIN)
        rows, columns = (n * k // size, size) if axis == 1 else (size, n * k // size)
        packing = _text(stored, "packing")
        code = _unpacked(stored, packing, rows, columns)
        scale, zero = (_spread(stored, part, axis, rows, columns) for part in ("scale", "zero"))
        return _codes(stored, code, scale, zero, n, k)


def hqq(config: Mapping[str, Any]) -> Hqq:
    """Return the scheme of a quantization_config, whose settings every weight repeats."""
    return Hqq()


def _number(stored: Stored, part: str) -> int:
    """Return a part that is one number."""
    return int(stored.load(stored.single(part, ("u8", "i32", "i64")).name).reshape(()))


def _text(stored: Stored, part: str) -> str:
    """Return a part that is a text; raises Diagnostic E307 if it is not a packing."""
    packing = bytes(stored.load(stored.part(part, ("u8",), 1).name)[:80]).decode("latin-1")
    return str(supported(METHOD, f"packing of {stored.module}", packing, PACKINGS))


def _unpacked(stored: Stored, packing: str, rows: int, columns: int) -> Value:
    """Return the codes of the regrouped matrix, [rows, columns]."""
    b, (bits, dtype) = stored.build, PACKINGS[packing]
    fields = 32 // bits if dtype == "i32" else 8 // bits
    words = stored.part("W_q", (dtype,), 2)
    count = -(-rows // fields)
    stored.expect(words, count, columns)
    if fields == 1:
        return words
    order = () if dtype == "i32" else tuple(reversed(range(fields)))
    single = b.reshape(words, shape=(count, columns, 1))
    fields_of_rows = b.transpose(b.unpack_bits(single, bits=bits, axis=2, size=fields, order=order), perm=(2, 0, 1))
    if not order:
        planes = [b.slice(fields_of_rows, axis=0, start=i, stop=i + 1, step=1) for i in reversed(range(fields))]
        fields_of_rows = b.concat(*planes, axis=0)
    code = b.reshape(fields_of_rows, shape=(fields * count, columns))
    return code if fields * count == rows else b.slice(code, axis=0, start=0, stop=rows, step=1)


def _spread(stored: Stored, part: str, axis: int, rows: int, columns: int) -> Value:
    """Return the scales or zero points of the rows [rows, 1] or of the columns [1, columns] of the regrouped matrix."""
    b, value = stored.build, stored.part(part, FLOATS)
    if part == "scale":
        stored.check_scales(value)
    else:
        stored.check_finite(value)
    shape = (rows, 1) if axis == 1 else (1, columns)
    if int(np.prod(shape_of(value))) == 1:  # one value for the whole tensor
        return b.broadcast(b.reshape(value, shape=(1, 1)), shape=shape)
    stored.expect(value, *shape)
    return value


def _codes(stored: Stored, code: Value, scale: Value, zero: Value, n: int, k: int) -> Codes:
    """Return the codes [n, k]; numbers with a scale of 1 if a group is no run of columns of one row."""
    b, label = stored.build, "hqq"
    rows, columns = shape_of(code)
    if shape_of(scale) == (rows, 1) and k % columns == 0:
        groups = k // columns
        code, scale, zero = b.reshape(code, shape=(n, k)), *(b.reshape(x, shape=(n, groups)) for x in (scale, zero))
        return Codes(code, scale, (1, columns if groups > 1 else 0), label, zero)
    block = (1, 0) if shape_of(scale) == (rows, 1) else (0, 1)
    value = b.reshape(b.dequantize(code, scale, zero, block=block, dtype="f32"), shape=(n, k))
    return Codes(value, b.reshape(b.constant(1.0, "f32"), shape=(1, 1)), (0, 0), label)
