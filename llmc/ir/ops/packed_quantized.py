"""Codes of quantised weights in the layout that the CPU's integer products read, and the products over it.

Codes are padded to a multiple of 32 columns and stored in bytes (`pack_codes`), and the bytes in panels of 4
neighbouring columns (`pack_panel`). Scales and zero points are in separate panels, with one column per entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.contents import Drawing, Shape, positive
from llmc.ir.dim import Dim
from llmc.ir.opdef import op
from llmc.ir.ops.packed import panel_shape, unpack_panel
from llmc.ir.ops.quantized_linear import quantized_linear, result_type, zeros_and_others
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

RUN = 32  # columns to whose multiple codes are padded
QUAD = 4  # neighbouring bytes of a row in a panel
BITS = (4, 8)


def code_bytes(k: Dim, bits: int) -> Dim:
    """Return the bytes that a row of k codes has after `pack_codes`; raises Mismatch for other bits than 4 and 8."""
    if bits not in BITS:
        raise Mismatch(f"bits={bits} is not one of {', '.join(map(str, BITS))}")
    return k.ceildiv(RUN) * (RUN * bits // 8)


def _codes_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    code, bits = env["code"], attrs["bits"]
    width = code_bytes(env["k"], bits)
    if code.dtype != "u8" and (bits, code.dtype) != (8, "i8"):
        raise Mismatch(f"{code}: codes of {bits} bits are u8{' or i8' if bits == 8 else ''}")
    return [Type("i8" if bits == 8 else "u8", (env["m"], width))]


def _codes(d: Drawing, shape: Shape) -> Any:
    return d.rng.integers(0, 1 << min(7, d.attrs["bits"]), shape)


@op(
    "(code: i[m, k]) -> u8[...]", infer=_codes_type,
    holds={"code": _codes}, example={"code": "u8", "m": 5, "k": 41, "bits": 4},
)  # fmt: skip
def pack_codes(code: Any, *, bits: int) -> Any:
    """Store codes [m, k] in bytes, padded with zeros to a multiple of 32 columns.

    bits=8: one code per byte, as i8; u8 codes are reduced by 128. bits=4: byte 4 * j + q of a row has the code of
    column 8 * j + q in its low half and that of column 8 * j + 4 + q in its high half.
    """
    m, k = code.shape
    code = np.asarray(code)
    if bits == 8 and code.dtype == np.uint8:
        code = (code ^ np.uint8(128)).view(np.int8)
    out = np.zeros((m, -(-k // RUN) * RUN), np.int8 if bits == 8 else np.uint8)
    out[:, :k] = code
    if bits == 8:
        return out
    halves = out.reshape(m, out.shape[1] // (2 * QUAD), 2, QUAD)
    return (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).reshape(m, out.shape[1] // 2)


def unpack_codes(packed: np.ndarray, bits: int, k: int) -> np.ndarray:
    """Invert pack_codes, except that u8 codes of 8 bits are returned as i8."""
    if bits == 4:
        quads = packed.reshape(len(packed), -1, 1, QUAD)
        packed = np.concatenate([quads & 15, quads >> 4], 2).reshape(len(packed), -1)
    return packed[:, :k]


def _type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    k, n, parts = env["k"], attrs["n"], attrs["parts"]
    rows, block = env["rows"].const or 0, attrs["block"]
    codes = panel_shape(n * parts, code_bytes(k, attrs["bits"]), rows, QUAD, parts)
    if env["wp"].shape != codes:
        raise Mismatch(f"{env['wp']} does not contain {parts} x {n} rows of {k} codes of {attrs['bits']} bits")
    scales = panel_shape(n * parts, k.ceildiv(block) if block else Dim.of(1), rows, 1, parts)
    if env["sp"].shape != scales:
        expected = ", ".join(map(str, scales))
        raise Mismatch(f"{env['sp']} does not contain the scales of {parts} x {n} rows: expected [{expected}]")
    return result_type({**env, "scale": env["sp"]}, attrs, list(env["extras"]), n)


def _packed_codes(d: Drawing, shape: Shape) -> Any:
    return d.rng.integers(*((0, 256) if d.attrs["bits"] == 4 else (-127, 128)), shape)


@op(
    "(x: f[*b, k], wp: i[panels, depth, rows, quad], sp: f[panels, c, rows, one], extras*: t[...]) -> x[...]",
    infer=_type, flops="2*b*k*n*parts",
    holds={"wp": _packed_codes, "sp": positive, "extras": zeros_and_others(4)},
    attrs_of=quantized_linear, without=("block", "bits"),
    example={
        "*b": (3,), "k": 41, "panels": 2, "depth": 8, "rows": 8, "quad": 4, "c": 2, "one": 1, "wp": "u8",
        "extras": [(2, 2, 8, 1), (7,)], "n": 7, "bits": 4, "block": 32, "zeros": True, "parts": 2,
        "body": "add(mul(mul(a0, sigmoid(a0)), a1), a2)",
    },
)  # fmt: skip
def packed_quantized_linear(
    x: Any, wp: Any, sp: Any, *extras: Any, n: Dim, bits: int, block: int, **attrs: Any
) -> Any:  # fmt: skip
    """quantized_linear over a packed weight of parts of n rows; `block` columns of a row (0: all) share a scale.

    wp: panels of 4 columns (see pack_panel) of the codes in bytes (see pack_codes). sp: panels of one column of the
    scales. zeros: the same of the zero points is the first of the extras. The other attributes are as in
    quantized_linear.
    """
    k, zeros, parts = x.shape[-1], int(attrs["zeros"]), attrs["parts"]
    width = -(-k // RUN) * (RUN * bits // 8)
    code = unpack_codes(unpack_panel(np.asarray(wp), n, width, parts), bits, k)
    blocks = -(-k // block) if block else 1
    entries = [unpack_panel(np.asarray(e), n, blocks, parts) for e in (sp, *extras[:zeros])]
    return quantized_linear.ref(x, code, *entries, *extras[zeros:], block=(1, block), **attrs)
