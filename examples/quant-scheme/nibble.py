"""A quantisation scheme: 4-bit integers from -8 to 7, two to a byte, and one step for each row.

Tensors of a weight [n, k]: codes uint8 [n, k / 2], the low four bits first, and step float16 [n].
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llmc.extend import Extension
from llmc.extend.quant import Codes, Stored, last_part, shape_of


class Nibble:
    """The scheme of one checkpoint."""

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        return last_part(name, ("codes", "step"))

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        build = stored.build
        packed, step = stored.part("codes", ("u8",), 2), stored.part("step", ("f16",), 1)
        n, columns = shape_of(packed)
        stored.expect(step, n)
        stored.check_scales(step)
        code = build.unpack_bits(packed, bits=4, axis=1, size=2 * columns)
        return Codes(code, build.reshape(step, shape=(n, 1)), block=(1, 0), label="nibble", zero=8)


def nibble(config: Mapping[str, Any]) -> Nibble:
    """The scheme of a quantization_config."""
    return Nibble()


EXTENSION = Extension(name="llmc-nibble", schemes=MappingProxyType({"nibble": "nibble:nibble"}))
