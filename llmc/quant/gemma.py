"""Quantised Gemma checkpoints of transformers (`quant_method: gemma`): 2, 4 or 8 bits, a scale for each row.

Tensors of a weight [n, k]: weight, int8 [n, k] for 8 bits, else uint8 [n, ceil(k / f)], whose f fields are codes plus
2 ** (bits - 1), the lowest bits first; and weight_scale float32 [n, 1]. Of an embedding: embedding_quantized and
embedding_scale, which may have one entry for each of several blocks of columns. The bits are `num_bits`, or those of
the first pattern in `module_quant_configs` that is found in the module's name. input_activation_scale and
output_activation_scale are scales of activations (0: none), which are not used; the former asks for 8-bit activations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import FLOATS
from llmc.quant.scheme import AGAIN, Codes, PartNames, Stored, integer, refuse, shape_of, supported

METHOD = "gemma"
TABLE, TABLE_SCALE = "embedding_quantized", "embedding_scale"
INPUT = "input_activation_scale"
PARTS = ("weight", "weight_scale", TABLE, TABLE_SCALE, INPUT, "output_activation_scale")
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Gemma(PartNames):
    """The scheme of one checkpoint. bits: of modules that no pattern matches. rules: patterns and their bits."""

    parts = PARTS
    bits: int
    rules: tuple[tuple[re.Pattern[str], int], ...]

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        b, bits = stored.build, self._bits(stored.module)
        name, scale_name = (TABLE, TABLE_SCALE) if TABLE in stored.parts else ("weight", "weight_scale")
        code = stored.part(name, ("i8" if bits == 8 else "u8",), 2)
        scale = stored.part(scale_name, FLOATS, 2)
        stored.check_scales(scale)
        n = shape_of(code)[0]
        k = stored.shape[1] if len(stored.shape) == 2 else shape_of(code)[1] * (8 // bits)
        if bits != 8:  # the last byte of a row may have fields of no column
            stored.expect(code, n, -(-k * bits // 8))
            code = b.unpack_bits(code, bits=bits, axis=1, size=k)
        blocks = shape_of(scale)[1]
        if name == "weight" or not blocks or k % blocks:
            blocks = 1
        stored.expect(scale, n, blocks)
        zero = 0 if bits == 8 else 1 << bits - 1
        size = k // blocks if blocks > 1 else 0
        act = "i8" if INPUT in stored.parts and self._rounds(stored) else ""
        return Codes(code, scale, (1, size), f"{METHOD} {bits} bit", zero=zero, act=act)

    def _bits(self, module: str) -> int:
        return next((bits for pattern, bits in self.rules if pattern.search(module)), self.bits)

    def _rounds(self, stored: Stored) -> bool:
        """Whether the inputs of a product are rounded to 8 bits."""
        value = stored.parts[INPUT]
        stored.number(INPUT, FLOATS)
        stored.check_finite(value)
        return bool(stored.load(value.name).any())


def gemma(config: Mapping[str, Any]) -> Gemma:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340."""
    rules, bits = [], integer(config, "num_bits", METHOD, 4)
    named = config.get("module_quant_configs") or {}
    if not isinstance(named, Mapping) or not all(isinstance(rule, Mapping) for rule in named.values()):
        raise Diagnostic("E340", f"quantization_config ({METHOD}) has module_quant_configs that are not rules", AGAIN)
    for pattern, rule in named.items():
        if unknown := rule.keys() - {"num_bits"}:
            raise refuse(METHOD, f"module_quant_configs of {pattern}", sorted(unknown)[0], ("num_bits",))
        try:
            rules.append((re.compile(pattern), integer(rule, "num_bits", METHOD, bits)))
        except re.error as e:
            raise Diagnostic("E340", f"module_quant_configs has the pattern {pattern!r}: {e}", AGAIN) from None
    for num_bits in (bits, *(width for _, width in rules)):
        supported(METHOD, "num_bits", num_bits, BITS)
    return Gemma(bits, tuple(rules))
