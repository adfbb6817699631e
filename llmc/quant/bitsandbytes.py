"""bitsandbytes checkpoints: 4-bit codes with a stored table of values (NF4 and FP4), and int8.

Tensors of a 4-bit weight [n, k]: weight uint8 [n * k / 2, 1], flat, the high four bits first; weight.absmax, the scale
of each run of `blocksize` values; weight.quant_map float32 [16], the value of each code; and
weight.quant_state.bitsandbytes__nf4 (or fp4), the weight's shape and block size as JSON in bytes. With double
quantisation absmax is uint8: codes of weight.nested_quant_map [256] with scales weight.nested_absmax and an offset.
Of an int8 weight: weight int8 [n, k] and SCB float32 [n]; a value is `weight * SCB * (1 / 127)`, in this order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Value
from llmc.quant.scheme import AGAIN, Codes, Stored, refuse, shape_of

METHOD = "bitsandbytes"
STATES = ("bitsandbytes__nf4", "bitsandbytes__fp4")
MAX_STATE = 1 << 16  # bytes of a quant_state


class BitsAndBytes:
    """The scheme of a checkpoint."""

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        module, separator, part = name.rpartition(".weight.")
        if separator:
            return f"{module}.weight", part.removeprefix("quant_state.")
        module, _, part = name.rpartition(".")
        return (f"{module}.weight", part) if part in ("weight", "SCB", "weight_format") else None

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        return _int8(stored) if "SCB" in stored.parts else _four_bits(stored)


def bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytes:
    """Return the scheme of a quantization_config; raises Diagnostic E307."""
    storage = config.get("bnb_4bit_quant_storage") or "uint8"
    if storage not in ("uint8", "torch.uint8"):
        raise refuse(METHOD, "bnb_4bit_quant_storage", storage, ("uint8",))
    if layout := config.get("format"):  # written by GPTQModel, which names tensors differently
        raise refuse(METHOD, "format", layout, ("none",))
    return BitsAndBytes()


def _int8(stored: Stored) -> Codes:
    b, code = stored.build, stored.part("weight", ("i8",), 2)
    n, _ = shape_of(code)
    scale = stored.scales("SCB", ("f32",), n)
    scaled = b.dequantize(code, b.reshape(scale, shape=(n, 1)), block=(1, 0), dtype="f32")
    return Codes(scaled, b.reshape(b.constant(1 / 127, "f32"), shape=(1, 1)), (0, 0), "bitsandbytes int8")


def _four_bits(stored: Stored) -> Codes:
    b, facts = stored.build, _state(stored)
    n, k, size = (int(x) for x in (*facts["shape"], facts["blocksize"]))
    if k % size or k % 2:
        raise refuse(METHOD, f"columns of {stored.module}", k, (f"multiples of {size}",))
    packed = stored.part("weight", ("u8",), 2)
    stored.expect(packed, n * k // 2, 1)
    table = stored.part("quant_map", ("f32",), 1)
    stored.expect(table, 16)
    code = b.unpack_bits(b.reshape(packed, shape=(n, k // 2)), bits=4, axis=1, size=k, order=(1, 0))
    return Codes(b.take(table, code), _scales(stored, facts, n, k // size), (1, size), f"bitsandbytes {facts['kind']}")


def _state(stored: Stored) -> dict[str, Any]:
    """Return the quant_state of a weight; raises Diagnostic E340."""
    kind = next((s for s in STATES if s in stored.parts), STATES[0])
    data = stored.load(stored.part(kind, ("u8",), 1).name)
    try:
        if data.size > MAX_STATE:
            raise ValueError(f"{data.size} bytes")
        facts = json.loads(data.tobytes().decode())
        numbers = [*facts["shape"], facts["blocksize"]]
        if len(numbers) != 3 or not all(type(x) is int and x > 0 for x in numbers):
            raise ValueError(f"shape and blocksize are {numbers}")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        cause = f"the quant_state of {stored.module} cannot be read: {str(e)[:200]}"
        raise Diagnostic("E340", cause, AGAIN) from None
    return {**facts, "kind": kind.rpartition("__")[2]}


def _scales(stored: Stored, facts: Mapping[str, Any], n: int, runs: int) -> Value:
    """Return the scale of each run of columns [n, runs].

    If the model ran on a CPU before it was saved, the scales are stored as [runs, n].
    """
    b, absmax = stored.build, stored.part("absmax", ("f32", "bf16", "f16", "u8"))
    if absmax.type.dtype != "u8":
        stored.check_scales(absmax)
    if absmax.type.rank == 2:
        stored.expect(absmax, runs, n)
        return b.transpose(absmax, perm=(1, 0))
    stored.expect(absmax, n * runs)
    if absmax.type.dtype != "u8":
        return b.reshape(absmax, shape=(n, runs))
    size, offset = facts.get("nested_blocksize"), facts.get("nested_offset")
    if type(size) is not int or size < 1 or not isinstance(offset, int | float):
        raise Diagnostic("E340", f"the quant_state of {stored.module} has no nested_blocksize and nested_offset", AGAIN)
    table = stored.part("nested_quant_map", ("f32",), 1)
    stored.expect(table, 256)
    outer = stored.scales("nested_absmax", ("f32",), -(-n * runs // size))
    code = b.reshape(b.take(table, absmax), shape=(1, n * runs))
    scale = b.reshape(outer, shape=(1, -(-n * runs // size)))
    flat = b.add(b.dequantize(code, scale, block=(1, size), dtype="f32"), b.constant(float(offset), "f32"))
    return b.reshape(flat, shape=(n, runs))
