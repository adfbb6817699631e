"""Decodes the weights of a quantised checkpoint: finds the parts of each, and builds the graph that dequantises it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Builder, QuantisedWeight, Value
from llmc.ir.qformat import QFormat
from llmc.quant.kv_scales import Scales, kv_scales_of
from llmc.quant.scheme import AGAIN, Codes, Scheme, SchemeOf, Stored

# Scales of the KV cache by the last part of their names: they are no weights of the model (see `kv_scales`).
KV_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale", "k_zero_point", "v_zero_point")


class Decoder:
    """Decodes a checkpoint by its scheme. Implements `llmc.frontend.checkpoint.WeightDecoder`."""

    def __init__(self, scheme: Scheme) -> None:
        """Decode by `scheme`."""
        self.scheme = scheme
        self.labels: Counter[str] = Counter()  # weights by their format
        self._codes: dict[Value, Codes] = {}  # of each decoded weight
        self._orders: dict[bytes, Value] = {}  # of columns, by the content of their group index

    def decode(
        self, tensors: Mapping[str, Value], build: Builder, read: Callable[[str], np.ndarray]
    ) -> Mapping[str, Value]:
        """See `WeightDecoder.decode`. Weights are float32; those that are not quantised stay as they are stored.

        Raises Diagnostic E307, E340, E341 or E342.
        """
        out: dict[str, Value] = {}
        found: dict[str, dict[str, Value]] = {}
        for name, value in tensors.items():
            split = self.scheme.split(name)
            if split is None:
                if name.rpartition(".")[2] not in KV_SCALES:
                    out[name] = value
            else:
                found.setdefault(split[0], {})[split[1]] = value
        for name, parts in found.items():
            if set(parts) <= {"weight"}:
                out[name] = parts["weight"]
            else:
                out[name] = self._weight(Stored(name, parts, build, read))
        return out

    def kv_scales(self, names: Iterable[str], read: Callable[[str], np.ndarray]) -> Mapping[int, Scales]:
        """See `WeightDecoder.kv_scales`. Raises Diagnostic E341 or E342."""
        return kv_scales_of(names, read)

    def _weight(self, stored: Stored) -> Value:
        if len({"weight", "qweight", "weight_packed"} & stored.parts.keys()) > 1:
            have = ", ".join(sorted(stored.parts))
            raise Diagnostic("E340", f"{stored.module} is stored quantised and as it was: {have}", AGAIN)
        codes = self.scheme.decode(stored)
        self.labels[codes.label] += 1
        weight = dequantized(codes, stored.build)
        self._codes[weight] = codes
        return weight

    def parts(self, weight: Value, build: Builder) -> QuantisedWeight | None:
        """See `WeightDecoder.parts`."""
        codes = self._codes.get(weight)
        if codes is None:
            return None
        if (groups := codes.groups) and groups.content not in self._orders:
            self._orders[groups.content] = build.argsort(groups.index)
        return parts_of(codes, self._orders[groups.content] if groups else None, build)


def parts_of(codes: Codes, order: Value | None, b: Builder) -> QuantisedWeight | None:
    """The format of codes, and the codes, scales and zero points as the format holds them; None if none fits.

    `order` sorts the columns by their groups, if they have a group index.

    Codes of e2m1, transposed weights and stacks of experts have no format yet. Columns with a group index are sorted by
    their groups, if these are equally large.
    """
    if codes.values or codes.turned or codes.code.type.rank != 2 or (codes.groups and not codes.groups.even):
        return None
    name = code_dtype(codes)
    if name is None:
        return None
    code, scale, zero, block = codes.code, codes.scale, codes.zero, codes.block
    if order is not None:
        code = b.take_columns(code, order)
    if block == (0, 0):  # a scale of the whole tensor: one for each row, so that weights can be joined
        shape, block = (codes.code.type.shape[0], 1), (1, 0)
        scale = b.broadcast(scale, shape=shape)
        zero = b.broadcast(zero, shape=shape) if isinstance(zero, Value) else zero
    if not isinstance(zero, Value):
        f = QFormat.of(name, block, scale.type.dtype, str(zero) if zero else "", act=codes.act)
        return QuantisedWeight(f, (code, scale), order)
    f = QFormat.of(name, block, scale.type.dtype, zero.type.dtype, act=codes.act)
    return QuantisedWeight(f, (code, scale, zero), order)


def code_dtype(codes: Codes) -> str | None:
    """The dtype of the codes as a format names it: u4 for unsigned codes of at most 4 bits; None if no dtype fits."""
    dtype = codes.code.type.dtype
    node = codes.code.node
    if dtype == "u8" and node is not None and node.op.name == "unpack_bits" and node.attrs["bits"] <= 4:
        return "u4"
    return dtype if dtype in ("u8", "i8", "f8e4m3", "f8e5m2") else None


def dequantized(codes: Codes, b: Builder) -> Value:
    """The weight in float32, as the model holds it."""
    scale, zero, block = codes.scale, codes.zero, codes.block
    if codes.groups is not None:
        scale = b.take_columns(scale, codes.groups.index)
        zero = b.take_columns(zero, codes.groups.index) if isinstance(zero, Value) else zero
        block = (codes.block[0], 1)
    operands = (codes.code, scale, zero) if isinstance(zero, Value) else (codes.code, scale)
    point = 0 if isinstance(zero, Value) else zero
    value = b.dequantize(*operands, block=block, dtype="f32", zero_point=point, values=codes.values)
    if codes.turned:
        value = b.transpose(value, perm=(*range(value.type.rank - 2), value.type.rank - 1, value.type.rank - 2))
    return value


def decoder_of(config: Mapping[str, Any], schemes: Mapping[str, SchemeOf]) -> Decoder | None:
    """The decoder of a model's config.json, or None if it names no quantisation.

    `schemes` are those of the registry. Raises Diagnostic E307 for an unknown method, E340 for contradictory keys.
    """
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if quantisation is None:
        return None
    method = quantisation.get("quant_method", "") if isinstance(quantisation, dict) else str(quantisation)[:80]
    if method not in schemes:
        raise Diagnostic(
            "E307",
            f"config.json has quantised weights by {str(method)[:80] or 'a method without a name'!r}; supported: "
            f"{', '.join(schemes)}",
            "use a checkpoint of one of these, or the original one",
        )
    return Decoder(schemes[method](quantisation))
