"""Checkpoints of NVIDIA's Model Optimizer (`quant_method: modelopt`), as its unified export writes them.

`quant_algo` names what a weight [n, k] is stored as. It is in `quantization_config` or in `hf_quant_config.json`; with
MIXED_PRECISION, `quantized_layers` has one for each module, or for all modules below a name.

FP8                        weight float8_e4m3 [n, k]; weight_scale float32, one number
FP8_PER_CHANNEL_PER_TOKEN  the same with weight_scale [n] or [n, 1]
FP8_PB_WO                  the same with weight_scale [n / 128, 1, k / 128, 1]; activations are not rounded
NVFP4, NVFP4_AWQ,          weight uint8 [n, k / 2], the low four bits first; weight_scale float8_e4m3 [n, k / 16], times
W4A16_NVFP4,               weight_scale_2 float32, one number
W4A8_NVFP4_FP8
MXFP4, W4A8_MXFP4_FP8      weight as before; weight_scale uint8 [n, k / 32], exponents of powers of two
MXFP8                      weight float8_e4m3 [n, k]; weight_scale as before
W8A16, W8A8_SQ_PER_CHANNEL weight int8 [n, k]; weight_scale [n]
W4A16_AWQ                  weight uint8 [n / 2, k], signed, even rows in the low four bits; weight_scale [n, groups]

All scales are multipliers. Those of activations (input_scale) are not used: products compute a scale for each row.
Instead of scaling inputs by pre_quant_scale [k], the columns of the weight are scaled. A module is quantised if it has
quantised tensors: names in `exclude_modules` (or `ignore`) are not used, because they may be patterns that match parts
of other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import FLOATS
from llmc.quant.decoder import dequantized
from llmc.quant.fp8 import ACT, SCALE_DTYPES, scaled
from llmc.quant.scheme import (
    AGAIN,
    POWER_COLUMNS,
    Codes,
    PartNames,
    Stored,
    block_of,
    microscaled,
    nibbles,
    nvfp4,
    refuse,
    shape_of,
)

PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
TILE, GROUP = 128, 16  # columns that share a scale in FP8_PB_WO and NVFP4
MIXED = "MIXED_PRECISION"


def _rounding(stored: Stored) -> Codes:
    """Decode FP8 weights whose products may round activations."""
    return replace(scaled(stored, (0, 0)), act=ACT)


def _tiles(stored: Stored) -> Codes:
    code, scale = stored.part("weight", ("f8e4m3",), 2), stored.part("weight_scale", SCALE_DTYPES)
    stored.check_scales(scale)
    n, k = shape_of(code)
    if scale.type.rank == 4:
        rows, columns = -(-n // TILE), -(-k // TILE)
        stored.expect(scale, rows, 1, columns, 1)
        scale = stored.build.reshape(scale, shape=(rows, columns))
    value, block = block_of(stored, scale, n, k, (TILE, TILE))
    return Codes(code, value, block, "fp8")


def _nvfp4(stored: Stored) -> Codes:
    return nvfp4(stored, "weight", "weight_scale_2", divides=False)


def _mxfp8(stored: Stored) -> Codes:
    return microscaled(stored, stored.part("weight", ("f8e4m3",), 2), "mxfp8", act=ACT)


def _mxfp4(stored: Stored) -> Codes:
    return microscaled(stored, nibbles(stored, "weight"), "mxfp4", "e2m1")


def _int8(act: str) -> Callable[[Stored], Codes]:
    def decode(stored: Stored) -> Codes:
        code, scale = stored.part("weight", ("i8",), 2), stored.scales("weight_scale", FLOATS)
        n, k = shape_of(code)
        value, block = block_of(stored, scale, n, k, (1, 0))
        return Codes(code, value, block, "int8", act=act)

    return decode


def _int4(stored: Stored) -> Codes:
    """Decode integers with two rows in a byte; the number of scales of a row gives the size of a group."""
    b, packed, scale = stored.build, stored.part("weight", ("u8",), 2), stored.part("weight_scale", FLOATS, 2)
    n, k = shape_of(packed)[0] * 2, shape_of(packed)[1]
    count = shape_of(scale)[1]
    stored.expect(scale, n, count)
    if not count or k % count:
        raise Diagnostic("E341", f"{scale.name} is {scale.type}; its columns should divide {k} columns", AGAIN)
    stored.check_scales(scale)
    code = b.unpack_bits(packed, bits=4, axis=0, size=n, add=8)  # add=8: the codes are signed
    return Codes(code, scale, (1, k // count if count > 1 else 0), "int4", zero=8)


def _scaled_inputs(stored: Stored, codes: Codes) -> Codes:
    """Return the numbers of a weight whose columns are multiplied by the scales of its inputs."""
    b, scale = stored.build, stored.part("pre_quant_scale", FLOATS)
    weight = dequantized(codes, b)
    k = shape_of(weight)[1]
    if shape_of(scale) != (1, k):
        stored.expect(scale, k)
    stored.check_scales(scale)
    return Codes(weight, b.reshape(scale, shape=(1, k)), (0, 1), codes.label)


# By `quant_algo`. Both names of NVFP4 weights without rounded activations occur.
ALGORITHMS: Mapping[str, Callable[[Stored], Codes]] = MappingProxyType(
    {
        "FP8": _rounding, "FP8_PER_CHANNEL_PER_TOKEN": _rounding, "FP8_PB_WO": _tiles, "NVFP4": _nvfp4,
        "W4A16_NVFP4": _nvfp4, "NVFP4_W4A16": _nvfp4, "NVFP4_AWQ": _nvfp4, "W4A8_NVFP4_FP8": _nvfp4, "MXFP8": _mxfp8,
        "MXFP4": _mxfp4, "W4A8_MXFP4_FP8": _mxfp4, "W8A16": _int8(""), "W8A8_SQ_PER_CHANNEL": _int8("i8"),
        "W4A16_AWQ": _int4,
    }
)  # fmt: skip
GROUPS: Mapping[Callable[[Stored], Codes], int] = MappingProxyType(
    {_nvfp4: GROUP, _mxfp8: POWER_COLUMNS, _mxfp4: POWER_COLUMNS, _tiles: TILE}
)


@dataclass(frozen=True)
class ModelOpt(PartNames):
    """The scheme of one checkpoint.

    default: the decoder of all weights; if None, `modules` has one for each module, or for all modules below a name.
    """

    parts = PARTS
    default: Callable[[Stored], Codes] | None
    modules: Mapping[str, Callable[[Stored], Codes]]

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        codes = self._decoder(stored.module)(stored)
        return _scaled_inputs(stored, codes) if "pre_quant_scale" in stored.parts else codes

    def _decoder(self, module: str) -> Callable[[Stored], Codes]:
        if self.default is not None:
            return self.default
        name = module
        while name not in self.modules:
            name = name.rpartition(".")[0]
            if not name:
                raise Diagnostic("E340", f"{module} is quantised, and quantized_layers (modelopt) lacks it", AGAIN)
        return self.modules[name]


def modelopt(config: Mapping[str, Any]) -> ModelOpt:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340.

    The keys of hf_quant_config.json are in its `quantization`, and some tools copy that key into config.json.
    """
    inner = config.get("quantization")
    flat = {**(inner if isinstance(inner, Mapping) else {}), **{k: v for k, v in config.items() if v is not None}}
    named = [str(x["quant_algo"]) for x in (config, inner) if isinstance(x, Mapping) and x.get("quant_algo")]
    if len({name.upper() for name in named}) > 1:
        raise Diagnostic("E340", f"quantization_config (modelopt) has two quant_algo: {' and '.join(named)}", AGAIN)
    known = (*ALGORITHMS, MIXED)
    if flat.get("quant_algo") is None and flat.get("kv_cache_quant_algo"):
        return ModelOpt(lambda stored: _algorithm(flat, known)(stored), {})  # no weight is quantised
    if str(flat.get("quant_algo")).upper() != MIXED:
        return ModelOpt(_algorithm(flat, known), {})
    layers = flat.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(facts, Mapping) for facts in layers.values()):
        raise Diagnostic("E340", "quantization_config (modelopt) has no quantized_layers with an algorithm each", AGAIN)
    return ModelOpt(None, {name: _algorithm(layer, tuple(ALGORITHMS)) for name, layer in layers.items()})


def _algorithm(facts: Mapping[str, Any], known: tuple[str, ...]) -> Callable[[Stored], Codes]:
    """Return the decoder of an algorithm's weights; raises Diagnostic E307 for unsupported ones and group sizes."""
    name = str(facts.get("quant_algo")).upper()
    if name not in ALGORITHMS:
        raise refuse("modelopt", "quant_algo", facts.get("quant_algo"), known)
    decode = ALGORITHMS[name]
    size = facts.get("group_size")
    if size and size != GROUPS.get(decode, size):
        raise refuse("modelopt", "group_size", size, (GROUPS[decode],))
    return decode
