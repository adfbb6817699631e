"""optimum-quanto checkpoints in safetensors (`quanto_qmap.json` next to config.json, or `quant_method: quanto`).

The file names the type of each module's weight. Tensors of a weight X.weight [n, k]:

qint8, qfloat8*   X.weight._data int8 or float8 [n, k]; X.weight._scale of the tensor or of rows [n, 1]
qint4, qint2      X.weight._data._data uint8; X.weight._scale and X.weight._shift [n * k / g, 1] of groups of g columns

The packed codes are those of a matrix [n * k / g, g], of which each row is a group: if a byte has f fields and the
tensor R rows, field i of row r, from the lowest bits up, is row i * R + r. A value is `code * scale - shift`, or
`(code - shift) * scale` if the shift is an integer. X.input_scale and X.output_scale are scales of activations, which
are not used; the bytes do not tell n and k, which are those of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import FLOATS
from llmc.quant.scheme import AGAIN, Codes, Stored, block_of, last_part, refuse, shape_of, supported, with_offsets

METHOD = "quanto"
ACTIVATIONS = ("input_scale", "output_scale")
PACKED = "_data._data"
# Types of weights -> the dtype of unpacked codes, or the bits of packed ones.
TYPES: Mapping[str, str | int] = MappingProxyType(
    {"qint8": "i8", "qfloat8": "f8e4m3", "qfloat8_e4m3fn": "f8e4m3", "qfloat8_e5m2": "f8e5m2", "qint4": 4, "qint2": 2}
)
# `weights` of transformers' QuantoConfig, for all modules -> the type.
NAMES: Mapping[str, str] = MappingProxyType({"int8": "qint8", "float8": "qfloat8", "int4": "qint4", "int2": "qint2"})
ACTS: Mapping[str, str] = MappingProxyType({"qint8": "i8", "qfloat8": "f8e4m3", "qfloat8_e4m3fn": "f8e4m3"})


@dataclass(frozen=True)
class Quanto:
    """The scheme of a checkpoint. modules: the entries of quanto_qmap.json. everywhere: the type of all others."""

    modules: Mapping[str, Any]
    everywhere: str

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        module, separator, part = name.rpartition(".weight._")
        if separator:
            return f"{module}.weight", f"_{part}"
        return last_part(name, ("weight", *ACTIVATIONS))

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        kind, activations = self._types(stored)
        form = TYPES[kind]
        codes = _packed(stored, kind, form) if isinstance(form, int) else _plain(stored, kind, form)
        return replace(codes, act=ACTS.get(activations, ""))

    def _types(self, stored: Stored) -> tuple[str, str]:
        """Return the types of a weight and of its activations; raises Diagnostic E307 or E340."""
        settings = self.modules.get(stored.module, {"weights": self.everywhere} if self.everywhere else None)
        if settings is None:
            raise Diagnostic("E340", f"{stored.module} is quantised, and quanto_qmap.json does not list it", AGAIN)
        if not isinstance(settings, Mapping):
            raise refuse(METHOD, stored.module, settings, ("weights and activations",))
        weights = supported(METHOD, f"weights of {stored.module}", settings.get("weights"), TYPES)
        return str(weights), str(settings.get("activations"))


def quanto(config: Mapping[str, Any]) -> Quanto:
    """Return the scheme of a quantization_config; raises Diagnostic E307."""
    if (weights := config.get("weights")) is None:
        return Quanto(config, "")
    return Quanto(config, NAMES[supported(METHOD, "weights", weights, NAMES)])


def _plain(stored: Stored, kind: str, dtype: str) -> Codes:
    """Return the codes of 8 bits, one for each element."""
    if PACKED in stored.parts:
        raise _contradicts(stored, kind)
    code, scale = stored.part("_data", (dtype,), 2), stored.scales("_scale", FLOATS)
    n, k = shape_of(code)
    factor, block = block_of(stored, scale, n, k, (1, 0))
    return Codes(code, factor, block, f"{METHOD} {kind.removeprefix('q')}")


def _packed(stored: Stored, kind: str, bits: int) -> Codes:
    """Return the codes of fewer bits; groups are runs of columns."""
    if PACKED not in stored.parts and "_data" in stored.parts:
        raise _contradicts(stored, kind)
    b, packed = stored.build, stored.part(PACKED, ("u8",), 2)
    shift = stored.part("_shift", (*FLOATS, "i8", "u8"), 2)
    stored.check_finite(shift)
    if len(stored.shape) != 2:
        raise refuse(METHOD, "weight", stored.name, ("weights of linear modules",))
    (n, k), (rows, size), fields = stored.shape, shape_of(packed), 8 // bits
    groups = n * k // size
    if k % size or rows != -(-groups // fields):
        cause = f"{packed.name} is {packed.type}, which does not hold the {n} x {k} codes of {kind} in groups of {size}"
        raise Diagnostic("E341", cause, AGAIN)
    scale = stored.scales("_scale", FLOATS, groups, 1)
    stored.expect(shift, groups, 1)
    single = b.reshape(packed, shape=(rows, size, 1))
    planes = b.transpose(b.unpack_bits(single, bits=bits, axis=2, size=fields), perm=(2, 0, 1))
    code = b.reshape(planes, shape=(fields * rows, size))
    if fields * rows != groups:
        code = b.slice(code, axis=0, start=0, stop=groups, step=1)
    code = b.reshape(code, shape=(n, k))
    scale, shift = (b.reshape(x, shape=(n, k // size)) for x in (scale, shift))
    label, block = f"{METHOD} {kind.removeprefix('q')}", size if size < k else 0
    if shift.type.dtype not in FLOATS:
        return Codes(code, scale, (1, block), label, b.cast(shift, dtype="f32"))
    return with_offsets(b, code, scale, b.neg(b.cast(shift, dtype="f32")), block, label)


def _contradicts(stored: Stored, kind: str) -> Diagnostic:
    present = ", ".join(sorted(stored.parts))
    return Diagnostic("E340", f"{stored.module} is {kind} by quanto_qmap.json, and the checkpoint has {present}", AGAIN)
