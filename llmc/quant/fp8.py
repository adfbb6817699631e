"""FP8 checkpoints of transformers, DeepSeek and Qwen (`quant_method: fp8`).

Tensors of a weight [n, k]: weight float8_e4m3 [n, k] and its scale, named weight_scale_inv or weight_scale. Both are
multipliers, despite the former's name; a scale is of the tensor, of rows [n] or [n, 1], or of tiles
(`weight_block_size`; the last ones may be cut). Products may round activations to float8 (`Codes.act`), whatever
`activation_scheme` says of their scales; stored ones (input_scale, activation_scale) are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.quant.scheme import AGAIN, Codes, Stored, block_of, last_part, refuse, shape_of

SCALES = ("weight_scale_inv", "weight_scale")
ACT = "f8e4m3"
ACTIVATIONS = ("dynamic", "static")  # values of activation_scheme
PARTS = ("weight", *SCALES, "input_scale", "activation_scale", "input_scale_ub")


@dataclass(frozen=True)
class Fp8:
    """The scheme of one checkpoint. `block`: rows and columns of a tile of `weight_block_size`, or (0, 0)."""

    block: tuple[int, int]

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        return last_part(name, PARTS)

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        return replace(scaled(stored, self.block), act=ACT)


def fp8(config: Mapping[str, Any]) -> Fp8:
    """The scheme of a quantization_config; raises Diagnostic E307 or E340."""
    kind = config.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise refuse("fp8", "fmt", kind, ("e4m3",))
    if (scheme := config.get("activation_scheme") or "dynamic") not in ACTIVATIONS:
        raise refuse("fp8", "activation_scheme", scheme, ACTIVATIONS)
    if config.get("expert_dtype") not in (None, "fp8"):
        raise refuse("fp8", "expert_dtype", config["expert_dtype"], ("fp8",))
    return Fp8(tile(config.get("weight_block_size"), "fp8"))


def tile(size: Any, method: str) -> tuple[int, int]:
    """A block size of a configuration as (rows, columns), (0, 0) if there is none; raises Diagnostic E340."""
    if size is None:
        return 0, 0
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(x) is int and x > 0 for x in size):
        raise Diagnostic("E340", f"quantization_config ({method}) has the block size {str(size)[:80]!r}", AGAIN)
    return size[0], size[1]


def scaled(stored: Stored, block: tuple[int, int]) -> Codes:
    """The codes of a float8 weight and its scale; raises Diagnostic E340, E341 or E342."""
    code = stored.part("weight", ("f8e4m3",), 2)
    found = [name for name in SCALES if name in stored.parts]
    if len(found) > 1:
        raise Diagnostic("E340", f"{stored.module} has two scales: {' and '.join(found)}", AGAIN)
    scale = stored.part(found[0] if found else SCALES[0], ("f32", "bf16", "f16", "f8e8m0", "u8"))
    stored.check_scales(scale)
    if scale.type.dtype == "u8":
        scale = stored.build.bitcast(scale, dtype="f8e8m0")
    n, k = shape_of(code)
    value, size = block_of(stored, scale, n, k, block)
    return Codes(code, value, size, "fp8")
