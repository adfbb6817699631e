"""Checkpoints of llm-compressor and others in the format compressed-tensors.

`config_groups` give each module a kind of storage (`format`) and numbers (`weights`). A group applies to the modules
that its `targets` name. If several name one, a full name comes first, then regular expressions after "re:" in
alphabetical order, then the class of the module: this is how compressed-tensors chooses. `ignore` names modules that
are not quantised, in the same way.

format                tensors of a weight [n, k]
pack-quantized        weight_packed int32 [n, ceil(k * bits / 32)], values plus 2 ** (bits - 1); weight_shape int64 [2];
                      weight_zero_point int32 [ceil(n * bits / 32), groups], packed in the same way along n, if
                      the zero points are not 0; in old files, and of a tensor, int8 of the shape of the scale
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Value
from llmc.quant.fp8 import tile
from llmc.quant.scheme import (
    AGAIN,
    Codes,
    Groups,
    PartNames,
    Stored,
    activations,
    block_of,
    integer,
    left_out,
    microscaled,
    nibbles,
    nvfp4,
    refuse,
    shape_of,
    table,
)  # fmt: skip

METHOD = "compressed-tensors"
PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape",
    "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale",
)  # fmt: skip
FUSED = ("weight_input", "weight_output")  # locations of transforms that are part of the stored weights
NO_ARGS: Mapping[str, Any] = MappingProxyType({})
Decode = Callable[[Stored, Mapping[str, Any]], Codes]


@dataclass(frozen=True)
class Kind:
    """A kind of storage. `decode` takes a weight and the `weights` of its group, whose `type` must be `type`."""

    decode: Decode
    type: str


def _columns(args: Mapping[str, Any], k: int) -> int:
    """Return the columns of a group, 0 for all."""
    size = args.get("group_size")
    return size if isinstance(size, int) and 0 < size < k else 0


def _tile(size: Any) -> tuple[int, int]:
    """Return the `block_structure` of weights; older files have it as text, "128x128"."""
    if isinstance(size, str) and re.fullmatch(r"\d+x\d+", size):
        size = [int(x) for x in size.split("x")]
    return tile(size, METHOD)


def _groups(stored: Stored, args: Mapping[str, Any], k: int) -> Groups | None:
    """Return each column's group, if groups are not runs of neighbours (`actorder` "group", of old files)."""
    size = _columns(args, k)
    if size and str(args.get("actorder")).lower() in ("group", "dynamic", "true"):
        stored.part("weight_g_idx", ("i32",))
    return stored.groups("weight_g_idx", k, -(-k // size), size) if size else None


def _blocks(stored: Stored, scale: Value, n: int, k: int, size: tuple[int, int]) -> tuple[Value, tuple[int, int]]:
    """As `block_of`, but groups and tiles of the configuration need scales of their own. Raises Diagnostic E341."""
    value, block = block_of(stored, scale, n, k, size)
    rows, columns = (-(-length // part) if part else 1 for length, part in zip((n, k), size, strict=True))
    if size != (1, 0) and shape_of(value) != (rows, columns):
        stored.expect(scale, rows, columns)
    return value, block


def _pack(stored: Stored, args: Mapping[str, Any]) -> Codes:
    b, bits = stored.build, integer(args, "num_bits", METHOD)
    if not 2 <= bits <= 8:
        raise refuse(METHOD, f"num_bits of {stored.module}", bits, tuple(range(2, 9)))
    words = stored.part("weight_packed", ("i32",), 2)
    n, k = stored.rows_and_columns("weight_shape")
    stored.expect(words, n, -(-k * bits // 32))
    code = b.unpack_bits(words, bits=bits, axis=1, size=k)
    index = _groups(stored, args, k)
    scale, block = _blocks(stored, stored.scales("weight_scale", FLOATS), n, k, (1, _columns(args, k)))
    zero: Value | int = 1 << (bits - 1)
    if "weight_zero_point" in stored.parts:
        zero = _packed_zeros(stored, scale, bits, n)
    elif args.get("symmetric") is False:
        stored.part("weight_zero_point", ("i32",))
    return Codes(code, scale, block, f"int{bits}", zero, groups=index)


def _packed_zeros(stored: Stored, scale: Value, bits: int, n: int) -> Value:
    """Return the zero points of packed codes, plus 2 ** (bits - 1) as the codes are; raises Diagnostic E341 or E342."""
    b, zeros = stored.build, stored.part("weight_zero_point", ("i32", "i8"))
    if zeros.type.dtype == "i32":
        stored.expect(zeros, -(-n * bits // 32), shape_of(scale)[1])
        return b.unpack_bits(zeros, bits=bits, axis=0, size=n)
    stored.expect(zeros, *shape_of(stored.parts["weight_scale"]))
    middle = 1 << (bits - 1)
    points = stored.load(zeros.name)
    if points.min(initial=0) < -middle or points.max(initial=0) >= middle:
        worst = points[(points < -middle) | (points >= middle)][0]
        cause = f"{zeros.name} has the zero point {worst}; those of {bits} bits are {-middle} to {middle - 1}"
        raise Diagnostic("E342", cause, AGAIN)
    whole = b.reshape(zeros, shape=shape_of(scale))
    return b.unpack_bits(whole, bits=8, axis=1, size=shape_of(scale)[1], add=middle)


def _plain(label: str, *dtypes: str) -> Decode:
    """Return the decoder of codes that are stored one per element; zero points are signed."""

    def decode(stored: Stored, args: Mapping[str, Any]) -> Codes:
        code, scale = stored.part("weight", dtypes), stored.scales("weight_scale", FLOATS)
        if code.type.rank == 3:
            return _stack(stored, code, scale, label)
        n, k = shape_of(stored.part("weight", dtypes, 2))
        size = (1, _columns(args, k))
        if args.get("strategy") == "block":
            size = _tile(args.get("block_structure"))
        value, block = _blocks(stored, scale, n, k, size)
        zero: Value | int = 0
        if "weight_zero_point" in stored.parts:
            stored_zero = stored.part("weight_zero_point", ("i8",))
            zero, _ = block_of(stored, stored_zero, n, k, size)
            if shape_of(zero) != shape_of(value):
                stored.expect(stored_zero, *shape_of(stored.parts["weight_scale"]))
        elif args.get("symmetric") is False:
            stored.part("weight_zero_point", ("i8",))
        index = _groups(stored, args, k) if size[0] == 1 else None  # tiles have no groups of columns
        return Codes(code, value, block, label, zero, groups=index)

    return decode


def _stack(stored: Stored, code: Value, scale: Value, label: str) -> Codes:
    """Return the codes of a stack of experts [experts, n, k], with a scale for each row, [experts, n, 1].

    GraniteMoE's experts are stored so. Raises Diagnostic E340 for zero points, E341 for another shape.
    """
    if "weight_zero_point" in stored.parts:
        raise Diagnostic("E340", f"{stored.module} is a stack of experts with zero points, which no tool writes", AGAIN)
    stored.expect(scale, *shape_of(code)[:2], 1)
    return Codes(code, scale, (1, 0), label)


def _nvfp4(stored: Stored, args: Mapping[str, Any]) -> Codes:
    return nvfp4(stored, "weight_packed", "weight_global_scale", divides=True)


def _mxfp4(stored: Stored, args: Mapping[str, Any]) -> Codes:
    return microscaled(stored, nibbles(stored, "weight_packed"), "mxfp4", "e2m1")


def _mxfp8(stored: Stored, args: Mapping[str, Any]) -> Codes:
    return microscaled(stored, stored.part("weight", ("f8e4m3",), 2), "mxfp8")


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "pack-quantized": Kind(_pack, "int"),
        "int-quantized": Kind(_plain("int8", "i8"), "int"),
        "float-quantized": Kind(_plain("fp8", "f8e4m3"), "float"),
        "naive-quantized": Kind(_plain("8 bit", "i8", "f8e4m3"), ""),
        "nvfp4-pack-quantized": Kind(_nvfp4, "float"),
        "mxfp4-pack-quantized": Kind(_mxfp4, "float"),
        "mxfp8-quantized": Kind(_mxfp8, "float"),
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


def match(targets: Iterable[str], stored: Stored) -> str | None:
    """Return the target that applies to a module (see the module's documentation), or None."""
    ordered = sorted(targets, key=lambda t: (t.startswith("re:"), t))
    named = (t for t in ordered if (re.match(t[3:], stored.module) if t.startswith("re:") else t == stored.module))
    return next(named, next((t for t in ordered if t in stored.classes), None))


@dataclass(frozen=True)
class CompressedTensors(PartNames):
    """The scheme of one checkpoint. ignore: targets of modules that are not quantised."""

    parts = PARTS
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        if (rule := match(self.ignore, stored)) is not None:
            raise left_out(stored.module, f"ignore {rule!r} ({METHOD})")
        by_target = {target: group for group in self.groups for target in group.targets}
        target = match(by_target, stored)
        if target is None:
            cause = f"{stored.module} is quantised, and no target in quantization_config names it"
            raise Diagnostic("E340", cause, AGAIN)
        group = by_target[target]
        kind, type = KINDS[group.kind], group.args.get("type")
        if type and kind.type and type != kind.type:
            cause = f"{stored.module} has weights of type {type} in the format {group.kind}, which holds {kind.type}s"
            raise Diagnostic("E340", f"quantization_config ({METHOD}): {cause}", AGAIN)
        return replace(kind.decode(stored, group.args), act=group.act)


def compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340."""
    sparsity, dense = config.get("sparsity_config"), (None, "dense")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in dense):
        raise refuse(METHOD, "sparsity_config", sparsity, ("none",))
    if transform := config.get("transform_config"):
        _check_transforms(transform)
    declared = table(config, "config_groups", METHOD)
    groups = tuple(_group(name, g, config.get("format")) for name, g in declared.items() if not _of_activations(g))
    return CompressedTensors(groups, _targets(config.get("ignore") or [], "ignore"))


def _check_transforms(config: Any) -> None:
    """Raise Diagnostic E307 for transforms of activations. Stored weights are already transformed."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    for scheme in groups.values() if isinstance(groups, Mapping) else (None,):
        applied = scheme.get("apply") if isinstance(scheme, Mapping) else None
        for transform in applied if isinstance(applied, list) else (None,):
            if not isinstance(transform, Mapping) or transform.get("location") not in FUSED:
                raise refuse(METHOD, "transform_config", transform or config, [f"location {place}" for place in FUSED])


def _targets(targets: Any, where: str) -> tuple[str, ...]:
    """Return a list of targets; raises Diagnostic E340."""
    if not isinstance(targets, Sequence) or not all(isinstance(t, str) for t in targets) or isinstance(targets, str):
        raise Diagnostic("E340", f"quantization_config ({METHOD}): {where} has no list of targets", AGAIN)
    for text in targets:
        try:
            re.compile(text.removeprefix("re:") if text.startswith("re:") else "")
        except re.error as e:
            cause = f"quantization_config ({METHOD}): {where} has the target {text[:80]!r}: {e}"
            raise Diagnostic("E340", cause, AGAIN) from None
    return tuple(targets)


def _of_activations(group: Any) -> bool:
    """Whether a group quantises only activations, such as queries, keys and values: its modules have no codes."""
    return isinstance(group, dict) and group.get("weights", group) is None


def _group(name: str, group: Any, default: Any) -> Group:
    if isinstance(group, list):  # targets of a preset, which compressed-tensors normally replaces by its settings
        raise refuse(METHOD, "group as a preset", name, ("groups with targets and weights",))
    weights = group.get("weights") if isinstance(group, dict) else None
    targets = _targets(group.get("targets") if isinstance(group, dict) else None, f"group {name[:80]!r}")
    kind = group.get("format") or default
    if not isinstance(kind, str) or kind not in KINDS:
        raise refuse(METHOD, f"format of group {name[:80]!r}", kind, tuple(KINDS))
    return Group(targets, kind, weights if isinstance(weights, dict) else {}, _act(name, group))


def _act(name: str, group: Mapping[str, Any]) -> str:
    """Return the dtype of the `input_activations` of a group."""
    settings, key = group.get("input_activations"), f"input_activations of group {name[:80]!r}"
    if settings is None:
        return ""
    if not isinstance(settings, dict):
        raise Diagnostic("E340", f"quantization_config ({METHOD}): {key} is not a table", AGAIN)
    return activations(METHOD, key, str(settings.get("type", "int")), settings.get("num_bits", 8))
