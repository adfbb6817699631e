"""Decodes the weights of a quantised checkpoint: finds the parts of each, and builds the graph that dequantises it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.frontend.weight_place import Place
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Node, QuantisedWeight, Value
from llmc.ir.qformat import ENCODINGS, QFormat
from llmc.ir.signature import Mismatch
from llmc.quant.kv_scales import KV_SCALES, Scales, kv_scales_of
from llmc.quant.scheme import AGAIN, Codes, Scheme, SchemeOf, Stored, left_out

# Dtypes of codes in a tensor named `weight`, stored one per element or packed.
FLOAT_CODES = ("f8e4m3", "f8e5m2")
CODES = ("i8", "u8", "i32", *FLOAT_CODES)
MOVES = ("reshape", "transpose", "slice", "concat")  # ops that leave codes what they are
TRANSPOSED = "Conv1D"  # transformers' class of modules that hold the transpose, [k, n]
STACK_SCALE = "_weight_scale"  # the end of the name of a stack's scales, which no supported layout has
SINGLE = "use a checkpoint whose experts are quantised one by one (names with experts.0.), or the original one"
# Keys of configurations that list modules that are not quantised.
PLAIN = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")


class Decoder:
    """Decodes a checkpoint by its scheme. Implements `llmc.frontend.checkpoint.WeightDecoder`."""

    def __init__(self, scheme: Scheme, plain: Mapping[str, str]) -> None:
        """Decode by `scheme`. `plain` maps the modules that the configuration leaves out to the key that lists each."""
        self.scheme, self.plain = scheme, plain
        self.labels: Counter[str] = Counter()  # weights by their format
        self._codes: dict[Value, Codes] = {}  # codes of each decoded weight
        self._orders: dict[bytes, Value] = {}  # column orders by the content of the group index

    def decode(
        self,
        tensors: Mapping[str, Value],
        build: Builder,
        read: Callable[[str], np.ndarray],
        place: Callable[[str], Place] = lambda weight: Place(),
        metadata: Callable[[], Mapping[str, str]] = dict,
    ) -> Mapping[str, Value]:
        """See `WeightDecoder.decode`. Decoded weights are float32; others keep their stored dtype.

        Raises Diagnostic E307, E340, E341 or E342.
        """
        out: dict[str, Value] = {}
        by_module: dict[str, dict[str, Value]] = {}
        metadata = cache(metadata)
        for name, value in tensors.items():
            split = self.scheme.split(name)
            if split is None:
                if (stack := name.removesuffix(STACK_SCALE)) != name and stack in tensors:
                    raise Diagnostic("E307", f"{stack} is a quantised stack of experts, which is not supported", SINGLE)
                if name.rpartition(".")[2] not in KV_SCALES:
                    out[name] = value
            else:
                by_module.setdefault(split[0], {})[split[1]] = value
        for name, parts in by_module.items():
            if set(parts) <= {"weight"} and not _bare_codes(parts["weight"]):
                out[name] = parts["weight"]
            else:
                at = place(name)
                out[name] = self._weight(Stored(name, parts, build, read, at.classes, at.shape, metadata))
        return out

    def kv_scales(self, names: Iterable[str], read: Callable[[str], np.ndarray]) -> Mapping[int, Scales]:
        """See `WeightDecoder.kv_scales`. Raises Diagnostic E341 or E342."""
        return kv_scales_of((name for name in names if self.scheme.split(name) is None), read)

    def _weight(self, stored: Stored) -> Value:
        if (key := self.plain.get(stored.module)) is not None:
            raise left_out(stored.module, key)
        if len({"weight", "qweight", "weight_packed"} & stored.parts.keys()) > 1:
            present = ", ".join(sorted(stored.parts))
            raise Diagnostic("E340", f"{stored.module} is stored both quantised and unquantised: {present}", AGAIN)
        try:
            codes = self.scheme.decode(stored)
            if TRANSPOSED in stored.classes:  # quantised as the Linear that computes the same
                codes = replace(codes, transposed=not codes.transposed)
            weight = dequantized(codes, stored.build)
        except Mismatch as e:  # shapes that the scheme does not compare
            shapes = ", ".join(f"{part} {value.type}" for part, value in sorted(stored.parts.items()))
            raise Diagnostic("E341", f"the parts of {stored.module} do not fit each other: {shapes}: {e}", AGAIN) from e
        self.labels[codes.label] += 1
        self._codes[weight] = codes
        return weight

    def parts(self, weight: Value, build: Builder) -> QuantisedWeight | None:
        """See `WeightDecoder.parts`."""
        codes = self._codes.get(weight)
        if codes is None:
            return self._joined(weight, build)
        if (groups := codes.groups) and groups.content not in self._orders:
            self._orders[groups.content] = build.argsort(groups.index)
        return parts_of(codes, self._orders[groups.content] if groups else None, build)

    def _joined(self, weight: Value, b: Builder) -> QuantisedWeight | None:
        """Return the parts of a weight that is made of weights in one format; None if its op cannot move their parts.

        It is their concatenation; one of them with another first axis, of size 1, or with other axes before the
        columns; or the transpose of one.
        """
        n = weight.node
        if n is None or n.op.name not in ("concat", "reshape", "transpose"):
            return None
        weights = [self.parts(v, b) for v in n.operands]
        first = weights[0]
        if first is not None and n.op.name == "transpose":
            last = weight.type.rank - 1
            turns = tuple(n.attrs["perm"]) == (*range(last - 1), last, last - 1)
            return replace(first, transposed=True) if turns and not (first.order or first.transposed) else None
        if first is None or first.transposed or not all(_joins(x, first, v, n) for x, v in zip(weights, n.operands)):
            return None
        columns = zip(*(x.parts for x in weights if x), strict=True)
        if n.op.name == "concat":
            parts = tuple(b.concat(*column, axis=n.attrs["axis"]) for column in columns)
        else:
            (source,) = n.operands
            if (shapes := _reshaped(weight, source, first)) is None:
                return None
            parts = tuple(b.reshape(p, shape=shape) for (p,), shape in zip(columns, shapes, strict=True))
        return QuantisedWeight(first.format, parts, count=sum(x.count for x in weights if x))


def _reshaped(weight: Value, source: Value, x: QuantisedWeight) -> list[tuple[Dim, ...]] | None:
    """Return the shapes of the parts of a reshaped weight, whose source has the parts of `x`; None if they lack one.

    The new first axis has size 1, or each row has scales of its own and stays a row.
    """
    old, new = source.type.shape, weight.type.shape
    if new == (Dim.of(1), *old):
        return [(Dim.of(1), *p.type.shape) for p in x.parts]
    if x.format.block[0] == 1 and new[-1] == old[-1]:
        return [(*new[:-1], p.type.shape[-1]) for p in x.parts]
    return None


def _joins(x: QuantisedWeight | None, first: QuantisedWeight, v: Value, n: Node) -> bool:
    """Whether the parts of an operand of a concatenation (or reshape) can be moved as the operand is."""
    if x is None or x.order is not None or x.transposed or x.format != first.format:
        return False
    typed = replace(v.type, dtype=x.format.logical, format=x.format)
    axis = n.attrs.get("axis", 0) % v.type.rank
    return n.op.name == "reshape" or typed.whole_blocks(axis, v.type.shape[axis])


def _bare_codes(weight: Value) -> bool:
    """Whether a stored weight consists of codes, which cannot be used without their scales."""
    return weight.type.dtype in (CODES if weight.name.endswith(".weight") else FLOAT_CODES)


def parts_of(codes: Codes, order: Value | None, b: Builder) -> QuantisedWeight | None:
    """Return the format of codes, and the codes, scales and zero points as the format holds them; None if none fits.

    `order` sorts the columns by their groups, if they have a group index.
    """
    name = code_dtype(codes)
    if name is None:
        return None
    code, scale, zero, block = codes.code, codes.scale, codes.zero, codes.block
    if order is not None:
        code = b.take_columns(code, order)
    if block == (0, 0):  # a scale of the whole tensor: one for each row, so that weights can be joined
        shape, block = (*codes.code.type.shape[:-1], 1), (1, 0)
        scale = b.broadcast(scale, shape=shape)
        zero = b.broadcast(zero, shape=shape) if isinstance(zero, Value) else zero
    if not isinstance(zero, Value):
        f = QFormat.of(name, block, scale.type.dtype, str(zero) if zero else "", act=codes.act)
        return QuantisedWeight(f, (code, scale), order, codes.transposed)
    f = QFormat.of(name, block, scale.type.dtype, zero.type.dtype, act=codes.act)
    return QuantisedWeight(f, (code, scale, zero), order, codes.transposed)


def code_dtype(codes: Codes) -> str | None:
    """Return the dtype of the codes as a format names it, u4 for unsigned ones of at most 4 bits; None if none fits.

    Zero points that are not integers have no format.
    """
    dtype = codes.code.type.dtype
    if codes.values:
        return next((code for code, values in ENCODINGS.items() if values == codes.values), None)
    if isinstance(codes.zero, Value) and DTYPES[codes.zero.type.dtype].kind == "f":
        return None
    node = codes.code.node
    while node is not None and node.op.name in MOVES:
        node = node.operands[0].node
    if dtype == "u8" and node is not None and node.op.name == "unpack_bits" and node.attrs["bits"] <= 4:
        return "u4"
    return dtype if dtype in ("u8", "i8", "f8e4m3", "f8e5m2") else None


def dequantized(codes: Codes, b: Builder) -> Value:
    """Return the weight in float32, as the model holds it."""
    scale, zero, block = codes.scale, codes.zero, codes.block
    if codes.groups is not None:
        scale = b.take_columns(scale, codes.groups.index)
        zero = b.take_columns(zero, codes.groups.index) if isinstance(zero, Value) else zero
        block = (codes.block[0], 1)
    operands = (codes.code, scale, zero) if isinstance(zero, Value) else (codes.code, scale)
    point = 0 if isinstance(zero, Value) else zero
    value = b.dequantize(*operands, block=block, dtype="f32", zero_point=point, values=codes.values)
    if codes.transposed:
        value = b.transpose(value, perm=(*range(value.type.rank - 2), value.type.rank - 1, value.type.rank - 2))
    return value


def decoder_of(config: Mapping[str, Any], schemes: Mapping[str, SchemeOf]) -> Decoder | None:
    """Return the decoder of a model's config.json, or None if it names no quantisation.

    `schemes` are those of the registry. Raises Diagnostic E307 for an unknown method, E340 for contradictory keys.
    """
    quantisation = config.get("quantization_config")
    if not quantisation:
        return None
    if not isinstance(quantisation, Mapping):
        cause = f"config.json has quantization_config = {str(quantisation)[:80]!r}, not a table"
        raise Diagnostic("E340", cause, AGAIN)
    named = str(quantisation.get("quant_method") or "")
    method = named if named in schemes else named.lower().replace("_", "-")
    if method not in schemes:
        method_text = repr(named[:80]) if named else "a method without a name"
        cause = f"config.json has quantised weights by {method_text}; supported: {', '.join(schemes)}"
        raise Diagnostic("E307", cause, "use a checkpoint of one of these, or the original one")
    return Decoder(schemes[method](quantisation), _plain_modules(quantisation, method))


def _plain_modules(config: Mapping[str, Any], method: str) -> dict[str, str]:
    """Map each module that a configuration lists as not quantised to a description of the list.

    Only full names of modules have an effect. The meaning of shorter ones differs between tools, so a module is
    quantised if its tensors are. Raises Diagnostic E340 for a value that is not a list of names.
    """
    places = [place for place in (config, config.get("quantization")) if isinstance(place, Mapping)]
    plain = dict[str, str]()
    for place in places:
        for key in PLAIN:
            names = place.get(key)
            if names is None:
                continue
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                cause = f"quantization_config ({method}) has {key} = {names!r:.80}, not a list of names of modules"
                raise Diagnostic("E340", cause, AGAIN)
            plain |= dict.fromkeys(names, f"{key} ({method})")
    return plain
