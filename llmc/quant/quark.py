"""Checkpoints of AMD Quark (`quant_method: quark`), as its safetensors export writes them.

The configuration gives a weight its dtype and scheme: the first pattern of `layer_quant_config` that matches the
module's name, else its class in `layer_type_quant_config`, else `global_quant_config`.

dtype         weight of [n, k]
fp8_e4m3      float8_e4m3 [n, k]
int8, uint8   int8 or uint8 [n, k]; [k, n] with the scheme per_group
int4, uint4   int32 [n, k / 8]; [k, n / 8] with the scheme per_group: eight codes of 4 bits in a word, in the order of
              AWQ if `pack_method` of `export` is "reorder" (the default), else the lowest bits first. int4 is signed.
fp4           uint8 [n, k / 2], 4-bit floats, the low four bits first

weight_scale is one number (per_tensor), [n] (per_channel), or [n, k / group_size] (per_group), whose transpose is
stored for integers; for fp4, bytes are exponents of powers of two. weight_zero_point has the shape of the scale, packed
as the weight is, and may be missing for floats. A value is `(code - zero) * scale`. Products may round activations to 8
bits (`input_tensors`); stored scales of activations are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Value
from llmc.quant.awq import ORDER
from llmc.quant.scheme import AGAIN, Codes, PartNames, Stored, integer, refuse, shape_of, supported, table

METHOD = "quark"
PARTS = (
    "weight", "weight_scale", "weight_zero_point", "weight_scale_2", "weight_zero_point_2", "input_scale",
    "input_zero_point", "input_scale_2", "input_zero_point_2", "output_zero_point", "input_rotation", "input_prescale",
)  # fmt: skip
DTYPES = ("fp8_e4m3", "int8", "uint8", "int4", "uint4", "fp4")
SCHEMES = ("per_tensor", "per_channel", "per_group")
INPUT_CHANGES = ("input_rotation", "input_prescale")  # weights whose inputs are changed
PACKS = ("reorder", "order")


@dataclass(frozen=True)
class Quark(PartNames):
    """The scheme of one checkpoint. rules: settings by pattern of names; classes: by class; rest: of other modules."""

    parts = PARTS
    rules: Mapping[str, Any]
    classes: Mapping[str, Any]
    rest: Any
    order: tuple[int, ...]

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        for part in INPUT_CHANGES:
            if part in stored.parts:
                raise refuse(METHOD, "tensor", stored.parts[part].name, ("weights of unchanged inputs",))
        settings = self._settings(stored)
        weight = _weight_settings(settings, stored)
        if isinstance(weight, list):
            raise refuse(METHOD, f"scales of scales of {stored.module}", len(weight), ("one scale",))
        return replace(_decoded(stored, weight, self.order), act=_act(settings.get("input_tensors")))

    def _settings(self, stored: Stored) -> Mapping[str, Any]:
        """Return the settings of a module; raises Diagnostic E340 if it has none."""
        settings = next((s for pattern, s in self.rules.items() if fnmatch(stored.module, pattern)), None)
        settings = settings or next((self.classes[c] for c in stored.classes if c in self.classes), self.rest)
        if not isinstance(settings, dict):
            cause = f"{stored.module} is quantised, and quantization_config ({METHOD}) has no settings for it"
            raise Diagnostic("E340", cause, AGAIN)
        return settings


def quark(config: Mapping[str, Any]) -> Quark:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340."""
    export = config.get("export") or {}
    pack = export.get("pack_method") or PACKS[0] if isinstance(export, dict) else None
    supported(METHOD, "pack_method", pack, PACKS)
    supported(METHOD, "weight_format", export.get("weight_format") or "real_quantized", ("real_quantized",))
    rules, classes = (table(config, key, METHOD) for key in ("layer_quant_config", "layer_type_quant_config"))
    return Quark(rules, classes, config.get("global_quant_config"), ORDER if pack == PACKS[0] else ())


def _weight_settings(settings: Mapping[str, Any], stored: Stored) -> Any:
    weight = settings.get("weight")
    if not isinstance(weight, dict | list):
        cause = f"{stored.module} is quantised, and quantization_config ({METHOD}) has weight = {str(weight)[:80]!r}"
        raise Diagnostic("E340", cause, AGAIN)
    return weight


def _act(settings: Any) -> str:
    """Return the dtype of activations that products can round to."""
    known = {"int8": "i8", "fp8_e4m3": "f8e4m3"}
    return known.get(str(settings.get("dtype")), "") if isinstance(settings, dict) else ""


def _decoded(stored: Stored, weight: Mapping[str, Any], order: tuple[int, ...]) -> Codes:
    b = stored.build
    kind = supported(METHOD, f"dtype of {stored.module}", weight.get("dtype"), DTYPES)
    scheme = supported(METHOD, f"qscheme of {stored.module}", weight.get("qscheme"), SCHEMES)
    if (axis := weight.get("ch_axis")) not in {"per_tensor": (axis,), "per_channel": (0, -2)}.get(scheme, (1, -1)):
        raise refuse(METHOD, f"ch_axis of {stored.module}", axis, (0 if scheme == "per_channel" else -1,))
    turned = scheme == "per_group" and "int" in kind
    code = _codes(stored, kind, order)
    n, k = reversed(shape_of(code)) if turned else shape_of(code)
    code = b.transpose(code, perm=(1, 0)) if turned else code
    size = integer(weight, "group_size", METHOD) if scheme == "per_group" else 0
    if scheme == "per_group" and (size < 1 or k % size):
        raise refuse(METHOD, f"group_size of {stored.module} with {k} columns", size, ("divisors of the columns",))
    counts = {"per_tensor": (1, 1), "per_channel": (n, 1)}.get(scheme) or (n, k // size)
    scale = _placed(stored, stored.part("weight_scale", (*FLOATS, "u8", "f8e8m0")), counts, turned)
    stored.check_scales(stored.parts["weight_scale"])
    if scale.type.dtype == "u8":
        scale = b.bitcast(scale, dtype="f8e8m0")
    block = {"per_tensor": (0, 0), "per_channel": (1, 0)}.get(scheme) or (1, size if size < k else 0)
    if kind in ("fp8_e4m3", "fp4"):
        return Codes(code, scale, block, f"quark {kind[:3]}", values="e2m1" if kind == "fp4" else "")
    return Codes(code, scale, block, f"quark {kind}", _zero(stored, kind, order, counts, turned))


def _codes(stored: Stored, kind: str, order: tuple[int, ...]) -> Value:
    """Return the codes as they are stored, unpacked along the last axis; signed codes of 4 bits plus 8."""
    stored_as = {"fp8_e4m3": "f8e4m3", "int8": "i8", "uint8": "u8", "fp4": "u8"}.get(kind, "i32")
    words = stored.part("weight", (stored_as,), 2)
    return _unpacked(stored, words, kind, order)


def _unpacked(stored: Stored, words: Value, kind: str, order: tuple[int, ...]) -> Value:
    b, last = stored.build, words.type.rank - 1
    if kind == "fp4":
        return b.unpack_bits(words, bits=4, axis=last, size=2 * shape_of(words)[last])
    if kind not in ("int4", "uint4"):
        return words
    add = 8 if kind == "int4" else 0
    return b.unpack_bits(words, bits=4, axis=last, size=8 * shape_of(words)[last], order=order, add=add)


def _placed(stored: Stored, value: Value, counts: tuple[int, int], turned: bool) -> Value:
    """Return scales or zero points as [blocks of n, blocks of k]; raises Diagnostic E341."""
    b, shape = stored.build, shape_of(value)
    if turned:
        stored.expect(value, counts[1], counts[0])
        return b.transpose(value, perm=(1, 0))
    if int(np.prod(shape)) != counts[0] * counts[1] or (len(shape) == 2 and shape != counts):
        stored.expect(value, *counts)
    return b.reshape(value, shape=counts)


def _zero(stored: Stored, kind: str, order: tuple[int, ...], counts: tuple[int, int], turned: bool) -> Value | int:
    """Return the zero points in the range of the unpacked codes: one number if all are equal."""
    middle = 8 if kind == "int4" else 0
    if "weight_zero_point" not in stored.parts:
        return middle
    words = stored.part("weight_zero_point", ("i32", "i8", "u8"))
    if not stored.load(words.name).any():
        return middle
    if words.type.dtype != "i32" or kind not in ("int4", "uint4"):
        return _placed(stored, words, counts, turned)
    if words.type.rank == 0:
        raise Diagnostic("E341", f"{words.name} is {words.type}; words of zero points are expected", AGAIN)
    return _placed(stored, _unpacked(stored, words, kind, order), counts, turned)
