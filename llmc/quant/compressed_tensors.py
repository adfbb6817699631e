"""Checkpoints of llm-compressor and others in the format compressed-tensors.

`config_groups` give each module a kind of storage (`format`) and numbers (`weights`). A group applies to the modules
that its `targets` name: by their full name, by a regular expression after "re:", or by the class of the module.

format                tensors of a weight [n, k]
pack-quantized        weight_packed int32 [n, ceil(k * bits / 32)], values plus 2 ** (bits - 1); weight_shape int64 [2];
                      weight_zero_point int32 [ceil(n * bits / 32), groups] if the zero points are not 0
int-quantized         weight int8 [n, k]
float-quantized       weight float8_e4m3 [n, k]
naive-quantized       weight int8 or float8_e4m3 [n, k]
nvfp4-pack-quantized  weight_packed uint8 [n, k / 2], the low four bits first; weight_scale float8_e4m3 [n, k / 16];
                      weight_global_scale float32 [1], a divisor
mxfp4-pack-quantized  weight_packed uint8 [n, k / 2]; weight_scale uint8 [n, k / 32], exponents of powers of two
mxfp8-quantized       weight float8_e4m3 [n, k]; weight_scale uint8 [n, k / 32]

The others have a weight_scale of the tensor, rows, groups or tiles. `input_activations` of a group give the dtype to
which products may round their other operand; stored scales of activations are not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Value
from llmc.quant.fp8 import tile
from llmc.quant.scheme import AGAIN, Codes, Stored, activations, block_of, integer, last_part, refuse, shape_of

METHOD = "compressed-tensors"
PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape",
    "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale",
)  # fmt: skip
CLASS = "Linear"  # the class of every module that can be quantised
SCALES = ("bf16", "f16", "f32")
NO_ARGS: Mapping[str, Any] = MappingProxyType({})
Decode = Callable[[Stored, Mapping[str, Any]], Codes]


@dataclass(frozen=True)
class Kind:
    """A kind of storage. `decode` takes a weight and the `weights` of its group."""

    decode: Decode


def _columns(args: Mapping[str, Any], k: int) -> int:
    """The columns of a group, 0 for all."""
    size = args.get("group_size")
    return size if isinstance(size, int) and 0 < size < k else 0


def _pack(stored: Stored, args: Mapping[str, Any]) -> Codes:
    b, bits = stored.build, integer(args, "num_bits", METHOD)
    if not 2 <= bits <= 8:
        raise refuse(METHOD, f"num_bits of {stored.module}", bits, tuple(range(2, 9)))
    words, scale = stored.part("weight_packed", ("i32",), 2), stored.part("weight_scale", SCALES)
    shape = stored.part("weight_shape", ("i64", "i32"), 1)
    stored.expect(shape, 2)
    n, k = (int(x) for x in stored.load(shape.name))
    stored.expect(words, n, -(-k * bits // 32))
    stored.check_scales(scale)
    code = b.unpack_bits(words, bits=bits, axis=1, size=k)
    size = _columns(args, k)
    index = stored.groups("weight_g_idx", k, -(-k // size), size) if size else None
    scale, block = block_of(stored, scale, n, k, (1, size))
    zero: Value | int = 1 << (bits - 1)
    if "weight_zero_point" in stored.parts:
        zeros = stored.part("weight_zero_point", ("i32",), 2)
        stored.expect(zeros, -(-n * bits // 32), shape_of(scale)[1])
        zero = b.unpack_bits(zeros, bits=bits, axis=0, size=n)
    elif args.get("symmetric") is False:
        stored.part("weight_zero_point", ("i32",))
    return Codes(code, scale, block, f"int{bits}", zero, groups=index)


def _plain(label: str, *dtypes: str) -> Decode:
    """Codes that are stored one an element, unsigned zero points aside."""

    def decode(stored: Stored, args: Mapping[str, Any]) -> Codes:
        code, scale = stored.part("weight", dtypes, 2), stored.part("weight_scale", SCALES)
        stored.check_scales(scale)
        n, k = shape_of(code)
        size = (1, _columns(args, k))
        if args.get("strategy") == "block":
            size = tile(args.get("block_structure"), METHOD)
        value, block = block_of(stored, scale, n, k, size)
        zero: Value | int = 0
        if "weight_zero_point" in stored.parts:
            found = stored.part("weight_zero_point", ("i8",))
            zero, _ = block_of(stored, found, n, k, size)
            if shape_of(zero) != shape_of(value):
                stored.expect(found, *shape_of(stored.parts["weight_scale"]))
        return Codes(code, value, block, label, zero)

    return decode


def _nvfp4(stored: Stored, args: Mapping[str, Any]) -> Codes:
    b = stored.build
    packed, scale = stored.part("weight_packed", ("u8",), 2), stored.part("weight_scale", ("f8e4m3",), 2)
    n, k = shape_of(packed)[0], shape_of(packed)[1] * 2
    stored.expect(scale, n, -(-k // 16))
    divisor = stored.part("weight_global_scale", ("f32",))
    for value in (scale, divisor):
        stored.check_scales(value)
    factor = b.div(b.cast(scale, dtype="f32"), b.reshape(divisor, shape=(1, 1)))
    code = b.unpack_bits(packed, bits=4, axis=1, size=k)
    return Codes(code, factor, (1, 16), "nvfp4", values="e2m1")


def _powers(stored: Stored, n: int, k: int) -> Value:
    """The scales of groups of 32 columns: powers of two."""
    scale = stored.part("weight_scale", ("u8", "f8e8m0"), 2)
    stored.expect(scale, n, -(-k // 32))
    stored.check_scales(scale)
    return scale if scale.type.dtype == "f8e8m0" else stored.build.bitcast(scale, dtype="f8e8m0")


def _mxfp4(stored: Stored, args: Mapping[str, Any]) -> Codes:
    packed = stored.part("weight_packed", ("u8",), 2)
    n, k = shape_of(packed)[0], shape_of(packed)[1] * 2
    code = stored.build.unpack_bits(packed, bits=4, axis=1, size=k)
    return Codes(code, _powers(stored, n, k), (1, 32), "mxfp4", values="e2m1")


def _mxfp8(stored: Stored, args: Mapping[str, Any]) -> Codes:
    code = stored.part("weight", ("f8e4m3",), 2)
    return Codes(code, _powers(stored, *shape_of(code)), (1, 32), "mxfp8")


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "pack-quantized": Kind(_pack),
        "int-quantized": Kind(_plain("int8", "i8")),
        "float-quantized": Kind(_plain("fp8", "f8e4m3")),
        "naive-quantized": Kind(_plain("8 bit", "i8", "f8e4m3")),
        "nvfp4-pack-quantized": Kind(_nvfp4),
        "mxfp4-pack-quantized": Kind(_mxfp4),
        "mxfp8-quantized": Kind(_mxfp8),
    }
)
# The kinds that AutoRound writes, by its data_type and bits.
AUTO_ROUND: Mapping[tuple[str, int], str] = MappingProxyType(
    {("nv_fp", 4): "nvfp4-pack-quantized", ("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized"}
)


@dataclass(frozen=True)
class Group:
    """One of `config_groups`. args: its `weights`. act: see `Codes`."""

    targets: tuple[str, ...]
    kind: str
    args: Mapping[str, Any]
    act: str

    def match(self, module: str) -> int:
        """How closely the targets name a module: 2 by its name, 1 by its class, 0 not at all."""
        if any(re.match(t[3:], module) if t.startswith("re:") else t == module for t in self.targets):
            return 2
        return int(CLASS in self.targets)


@dataclass(frozen=True)
class CompressedTensors:
    """The scheme of one checkpoint."""

    groups: tuple[Group, ...]

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        return last_part(name, PARTS)

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        group = max(self.groups, key=lambda g: g.match(stored.module), default=None)
        if group is None or not group.match(stored.module):
            cause = f"{stored.module} is quantised, and no target in quantization_config names it"
            raise Diagnostic("E340", cause, AGAIN)
        return replace(KINDS[group.kind].decode(stored, group.args), act=group.act)


def compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    """The scheme of a quantization_config; raises Diagnostic E307 or E340."""
    for key in ("sparsity_config", "transform_config"):
        if config.get(key) and (key != "sparsity_config" or config[key].get("format", "dense") != "dense"):
            raise refuse(METHOD, key, config[key], ("none",))
    found = config.get("config_groups") or {}
    if not isinstance(found, dict):
        raise Diagnostic("E340", f"quantization_config ({METHOD}) has config_groups that are not a table", AGAIN)
    return CompressedTensors(tuple(_group(name, g, config.get("format")) for name, g in found.items()))


def _group(name: str, group: Any, default: Any) -> Group:
    weights = group.get("weights") if isinstance(group, dict) else None
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, Sequence) or not all(isinstance(t, str) for t in targets) or isinstance(targets, str):
        raise Diagnostic("E340", f"quantization_config ({METHOD}): group {name[:80]!r} has no list of targets", AGAIN)
    kind = group.get("format") or default
    if kind not in KINDS:
        raise refuse(METHOD, f"format of group {name[:80]!r}", kind, tuple(KINDS))
    for text in targets:
        try:
            re.compile(text.removeprefix("re:"))
        except re.error as e:
            cause = f"quantization_config ({METHOD}): group {name[:80]!r} has the target {text[:80]!r}: {e}"
            raise Diagnostic("E340", cause, AGAIN) from None
    return Group(tuple(targets), kind, weights if isinstance(weights, dict) else {}, _act(name, group))


def _act(name: str, group: Mapping[str, Any]) -> str:
    """The dtype of the `input_activations` of a group."""
    found, key = group.get("input_activations"), f"input_activations of group {name[:80]!r}"
    if found is None:
        return ""
    if not isinstance(found, dict):
        raise Diagnostic("E340", f"quantization_config ({METHOD}): {key} is not a table", AGAIN)
    return activations(METHOD, key, str(found.get("type", "int")), found.get("num_bits", 8))
