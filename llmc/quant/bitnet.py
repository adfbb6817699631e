"""BitNet checkpoints of transformers (`quant_method: bitnet`): weights of -1, 0 and 1, and one scale.

Tensors of a weight [n, k]: weight uint8 [n / 4, k], codes of 2 bits plus 1, and weight_scale, one number. Bits 2 * i of
row r are row i * n / 4 + r. Weights of the class "bitlinear" are divided by the scale, those of "autobitlinear"
multiplied by it; the latter may also be stored as floats [n, k]. Products round activations to int8 (`Codes.act`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Value
from llmc.quant.scheme import AGAIN, Codes, PartNames, Stored, refuse, shape_of, supported

METHOD = "bitnet"
PARTS = ("weight", "weight_scale")
CLASSES = ("bitlinear", "autobitlinear")
CODES_PER_BYTE = 4  # codes in a byte


@dataclass(frozen=True)
class BitNet(PartNames):
    """The scheme of one checkpoint. divides: whether scales are divisors."""

    parts = PARTS
    divides: bool

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        b = stored.build
        weight, scale = stored.part("weight", ("u8", *FLOATS), 2), stored.number("weight_scale", FLOATS)
        stored.check_scales(stored.parts["weight_scale"])
        scale = b.cast(scale, dtype="f32")
        if self.divides:
            scale = b.div(b.constant(1.0, "f32"), scale)
        if weight.type.dtype != "u8":
            return Codes(weight, scale, (0, 0), METHOD, act="i8")
        _check_codes(stored, weight)
        rows, k = shape_of(weight)
        fields = b.unpack_bits(b.reshape(weight, shape=(rows, k, 1)), bits=2, axis=2, size=CODES_PER_BYTE)
        code = b.reshape(b.transpose(fields, perm=(2, 0, 1)), shape=(CODES_PER_BYTE * rows, k))
        return Codes(code, scale, (0, 0), METHOD, zero=1, act="i8")


def bitnet(config: Mapping[str, Any]) -> BitNet:
    """Return the scheme of a quantization_config; raises Diagnostic E307."""
    kind = supported(METHOD, "linear_class", config.get("linear_class") or CLASSES[0], CLASSES)
    # "online" has weights that every product rounds again.
    supported(METHOD, "quantization_mode", config.get("quantization_mode") or "offline", ("offline",))
    if config.get("use_rms_norm"):
        raise refuse(METHOD, "use_rms_norm", True, (False,))
    return BitNet(kind == CLASSES[0])


def _check_codes(stored: Stored, weight: Value) -> None:
    """Raise Diagnostic E342 for a code of 3, which stands for no number."""
    packed = stored.load(weight.name)
    if (packed & packed >> 1 & 0x55).any():
        raise Diagnostic("E342", f"{weight.name} has codes of 3; those of weights of -1, 0 and 1 are 0, 1 and 2", AGAIN)
