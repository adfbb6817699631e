"""MXFP4 checkpoints such as OpenAI's gpt-oss: experts in 4-bit floats with a power-of-two scale per 32 columns.

Tensors of a weight [experts, n, k]: NAME_blocks uint8 [experts, n, k / 32, 16], the low four bits first, and
NAME_scales uint8 [experts, n, k / 32], exponents biased by 127 (OCP Microscaling Formats 1.0). The model holds
[experts, k, n].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.quant.scheme import Codes, Stored, shape_of

GROUP = 32


class Mxfp4:
    """The scheme of a checkpoint."""

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        for part in ("blocks", "scales"):
            if name.endswith(f"_{part}"):
                return name.removesuffix(f"_{part}"), part
        return None

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        b, blocks = stored.build, stored.part("blocks", ("u8",), 4)
        experts, n, groups, _ = shape_of(blocks)
        stored.expect(blocks, experts, n, groups, GROUP // 2)
        scale = stored.scales("scales", ("u8",), experts, n, groups)
        octets = b.reshape(blocks, shape=(experts, n, groups * GROUP // 2))
        code = b.unpack_bits(octets, bits=4, axis=2, size=groups * GROUP)
        return Codes(code, scale, (1, GROUP), "mxfp4", values="e2m1", transposed=True)


def mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    """Return the scheme of a quantization_config."""
    return Mxfp4()
