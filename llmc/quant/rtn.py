"""The formats that `llmc compile --quant` makes by rounding to nearest, without calibration."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Name -> (dtype of the codes, block of weights that share a scale, dtype of the scales, zero point); see QFormat.
RTN: Mapping[str, tuple[str, tuple[int, int], str, str]] = MappingProxyType(
    {
        "int8": ("i8", (1, 0), "f32", ""),
        "int4": ("u4", (1, 128), "bf16", "8"),
    }
)
NONE = "none"
