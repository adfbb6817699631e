"""Checkpoints of NVIDIA's Model Optimizer (`quant_method: modelopt`), as its unified export writes them.

`quant_algo` names what a weight [n, k] is stored as. It is in `quantization_config` or in `hf_quant_config.json`; with
MIXED_PRECISION, `quantized_layers` has one for each module, or for all modules below a name.

FP8                        weight float8_e4m3 [n, k]; weight_scale float32, one number
FP8_PER_CHANNEL_PER_TOKEN  the same with weight_scale [n] or [n, 1]
FP8_PB_WO                  the same with weight_scale [n / 128, 1, k / 128, 1]; activations are not rounded
NVFP4, W4A16_NVFP4         weight uint8 [n, k / 2], the low four bits first; weight_scale float8_e4m3 [n, k / 16], times
                           weight_scale_2 float32, one number
MXFP8                      weight float8_e4m3 [n, k]; weight_scale uint8 [n, k / 32], exponents of powers of two

All scales are multipliers. Those of activations (input_scale) are not used: products compute a scale for each row.
Weights whose inputs are scaled (pre_quant_scale) are refused. A module is quantised if it has quantised tensors: names
in `exclude_modules` (or `ignore`) are not used, because they may be patterns that match parts of other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.quant.fp8 import ACT, SCALE_DTYPES, scaled
from llmc.quant.scheme import AGAIN, Codes, Stored, block_of, check_not_left_out, last_part, refuse, shape_of

PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
PLAIN = ("exclude_modules", "ignore")
TILE, GROUP, POWERS = 128, 16, 32  # columns that share a scale in FP8_PB_WO, NVFP4 and MXFP8
MIXED = "MIXED_PRECISION"


def _rounding(stored: Stored) -> Codes:
    """FP8 weights whose products may round activations."""
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
    b = stored.build
    packed, scale = stored.part("weight", ("u8",), 2), stored.part("weight_scale", ("f8e4m3",), 2)
    whole = stored.number("weight_scale_2", ("f32",))
    n, k = shape_of(packed)[0], shape_of(packed)[1] * 2
    stored.expect(scale, n, -(-k // GROUP))
    for value in (scale, stored.parts["weight_scale_2"]):
        stored.check_scales(value)
    factor = b.mul(b.cast(scale, dtype="f32"), whole)
    code = b.unpack_bits(packed, bits=4, axis=1, size=k)
    return Codes(code, factor, (1, GROUP), "nvfp4", values="e2m1")


def _mxfp8(stored: Stored) -> Codes:
    code, scale = stored.part("weight", ("f8e4m3",), 2), stored.part("weight_scale", ("u8", "f8e8m0"), 2)
    n, k = shape_of(code)
    stored.expect(scale, n, -(-k // POWERS))
    stored.check_scales(scale)
    powers = scale if scale.type.dtype == "f8e8m0" else stored.build.bitcast(scale, dtype="f8e8m0")
    return Codes(code, powers, (1, POWERS), "mxfp8", act=ACT)


# By `quant_algo`. Both names of NVFP4 weights without rounded activations occur.
ALGORITHMS: Mapping[str, Callable[[Stored], Codes]] = MappingProxyType(
    {
        "FP8": _rounding, "FP8_PER_CHANNEL_PER_TOKEN": _rounding, "FP8_PB_WO": _tiles, "NVFP4": _nvfp4,
        "W4A16_NVFP4": _nvfp4, "NVFP4_W4A16": _nvfp4, "MXFP8": _mxfp8,
    }
)  # fmt: skip
GROUPS: Mapping[Callable[[Stored], Codes], int] = MappingProxyType({_nvfp4: GROUP, _mxfp8: POWERS, _tiles: TILE})


@dataclass(frozen=True)
class ModelOpt:
    """The scheme of one checkpoint.

    default: the decoder of all weights; if None, `modules` has one for each module, or for all modules below a name.
    plain: lists of modules that are not quantised, by their keys in the configuration.
    """

    default: Callable[[Stored], Codes] | None
    modules: Mapping[str, Callable[[Stored], Codes]]
    plain: Mapping[str, Any]

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        return last_part(name, PARTS)

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        check_not_left_out(stored, self.plain, "modelopt")
        if "pre_quant_scale" in stored.parts:
            raise Diagnostic(
                "E307", f"{stored.module} has a pre_quant_scale: its input is scaled (AWQ, SmoothQuant or SVDQuant)",
                "use a checkpoint whose scales are folded into other weights, or the original one",
            )  # fmt: skip
        return self._decoder(stored.module)(stored)

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
    """The scheme of a quantization_config; raises Diagnostic E307 or E340.

    The keys of hf_quant_config.json are in its `quantization`, and some tools copy that key into config.json.
    """
    inner = config.get("quantization")
    flat = {**(inner if isinstance(inner, Mapping) else {}), **{k: v for k, v in config.items() if v is not None}}
    named = [str(x["quant_algo"]) for x in (config, inner) if isinstance(x, Mapping) and x.get("quant_algo")]
    if len({name.upper() for name in named}) > 1:
        raise Diagnostic("E340", f"quantization_config (modelopt) has two quant_algo: {' and '.join(named)}", AGAIN)
    plain = {key: flat.get(key) for key in PLAIN}
    if str(flat.get("quant_algo")).upper() != MIXED:
        return ModelOpt(_algorithm(flat, (*ALGORITHMS, MIXED)), {}, plain)
    layers = flat.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(facts, Mapping) for facts in layers.values()):
        raise Diagnostic("E340", "quantization_config (modelopt) has no quantized_layers with an algorithm each", AGAIN)
    return ModelOpt(None, {name: _algorithm(facts, tuple(ALGORITHMS)) for name, facts in layers.items()}, plain)


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
