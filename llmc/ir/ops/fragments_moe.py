"""Expert products over stacks of 4-bit codes in the order in which Hopper's warpgroups multiply them.

`fragments_moe_up` and `fragments_moe_down` correspond to `quantized_moe_up` and `quantized_moe_down` as
`packed_fragments_linear` does to `quantized_linear`. The tables of scales and of zero points are transposed. In the
first product's stack, gate and up alternate in groups of eight rows: a thread of a warpgroup has two rows that are
eight apart, which are the gate and the up value of one column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.contents import integers, positive, probability
from llmc.ir.opdef import op
from llmc.ir.ops.moe import checked, down_type, drawn_order, drawn_starts, up_type
from llmc.ir.ops.packed_fragments import BLOCK, unpack_fragments
from llmc.ir.ops.quantize import VALUES, check_scales
from llmc.ir.ops.quantized_moe import check_extras, draw_stack_extras, quantized_moe_down, quantized_moe_up
from llmc.ir.signature import Mismatch

EIGHT = 8  # rows of a part that follow each other in the first product's stack
OF_CODES = ("half", "bits", "act", "act_block")  # attributes of quantized_moe_up that these ops do not have


def _check_stack(env: dict[str, Any], attrs: Mapping[str, Any], columns: Any) -> None:
    """Raise Mismatch unless codes, tables and bias agree with each other and with the attributes."""
    code, scale, extras = env["code"], env["scale"], list(env["extras"])
    rows, blocks = code.shape[1], columns.divide(BLOCK)
    if rows.divide(BLOCK) is None or blocks is None or code.shape[2] != blocks * (BLOCK // 2):
        raise Mismatch(f"{code} does not contain {columns} codes a row; both are multiples of {BLOCK}")
    if attrs["values"] and attrs["values"] not in VALUES:
        raise Mismatch(f"values={attrs['values']!r} is not one of {', '.join(VALUES)}")
    e, c, r = scale.shape
    check_scales(code.with_shape(*code.shape[:2], columns), scale.with_shape(e, r, c), attrs["block"])
    check_extras(code, scale, extras, attrs["zeros"])


def _operands(code: Any, scale: Any, extras: tuple[Any, ...], zeros: int, parts: int) -> list[Any]:
    """The operands of the product over codes that are not packed."""
    tables = [np.swapaxes(t, 1, 2) for t in (scale, *extras[:zeros])]
    return [*(separate(x, parts) for x in (unpack_fragments(code), *tables)), *extras[zeros:]]


def separate(x: Any, parts: int) -> Any:
    """Return the rows [experts, rows, columns] of one part after the other, of parts that alternate."""
    e, m, c = x.shape
    return x.reshape(e, -1, parts, EIGHT, c).swapaxes(1, 2).reshape(e, m, c)


@op(
    "(x: f[t, d], order: i[p], starts: i[s], code: u8[e, m, c], scale: f[e, g, m], extras*: t[...]) -> x[...]",
    infer=checked(_check_stack, up_type, "d"), flops="2*p*m*d", attrs_of=quantized_moe_up, without=OF_CODES,
    holds={
        "order": drawn_order, "starts": drawn_starts, "code": integers(0, 256), "scale": positive,
        "extras": draw_stack_extras,
    },
    example={
        "t": 7, "d": 64, "p": 14, "s": 7, "e": 6, "m": 128, "c": 32, "g": 2, "k": 2, "block": [1, 32], "zeros": True,
        "extras": [(6, 2, 128), (6, 128)],
    },
)  # fmt: skip
def fragments_moe_up(
    x: Any, order: Any, starts: Any, code: Any, scale: Any, *extras: Any, zeros: bool = False, **attrs: Any
) -> Any:
    """quantized_moe_up over codes that pack_fragments has packed, after gate and up have been made to alternate.

    The rows of a bias do not alternate.
    """
    code, scale, *extras_of = _operands(code, scale, extras, int(zeros), 2)
    return quantized_moe_up.ref(x, order, starts, code, scale, *extras_of, zeros=zeros, **attrs)


@op(
    "(h: f[p, i], order: i[p], starts: i[s], code: u8[e, d, c], scale: f[e, g, d], weights: f[t, k], extras*: t[...])"
    " -> h[...]",
    infer=checked(_check_stack, down_type, "i"), flops="2*p*d*i", attrs_of=quantized_moe_down, without=OF_CODES,
    holds={
        "order": drawn_order, "starts": drawn_starts, "code": integers(0, 256), "scale": positive,
        "weights": probability, "extras": draw_stack_extras,
    },
    example={
        "p": 14, "i": 64, "s": 7, "e": 6, "d": 64, "c": 32, "g": 1, "t": 7, "k": 2, "block": [1, 64],
        "extras": [(6, 64)],
    },
)  # fmt: skip
def fragments_moe_down(
    h: Any, order: Any, starts: Any, code: Any, scale: Any, weights: Any, *extras: Any, zeros: bool = False,
    **attrs: Any,
) -> Any:  # fmt: skip
    """quantized_moe_down over codes that pack_fragments has packed."""
    code, scale, *extras_of = _operands(code, scale, extras, int(zeros), 1)
    return quantized_moe_down.ref(
        h, order, starts, code, scale, weights, *extras_of, zeros=zeros, half=0, act="", **attrs
    )
