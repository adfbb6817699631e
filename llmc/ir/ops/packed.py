"""Weights repacked in the order in which a kernel reads them, and products over packed weights.

The kernel that will read the weight chooses the layout. A panel holds `rows` accumulators of the product and stores
`pair` neighbouring columns of w side by side: [panels, ceil(k, pair), rows, pair], padded with zeros. If one epilogue
joins several parts (row blocks of w), a panel holds rows / parts rows of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Drawing, Shape
from llmc.ir.dim import Dim
from llmc.ir.opdef import op
from llmc.ir.ops.common import NUMPY
from llmc.ir.ops.linear import epilogue_type, rows_per_part
from llmc.ir.scalar import evaluate, parse_expr
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


def panel_shape(m: Dim, k: Dim, rows: int, pair: int, parts: int) -> tuple[Dim, ...]:
    """Return the packed shape of a weight [m, k]; raises Mismatch if the rows cannot be divided into the parts."""
    if min(rows, pair, parts) < 1 or rows % parts:
        raise Mismatch(f"rows={rows}, pair={pair}, parts={parts}: rows must be a positive multiple of parts")
    return rows_per_part(m, parts).ceildiv(rows // parts), k.ceildiv(pair), Dim.of(rows), Dim.of(pair)


def _pack_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    return [Type(env["w"].dtype, panel_shape(env["m"], env["k"], attrs["rows"], attrs["pair"], attrs["parts"]))]


@op(
    "(w: t[m, k]) -> w[...]", infer=_pack_type,
    example={"m": 14, "k": 5, "rows": 8, "pair": 2, "parts": 2},
)  # fmt: skip
def pack_panel(w: Any, *, rows: int, pair: int = 1, parts: int = 1) -> Any:
    """Pack w [m, k] into panels, padding with zeros.

    result[p, j, i, q] = w[block * (m / parts) + p * s + i % s, j * pair + q] with s = rows / parts and block = i // s,
    and zero beyond the block's rows and beyond k. Elements are moved, not converted, so any dtype works.
    """
    m, k = w.shape
    part_rows, panel_rows = m // parts, rows // parts  # rows of one part: of the whole weight, and of a panel
    panels, depth = -(-part_rows // panel_rows), -(-k // pair)
    out = np.zeros((panels, depth, parts, panel_rows, pair), w.dtype)
    split = w.reshape(parts, part_rows, k)
    step = max(1, (4 << 20) // max(1, out[:1].nbytes))  # number of panels whose copy fits the cache
    for begin in range(0, panels, step):
        end = min(begin + step, panels)
        source = split[:, begin * panel_rows : end * panel_rows]
        padded = np.zeros((parts, (end - begin) * panel_rows, depth * pair), w.dtype)
        padded[:, : source.shape[1], :k] = source
        target = out[begin:end]
        if pair > 1 and pair * w.itemsize in (4, 8):  # move each pair as one word
            padded, target = (a.view(f"u{pair * w.itemsize}") for a in (padded, target))
        target[:] = padded.reshape(parts, end - begin, panel_rows, depth, -1).transpose(1, 3, 0, 2, 4)
    return out.reshape(panels, depth, rows, pair)


def _packed(d: Drawing, shape: Shape) -> Any:
    """Return a packed random weight, whose padding is zero."""
    panels, depth, rows, pair = shape
    parts = d.attrs.get("parts", 1)
    n = int(d.attrs.get("n", panels * rows - 2))
    w = contents.arbitrary(d.rng, (n * parts, depth * pair - (pair > 1)), "f")
    return pack_panel.ref(w, rows=rows, pair=pair, parts=parts)


# The sizes of a weight [14, 5] packed with rows=8 and pair=2, for examples.
_PANEL: Mapping[str, Any] = MappingProxyType({"panels": 2, "depth": 3, "rows": 8, "pair": 2, "k": 5})


def unpack_panel(wp: Any, n: Any, k: int, parts: int) -> Any:
    """Invert pack_panel for parts of n rows: returns [parts * n, k]."""
    panels, depth, rows, pair = wp.shape
    w = wp.reshape(panels, depth, parts, rows // parts, pair).transpose(2, 0, 3, 1, 4)
    return w.reshape(parts, panels * (rows // parts), depth * pair)[:, :n, :k].reshape(parts * n, k)


def _packed_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, wp, extras, n, parts = env["x"], env["wp"], env["extras"], attrs["n"], attrs["parts"]
    rows, pair = env["rows"].const, env["pair"].const
    expected = panel_shape(n * parts, env["k"], rows or 0, pair or 0, parts)
    if expected != wp.shape:
        raise Mismatch(
            f"{wp} does not contain {parts} x {n} rows of {env['k']}: expected [{', '.join(map(str, expected))}]"
        )
    return epilogue_type(parts, extras, attrs["body"], Type(attrs["dtype"] or x.dtype, (*env["*b"], n)))


@op(
    "(x: f[*b, k], wp: f[panels, depth, rows, pair], extras*: f[...]) -> x[...]", infer=_packed_type,
    flops="2*b*k*n*parts",
    holds={"wp": _packed},
    example={**_PANEL, "extras": [(7,)], "n": 7, "parts": 2, "body": "add(mul(sigmoid(a0), a1), a2)"},
)  # fmt: skip
def packed_linear(x: Any, wp: Any, *extras: Any, n: Dim, parts: int = 1, body: str = "a0", dtype: str = "") -> Any:
    """linear_map over a packed weight (see pack_panel) with n outputs.

    The body's operands are the accumulators a0 .. a{parts-1}, then the extras; the result is rounded once to dtype (x's
    if empty).
    """
    acc = x @ unpack_panel(wp, n, x.shape[-1], parts).T
    return evaluate(parse_expr(body), NUMPY, [*np.split(acc, parts, axis=-1), *extras])


def _take_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if Dim.of(attrs["k"]).ceildiv(env["pair"].const or 1) != env["depth"]:
        raise Mismatch(f"{env['wp']} does not contain rows of size {attrs['k']}")
    return [Type(env["wp"].dtype, (*env["*b"], Dim.of(attrs["k"])))]


@op(
    "(wp: f[panels, depth, rows, pair], idx: i[*b]) -> wp[*b, k]", infer=_take_type, bytes="2*out*bytes_wp",
    holds={"wp": _packed, "idx": contents.index("wp", 0, 2, padding=True)}, example=_PANEL,
)  # fmt: skip
def packed_take(wp: Any, idx: Any, *, k: int) -> Any:
    """take over a packed weight of one part, so that a tied embedding can share the layout of the output projection.

    A negative index gives a row of zeros.
    """
    rows = wp.shape[2]
    i = np.maximum(idx, 0)
    values = wp[i // rows, :, i % rows].reshape(*idx.shape, -1)[..., :k]
    return np.where((idx >= 0)[..., None], values, 0)


@op(
    "(wp: f[panels, depth, rows, pair], idx: i[*b]) -> wp[*b, k]", infer=_take_type, bytes="2*out*bytes_wp",
    holds={"wp": _packed, "idx": contents.index("wp", 0, 2, padding=True)}, example={**_PANEL, "start": 3},
)  # fmt: skip
def packed_take_part(wp: Any, idx: Any, *, k: int, start: Dim) -> Any:
    """take_part over a packed weight of one part, which is a part of a table from its row `start` on.

    Rows outside the panels are zeros, and so is the padding.
    """
    at = idx - start
    return packed_take.ref(wp, np.where(at < wp.shape[0] * wp.shape[2], at, -1), k=k)
