"""Recognizes cos and sin tables of rotary embeddings. The front end usually emits the op rope_tables itself."""

from __future__ import annotations

from typing import Any

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node, Value
from llmc.passes.analysis import core, drop_ones, made_by, squeezed
from llmc.passes.rewrite import Build, Simplify


def _angles(v: Value) -> tuple[Value, Value] | None:
    """Return (frequencies [h], positions [t]) if v [t, h] is their outer product in any form, else None."""
    if v.type.rank != 2:
        return None
    transposed = made_by(v, "transpose")
    product = made_by(transposed.operands[0] if transposed else v, "mul", "matmul")
    if product is None:
        return None
    parts = [squeezed(o) for o in product.operands]
    if any(len(drop_ones(o.type.shape)) != 1 for o in parts):
        return None
    positions = [o for o in parts if DTYPES[_integers(o).type.dtype].kind == "i"]
    frequencies = [o for o in parts if o not in positions]
    if len(positions) != 1 or len(frequencies) != 1:
        return None
    t, h = drop_ones(positions[0].type.shape)[0], drop_ones(frequencies[0].type.shape)[0]
    if (t, h) != v.type.shape or t == h:
        return None
    return frequencies[0], _integers(positions[0])


def _integers(v: Value) -> Value:
    """Strip a cast from integers."""
    n = made_by(v, "cast")
    return n.operands[0] if n and DTYPES[n.operands[0].type.dtype].kind == "i" else v


def _table(n: Node) -> Build | None:
    """Match cos or sin of angles. A spread table concatenates the narrow one with itself."""
    (x,), index = n.operands, 0 if n.op.name == "cos" else 1
    spread = made_by(x, "concat")
    if spread and (len(spread.operands) != 2 or core(spread.operands[0]) is not core(spread.operands[1])):
        return None
    parts = _angles(spread.operands[0] if spread else x)
    if parts is None or x.type.dtype != "f32":
        return None
    frequencies, positions = parts

    def build(b: Any) -> Value:
        flat = [_vector(b, v) for v in (frequencies, positions)]
        narrow: Value = b.rope_tables(*flat, scaling=1.0, dtype="f32")[index]
        return b.concat(narrow, narrow, axis=spread.attrs["axis"]) if spread else narrow

    return build


def _vector(b: Any, v: Value) -> Value:
    shape: tuple[Dim, ...] = drop_ones(v.type.shape)
    return v if v.type.shape == shape else b.reshape(v, shape=shape)


TABLES = (Simplify("rope-tables", ("cos", "sin"), _table),)
