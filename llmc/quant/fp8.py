"""FP8 checkpoints of transformers, DeepSeek and Qwen (`fp8`, `mxfp8`), GPTQModel (`fp8`) and FBGEMM (`fbgemm_fp8`).

Tensors of a weight [n, k]: weight float8_e4m3 [n, k] and its scale, named weight_scale_inv or weight_scale. Both are
multipliers, despite the former's name, except with `weight_scale_semantics` "inverse" (GPTQModel), where the scale is a
divisor; a scale is of the tensor, of rows [n] or [n, 1], or of tiles (`weight_block_size`; the last ones may be cut).
Experts may be one stack NAME [experts, n, k], as transformers 5 holds them, with NAME_scale_inv [experts, ...]; without
tiles, a stack of gate and up has a scale for each half of its rows. Products may round activations to float8
(`Codes.act`). Their scales are computed at run time: `activation_scheme` and stored scales (input_scale,
activation_scale) are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.quant.scheme import AGAIN, POWER_COLUMNS, Codes, Stored, block_of, last_part, refuse, shape_of, supported

SCALES = ("weight_scale_inv", "weight_scale")
SCALE_DTYPES = ("f32", "bf16", "f16", "f8e8m0", "u8")
STACK_PARTS = ("scale_inv", "activation_scale")  # suffixes of the tensors of an expert stack: NAME_scale_inv, ...
ACT = "f8e4m3"
ACTIVATIONS = ("dynamic", "static")  # values of activation_scheme
FORMATS = ("e4m3", "float8_e4m3fn")  # values of fmt and of format
DIVISOR_SEMANTICS = "inverse"  # the value of weight_scale_semantics
PARTS = ("weight", *SCALES, "input_scale", "activation_scale", "input_scale_ub")


@dataclass(frozen=True)
class Fp8:
    """The scheme of one checkpoint. `block`: rows and columns of a tile of `weight_block_size`, or (0, 0).

    divides: whether scales are divisors.
    """

    block: tuple[int, int]
    divides: bool = False

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`. Any other tensor may be a stack of experts."""
        for part in STACK_PARTS:
            if name.endswith(f"_{part}") and not name.endswith(SCALES):
                return name.removesuffix(f"_{part}"), part
        return last_part(name, PARTS) or (name, "weight")

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        weight = stored.parts.get("weight")
        decoder = stack if weight is not None and weight.type.rank == 3 else scaled
        codes, b = decoder(stored, self.block), stored.build
        scale = b.div(b.constant(1.0, "f32"), b.cast(codes.scale, dtype="f32")) if self.divides else codes.scale
        return replace(codes, scale=scale, act=ACT)


def fp8(config: Mapping[str, Any]) -> Fp8:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340."""
    for key in ("fmt", "format"):
        if (kind := config.get(key) or FORMATS[0]) not in (*FORMATS, "fp8"):
            raise refuse("fp8", key, kind, FORMATS)
    if (meaning := config.get("weight_scale_semantics")) not in (None, DIVISOR_SEMANTICS):
        raise refuse("fp8", "weight_scale_semantics", meaning, (DIVISOR_SEMANTICS,))
    supported("fp8", "activation_scheme", config.get("activation_scheme") or "dynamic", ACTIVATIONS)
    if config.get("expert_dtype") not in (None, "fp8"):
        raise refuse("fp8", "expert_dtype", config["expert_dtype"], ("fp8",))
    return Fp8(tile(config.get("weight_block_size"), "fp8"), meaning is not None)


def mxfp8(config: Mapping[str, Any]) -> Fp8:
    """Return the scheme of a quantization_config of 8-bit floats with a power of two for each 32 columns."""
    return fp8({**config, "weight_block_size": config.get("weight_block_size") or (1, POWER_COLUMNS)})


def fbgemm_fp8(config: Mapping[str, Any]) -> Fp8:
    """Return the scheme of a quantization_config of FBGEMM: one scale for each row, weight_scale [n, 1]."""
    return Fp8((0, 0))


def tile(size: Any, method: str) -> tuple[int, int]:
    """Return a block size of a configuration as (rows, columns), (0, 0) if there is none; raises Diagnostic E340."""
    if size is None:
        return 0, 0
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(x) is int and x > 0 for x in size):
        raise Diagnostic("E340", f"quantization_config ({method}) has the block size {str(size)[:80]!r}", AGAIN)
    return size[0], size[1]


def scaled(stored: Stored, block: tuple[int, int]) -> Codes:
    """Return the codes of a float8 weight and its scale; raises Diagnostic E340, E341 or E342."""
    code = stored.part("weight", ("f8e4m3",), 2)
    scales = [name for name in SCALES if name in stored.parts]
    if len(scales) > 1:
        raise Diagnostic("E340", f"{stored.module} has two scales: {' and '.join(scales)}", AGAIN)
    scale = stored.scales(scales[0] if scales else SCALES[0], SCALE_DTYPES)
    n, k = shape_of(code)
    value, size = block_of(stored, scale, n, k, block)
    return Codes(code, value, size, "fp8")


def stack(stored: Stored, block: tuple[int, int]) -> Codes:
    """Return the codes of a stack of experts [experts, n, k] and its scale; raises Diagnostic E340, E341 or E342.

    The scale is of experts [experts] or [experts, 1, 1], of rows [experts, n, 1], or of tiles; a stack of two matrices
    that share no tile has [experts, 2, columns].
    """
    code, scale = stored.part("weight", ("f8e4m3",), 3), stored.scales("scale_inv", SCALE_DTYPES)
    experts, n, k = shape_of(code)
    if shape_of(scale) in ((experts,), (experts, 1)):
        scale = stored.build.reshape(scale, shape=(experts, 1, 1))
    rows, columns = (-(-length // part) if part else 1 for length, part in zip((n, k), block, strict=True))
    shape = shape_of(scale)
    if shape == (experts, n, 1):
        return Codes(code, scale, (1, 0), "fp8")
    if shape == (experts, 2, columns) and rows == 1 and n % 2 == 0:
        return Codes(code, scale, (n // 2, block[1]), "fp8")
    stored.expect(scale, experts, rows, columns)
    return Codes(code, scale, block, "fp8")
