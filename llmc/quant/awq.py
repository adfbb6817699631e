"""AWQ checkpoints in the layout "gemm" (AutoAWQ): 4-bit integers packed along n, eight to a word, interleaved.

Tensors of a weight [n, k]: qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales [groups, n]. Column c of the
eight in a word is in bits 4 * ORDER[c]. Zero points are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.quant.scheme import Codes, Stored, check_not_left_out, integer, last_part, refuse, shape_of

PARTS = ("qweight", "qzeros", "scales", "weight")
PLAIN = ("modules_to_not_convert",)
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq:
    """The scheme of one checkpoint."""

    group_size: int
    plain: Mapping[str, Any]  # lists of modules that are not quantised, by their keys

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        return last_part(name, PARTS)

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        check_not_left_out(stored, self.plain, "awq")
        return unpack(stored, self.group_size)


def awq(config: Mapping[str, Any]) -> Awq:
    """The scheme of a quantization_config; raises Diagnostic E307 or E340."""
    layout = config.get("version") or config.get("format") or "gemm"
    if str(layout).lower() != "gemm":
        raise refuse("awq", "version", layout, ("gemm",))
    bits = integer(config, "bits" if "bits" in config else "w_bit", "awq", 4)
    if bits != 4:
        raise refuse("awq", "bits", bits, (4,))
    size = integer(config, "group_size" if "group_size" in config else "q_group_size", "awq", 128)
    return Awq(size, {key: config.get(key) for key in PLAIN})


def unpack(stored: Stored, group_size: int) -> Codes:
    """The codes of a weight in AWQ's layout; raises Diagnostic E340, E341 or E342."""
    b = stored.build
    words, scales = stored.part("qweight", ("i32",), 2), stored.part("scales", ("f16", "bf16", "f32"), 2)
    k, n = shape_of(words)[0], shape_of(words)[1] * 8
    size = group_size if group_size > 0 else k
    count = -(-k // size)
    stored.expect(scales, count, n)
    stored.check_scales(scales)
    zeros = stored.part("qzeros", ("i32",), 2)
    stored.expect(zeros, count, n // 8)
    code, zero = (
        b.unpack_bits(b.transpose(x, perm=(1, 0)), bits=4, axis=0, size=n, order=ORDER) for x in (words, zeros)
    )
    return Codes(code, b.transpose(scales, perm=(1, 0)), (1, 0 if size >= k else size), "awq 4 bit", zero)
