"""AutoRound checkpoints (`quant_method: auto-round`): another scheme's packing, with exceptions for some modules.

`packing_format` names the packing of the whole file; `extra_config` maps a module's name, or a regular expression that
is searched in names, to the keys in which it differs. Integers in the packing "auto_gptq" are those of GPTQ's first
version, in the packing "auto_round" those of its second; there is no g_idx. Versions before 0.5 call themselves
`intel/auto-round` and have `backend` instead, the kernel for which weights are packed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.quant import awq, compressed_tensors, fp8, gptq
from llmc.quant.scheme import (
    AGAIN,
    Codes,
    Stored,
    activations,
    columns_of_group,
    integer,
    last_part,
    refuse,
    supported,
    table,
)


@dataclass(frozen=True)
class Packing:
    """A packing: the parts of a weight, and the function that decodes them, given the keys of the module."""

    parts: tuple[str, ...]
    decode: Callable[[Stored, Mapping[str, Any]], Codes]


def _gptq(less_one: bool) -> Callable[[Stored, Mapping[str, Any]], Codes]:
    """Return the layout of GPTQ; less_one: zero points are stored minus one, as by GPTQ's first version."""

    def decode(stored: Stored, keys: Mapping[str, Any]) -> Codes:
        _check_integers(stored, keys)
        bits, size = integer(keys, "bits", "auto-round"), columns_of_group(keys, "group_size", "auto-round", -1)
        return gptq.unpack(stored, bits, size, less_one)

    return decode


def _check_integers(stored: Stored, keys: Mapping[str, Any]) -> None:
    kind = keys.get("data_type") or "int"
    supported("auto-round", f"data_type of {stored.module} in a packing of integers", kind, INTEGERS)


def _awq(stored: Stored, keys: Mapping[str, Any]) -> Codes:
    _check_integers(stored, keys)
    bits = integer(keys, "bits", "auto-round")
    supported("auto-round", f"bits of {stored.module} in the packing of AWQ", bits, (4,))
    return awq.unpack(stored, columns_of_group(keys, "group_size", "auto-round", -1))


def _fp8(stored: Stored, keys: Mapping[str, Any]) -> Codes:
    return fp8.scaled(stored, fp8.tile(keys.get("weight_block_size"), "auto-round"))


def _microscaled(stored: Stored, keys: Mapping[str, Any]) -> Codes:
    kind = compressed_tensors.AUTO_ROUND.get((str(keys.get("data_type")), integer(keys, "bits", "auto-round")))
    if kind is None:
        known = [f"{name} of {bits} bits" for name, bits in compressed_tensors.AUTO_ROUND]
        raise refuse("auto-round", f"data_type of {stored.module}", keys.get("data_type"), known)
    return compressed_tensors.KINDS[kind].decode(stored, compressed_tensors.NO_ARGS)


PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "auto_gptq": Packing(gptq.PARTS, _gptq(less_one=True)),
        "gptq": Packing(gptq.PARTS, _gptq(less_one=True)),
        "auto_round": Packing(gptq.PARTS, _gptq(less_one=False)),
        "gptqmodel": Packing(gptq.PARTS, _gptq(less_one=False)),
        "auto_awq": Packing(awq.PARTS, _awq),
        "fp8_static": Packing(fp8.PARTS, _fp8),
        "fp8": Packing(fp8.PARTS, _fp8),
        "llm_compressor": Packing(compressed_tensors.PARTS, _microscaled),
    }
)


# Values of `data_type` and `act_data_type` by kind of number. e5m2 is not supported.
INTEGERS = ("int", "int_sym", "int_asym")
FLOATS = (
    "fp", "float", "fp8", "fp8_sym", "fp8_e4m3", "fp8_dynamic", "fp8_static", "block_fp8", "block_fp8_sym",
    "block_fp8_e4m3", "mx_fp", "mx_fp_rceil", "mx_fp4", "mx_fp8", "nv_fp", "nv_fp4", "nv_fp4_with_static_gs",
)  # fmt: skip


OLD_METHOD = "intel/auto-round"  # quant_method in versions before 0.5
KERNELS = ("exllamav2", "triton")  # backends whose zero points are stored without an offset


# Keys of transformations of activations, which cannot be undone in the weights.
ROTATIONS = ("rotation_config", "rotation_configs", "spinquant_config", "hadamard_config", "transform_config")
EXTRA = ("layer_config", "extra_config")  # keys of exceptions for some modules; the last one takes precedence


@dataclass(frozen=True)
class AutoRound:
    """The scheme of one checkpoint. keys: the configuration of every module; extra: overrides for some modules."""

    packing: Packing
    keys: Mapping[str, Any]
    extra: Mapping[str, Mapping[str, Any]]

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        return last_part(name, self.packing.parts)

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        keys = {**self.keys, **self._changes(stored.module)}
        if integer(keys, "bits", "auto-round") >= 16:
            cause = f"{stored.module} is quantised, and quantization_config gives it {keys['bits']} bits"
            raise Diagnostic("E340", cause, AGAIN)
        return replace(self.packing.decode(stored, keys), act=_act(stored.module, keys))

    def _changes(self, module: str) -> Mapping[str, Any]:
        """Return the keys that are overridden for a module, under its name or the first pattern that occurs in it."""
        if module in self.extra:
            return self.extra[module]
        for name, changes in self.extra.items():
            try:
                if changes and re.search(name, module):
                    return changes
            except re.error:
                continue  # as AutoRound does
        return {}


def _act(module: str, keys: Mapping[str, Any]) -> str:
    """Return the dtype of a module's activations by its keys; raises Diagnostic E307 for an unknown one."""
    bits = keys.get("act_bits")
    if bits is None or (type(bits) is int and bits >= 16):
        return ""
    kind = keys.get("act_data_type") or keys.get("data_type") or "int"
    supported("auto-round", f"act_data_type of {module}", kind, (*INTEGERS, *FLOATS))
    return activations("auto-round", f"act_bits of {module}", "int" if kind in INTEGERS else "float", bits)


def auto_round(config: Mapping[str, Any]) -> AutoRound:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340."""
    packing = str(config.get("packing_format") or _old_packing(config)).removeprefix("auto_round:")
    supported("auto-round", "packing_format", packing, PACKINGS)
    for key in ROTATIONS:
        if config.get(key):
            raise refuse("auto-round", key, config[key], ("none",))
    extra: dict[str, Mapping[str, Any]] = {}
    for key in EXTRA:
        changes = table(config, key, "auto-round")
        extra |= {module: table(changes, module, "auto-round") for module in changes}
    return AutoRound(PACKINGS[packing], config, extra)


def _old_packing(config: Mapping[str, Any]) -> str:
    """Return the packing of a configuration that names none; raises Diagnostic E307 for a backend with its own."""
    if config.get("quant_method") != OLD_METHOD:
        return "auto_gptq"
    backend = str(config.get("backend"))
    if "awq" in backend:
        return "auto_awq"
    if "marlin" not in backend and "qigen" not in backend:
        if "gptq" in backend:
            return "auto_gptq"
        if any(kernel in backend for kernel in KERNELS):
            return "auto_round"
    raise refuse(OLD_METHOD, "backend", config.get("backend"), ("gptq", "awq", *KERNELS))
