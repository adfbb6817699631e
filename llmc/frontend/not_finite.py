"""Counts the numbers of weights that are NaN or infinite while the weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

# By dtype: an integer of its width, the bits without the sign, and the smallest value of those that is not a finite
# number. Comparing integers is several times faster than converting narrow floats.
BITS: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {
        "f64": ("u8", (1 << 63) - 1, 0x7FF << 52), "f32": ("u4", (1 << 31) - 1, 0x7F800000),
        "bf16": ("u2", 0x7FFF, 0x7F80), "f16": ("u2", 0x7FFF, 0x7C00), "f8e4m3": ("u1", 0x7F, 0x7F),
        "f8e5m2": ("u1", 0x7F, 0x7C),
    }
)  # fmt: skip


class NotFinite:
    """Counts the numbers of each weight that are not finite. Several threads may count at a time."""

    def __init__(self) -> None:
        """Start with no weights."""
        self.counts: list[tuple[str, int]] = []  # (weight, number of such values) of each block of rows with some

    def count(self, name: str, rows: np.ndarray, dtype: str) -> None:
        """Count the numbers of rows of a weight that are not finite; `dtype` is the IR's name of the dtype."""
        if dtype not in BITS or not rows.size:
            return
        kind, mask, infinity = BITS[dtype]
        magnitude = rows.view(kind) & np.array(mask, kind)
        if magnitude.max() >= infinity:
            self.counts.append((name, int((magnitude >= infinity).sum())))

    @property
    def note(self) -> str:
        """A sentence that names weights with such numbers; "" if there are none."""
        if not self.counts:
            return ""
        names = list(dict.fromkeys(name for name, _ in self.counts))
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more weights" if len(names) > 3 else "")
        count = sum(n for _, n in self.counts)
        numbers, are = ("number", "is") if count == 1 else ("numbers", "are")
        return f"{count} {numbers} of {listed} {are} NaN or infinite, as stored or in the dtype of the compiled model"
