"""EETQ checkpoints (`quant_method: eetq`): 8-bit integers with a scale for each row, in the order of GPU kernels.

Tensors of a weight [n, k]: weight int8 [k, n] and weight_scales float16 [n]. The shape of `weight` is not that of its
content, which is in the order that the mixed products of FasterTransformer read on NVIDIA GPUs from Turing on: pairs
of rows alternate in runs of 64 columns; each run of 16 columns has its even ones first, as pairs of neighbours whose
halves are exchanged; and codes are stored plus 128. With columns of a run of 16 as `half * 8 + place`, byte
`place * 2 + half` is that column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.quant.scheme import Codes, PartNames, Stored, refuse, shape_of, supported

METHOD = "eetq"
PARTS = ("weight", "weight_scales")
RUN_COLUMNS = 64  # columns of a row that are stored together


class Eetq(PartNames):
    """The scheme of a checkpoint."""

    parts = PARTS

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        b, weight = stored.build, stored.part("weight", ("i8",), 2)
        k, n = shape_of(weight)
        if n % 2 or k % RUN_COLUMNS:
            raise refuse(
                METHOD, f"shape of {stored.name}", [n, k], (f"even rows, columns of a multiple of {RUN_COLUMNS}",)
            )
        scale = stored.scales("weight_scales", ("f16",), n)
        # pairs of rows, runs of columns, row in the pair, 16 columns, place, half
        parts = b.reshape(b.bitcast(weight, dtype="u8"), shape=(n // 2, k // RUN_COLUMNS, 2, RUN_COLUMNS // 16, 8, 2))
        code = b.reshape(b.transpose(parts, perm=(0, 2, 1, 3, 5, 4)), shape=(n, k))
        return Codes(code, b.reshape(scale, shape=(n, 1)), (1, 0), METHOD, zero=128)


def eetq(config: Mapping[str, Any]) -> Eetq:
    """Return the scheme of a quantization_config; raises Diagnostic E307."""
    supported(METHOD, "weights", config.get("weights") or "int8", ("int8",))
    return Eetq()
