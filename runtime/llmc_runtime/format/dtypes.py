"""The dtypes of artifacts: the bits of a stored element, and the names in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Our name -> (bits, name in safetensors). Files have no names for elements of less than a byte: these are plain bytes.
_DTYPES: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "f64": (64, "F64"), "f32": (32, "F32"), "bf16": (16, "BF16"), "f16": (16, "F16"), "f8e4m3": (8, "F8_E4M3"),
        "f8e4m3fnuz": (8, "F8_E4M3FNUZ"), "f8e5m2": (8, "F8_E5M2"), "f8e8m0": (8, "F8_E8M0"), "i64": (64, "I64"),
        "i32": (32, "I32"), "u32": (32, "U32"), "i16": (16, "I16"), "u16": (16, "U16"), "i8": (8, "I8"),
        "u8": (8, "U8"), "bool": (8, "BOOL"), "i4": (4, ""), "u4": (4, ""),
    }
)  # fmt: skip
# Shapes count elements; a buffer's size in bytes is a separate expression.
DTYPE_BITS: Mapping[str, int] = MappingProxyType({ours: bits for ours, (bits, _) in _DTYPES.items()})
SAFETENSORS_NAMES: Mapping[str, str] = MappingProxyType({ours: name for ours, (_, name) in _DTYPES.items() if name})
# Of all dtypes that a file may have, also of those that we do not use.
SAFETENSORS_BITS: Mapping[str, int] = MappingProxyType(
    {name: bits for bits, name in _DTYPES.values() if name} | {"U64": 64, "C64": 64}
)
