"""GPTQ checkpoints (AutoGPTQ, GPTQModel): integers packed along k, zero points packed along n.

Tensors of a weight [n, k]: qweight int32 [k * bits / 32, n], qzeros int32 [groups, n * bits / 32], scales [groups, n]
and, optionally, g_idx int32 [k], the group of each column. Format "gptq" stores zero points minus one. For 2, 4 and 8
bits, writers subtract 1 from all fields of a 32-bit word at once, so a borrow runs into the next field; for 3 bits,
they subtract from each field. Format "gptq_v2" stores them unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Value
from llmc.ir.ops.quantize import unpack_bits
from llmc.quant.scheme import (
    AGAIN,
    Codes,
    PartNames,
    Stored,
    columns_of_group,
    integer,
    left_out,
    refuse,
    shape_of,
    supported,
    table,
)

PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight")
BITS = (2, 3, 4, 8)
# The number that adds 1 to each field of a word.
ONE_PER_FIELD: Mapping[int, int] = MappingProxyType({2: 0x55555555, 4: 0x11111111, 8: 0x01010101})
FORMATS = ("gptq", "gptq_v2")
INPUTS = ("adapter", "rotation")  # keys of checkpoints that compute more than a product with the weight


@dataclass(frozen=True)
class Gptq(PartNames):
    """The scheme of one checkpoint. `dynamic`: (pattern, scheme of its modules or None for plain), the first match.

    indexed: every weight has a g_idx, because its columns were quantised in another order (`desc_act`).
    """

    parts = PARTS
    bits: int
    group_size: int
    less_one: bool
    indexed: bool = False
    dynamic: tuple[tuple[re.Pattern[str], Gptq | None], ...] = ()

    def decode(self, stored: Stored) -> Codes:
        """See `Scheme.decode`."""
        for pattern, scheme in self.dynamic:
            if pattern.match(stored.module):
                if scheme is None:
                    raise left_out(stored.module, f"dynamic {pattern.pattern!r} (gptq)")
                return scheme.decode(stored)
        codes = unpack(stored, self.bits, self.group_size, self.less_one)
        count = shape_of(codes.scale)[1]
        if self.indexed and count > 1:
            index = stored.part("g_idx", ("i32",))
            if not stored.load(index.name).any():
                cause = f"{index.name} puts all columns in group 0; there are {count} groups of scales"
                raise Diagnostic("E342", cause, AGAIN)
        return codes


def gptq(config: Mapping[str, Any]) -> Gptq:
    """Return the scheme of a quantization_config; raises Diagnostic E307 or E340."""
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    supported("gptq", "checkpoint_format", kind, FORMATS)
    if config.get("is_marlin_format"):
        raise refuse("gptq", "is_marlin_format", True, (False,))
    if config.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise refuse("gptq", "pack_dtype", config["pack_dtype"], ("int32",))
    for key in INPUTS:
        if config.get(key):
            raise refuse("gptq", key, config[key], ("none",))
    return Gptq(
        integer(config, "bits", "gptq"), columns_of_group(config, "group_size", "gptq", -1), kind == "gptq",
        bool(config.get("desc_act")) and not config.get("static_groups"),
        tuple(_rule(key, value, config) for key, value in table(config, "dynamic", "gptq").items()),
    )  # fmt: skip


def _rule(key: str, changes: Any, config: Mapping[str, Any]) -> tuple[re.Pattern[str], Gptq | None]:
    """Return a rule of `dynamic`: "+:pattern" (or a bare one) changes keys, "-:pattern" leaves modules as they are."""
    try:
        pattern = re.compile(key[2:] if key[:2] in ("+:", "-:") else key)
        settings = None if key.startswith("-:") else {**config, **dict(changes), "dynamic": None}
    except (re.error, TypeError, ValueError) as e:
        raise Diagnostic("E340", f"quantization_config (gptq) has the dynamic rule {key[:80]!r}: {e}", AGAIN) from None
    return pattern, None if settings is None else gptq(settings)


def unpack(stored: Stored, bits: int, group_size: int, less_one: bool) -> Codes:
    """Return the codes of a weight in GPTQ's layout; raises Diagnostic E307, E340, E341 or E342."""
    supported("gptq", f"bits of {stored.module}", bits, BITS)
    b = stored.build
    words, zeros = stored.part("qweight", ("i32",), 2), stored.part("qzeros", ("i32",), 2)
    rows, n = shape_of(words)
    k = rows * 32 // bits
    size = group_size if group_size > 0 else k
    count = -(-k // size)
    scales = stored.scales("scales", ("f16", "bf16", "f32"), count, n)
    stored.expect(zeros, count, -(-n * bits // 32))
    by_index = stored.groups("g_idx", k, count, size)
    zero: Value | int
    code = b.unpack_bits(b.transpose(words, perm=(1, 0)), bits=bits, axis=1, size=k)
    added: Mapping[str, int] = {"word_add": ONE_PER_FIELD[bits]} if bits in ONE_PER_FIELD else {"add": 1}
    layout = {"bits": bits, "axis": 0, "size": n, **(added if less_one else {})}
    points = unpack_bits.ref(stored.load(zeros.name).T, **layout)
    zero = (
        b.unpack_bits(b.transpose(zeros, perm=(1, 0)), **layout) if points.min() < points.max() else int(points[0, 0])
    )
    scale = b.transpose(scales, perm=(1, 0))
    block = (1, 0 if size >= k else size)
    return Codes(code, scale, block, f"gptq {bits} bit", zero, groups=by_index)
