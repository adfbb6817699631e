"""AWQ checkpoints in the layouts "gemm" and "gemv" of AutoAWQ: 4-bit integers, eight to a word.

Tensors of a weight [n, k] in the layout "gemm": qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales
[groups, n]. Column c of the eight in a word is in bits 4 * ORDER[c]. In the layout "gemv": qweight int32 [n, k / 8],
qzeros int32 [n, words], scales [n, 8 * words], the lowest bits first; of the scales and zero points, the first ones are
those of the groups, and the rest is padding. Zero points are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.quant.scheme import Codes, PartNames, Stored, columns_of_group, integer, refuse, shape_of, supported

PARTS = ("qweight", "qzeros", "scales", "weight")
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
LAYOUTS = ("gemm", "gemv")
OTHER_BACKEND = "llm-awq"  # a value of `backend` that means another layout, for any `version`
LABEL = "awq 4 bit"


@dataclass(frozen=True)
class Awq(PartNames):
    """The scheme of one checkpoint."""

    parts = PARTS
    group_size: int
    layout: str = LAYOUTS[0]

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        return unpack(stored, self.group_size) if self.layout == "gemm" else unpack_rows(stored, self.group_size)


def awq(config: Mapping[str, Any]) -> Awq:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340."""
    layout = str(config.get("version") or config.get("format") or LAYOUTS[0]).lower()
    supported("awq", "version", layout, LAYOUTS)
    if config.get("backend") == OTHER_BACKEND:
        raise refuse("awq", "backend", OTHER_BACKEND, ("autoawq",))
    supported("awq", "bits", integer(config, "bits" if "bits" in config else "w_bit", "awq", 4), (4,))
    key = "group_size" if "group_size" in config else "q_group_size"
    return Awq(columns_of_group(config, key, "awq", 128), layout)


def unpack(stored: Stored, group_size: int) -> Codes:
    """Return the codes of a weight in the layout "gemm"; raises Diagnostic E340, E341 or E342."""
    b, words = stored.build, stored.part("qweight", ("i32",), 2)
    k, n = shape_of(words)[0], shape_of(words)[1] * 8
    size = group_size if group_size > 0 else k
    count = -(-k // size)
    scales = stored.scales("scales", ("f16", "bf16", "f32"), count, n)
    zeros = stored.part("qzeros", ("i32",), 2)
    stored.expect(zeros, count, n // 8)
    code, zero = (
        b.unpack_bits(b.transpose(x, perm=(1, 0)), bits=4, axis=0, size=n, order=ORDER) for x in (words, zeros)
    )
    return Codes(code, b.transpose(scales, perm=(1, 0)), (1, 0 if size >= k else size), LABEL, zero)


def unpack_rows(stored: Stored, group_size: int) -> Codes:
    """Return the codes of a weight in the layout "gemv"; raises Diagnostic E340, E341 or E342."""
    b = stored.build
    words, scales = stored.part("qweight", ("i32",), 2), stored.part("scales", ("f16", "bf16", "f32"), 2)
    zeros = stored.part("qzeros", ("i32",), 2)
    n, k = shape_of(words)[0], shape_of(words)[1] * 8
    size = group_size if group_size > 0 else k
    count, stored_count = -(-k // size), shape_of(zeros)[1] * 8
    stored.expect(zeros, n, max(-(-count // 8), shape_of(zeros)[1]))
    stored.expect(scales, n, stored_count)
    stored.check_scales(scales, lambda stored_scales: stored_scales[:, :count])
    code = b.unpack_bits(words, bits=4, axis=1, size=k)
    zero = b.unpack_bits(zeros, bits=4, axis=1, size=count)
    scale = scales if count == stored_count else b.slice(scales, axis=1, start=0, stop=count, step=1)
    return Codes(code, scale, (1, 0 if size >= k else size), LABEL, zero)
