"""Random operands for an op or a graph, drawn from declarations. Used by tests, `--check` and kernel checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Module
from llmc.ir.opdef import OpDef
from llmc.ir.types import Type

SIZES = (3, 5, 4, 6, 2, 7)


def draw(rng: np.random.Generator, t: Type, sizes: dict[str, int]) -> np.ndarray:
    """Draw random values of a type: floats standard normal, integers 0 to 2, bools with equal probability."""
    shape = tuple(int(d.subs(sizes).const or 0) for d in t.shape)
    kind = DTYPES[t.dtype].kind
    if kind == "b":
        return rng.random(shape) > 0.5
    if kind == "i":
        return rng.integers(0, 3, shape)
    return rng.standard_normal(shape).astype(np.float32)


def op_example(op: OpDef, rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    """Return (operand arrays, attributes) for an op: its declared example, or values drawn to fit its signature."""
    if op.example:
        return op.example(rng)
    sizes: dict[str, int] = {}
    arrays = []
    for slot in op.operands:
        shape: list[int] = []
        for d in slot.dims:
            if d[0] == "*":
                shape += [2, 3]
            else:
                for s in Dim.of(d).symbols:
                    sizes.setdefault(s, SIZES[len(sizes) % len(SIZES)])
                shape.append(int(Dim.of(d).subs(sizes).const or 0))
        dtype = {"i": "i32", "b": "bool"}.get(slot.dtype, slot.dtype if slot.dtype in DTYPES else "f32")
        arrays.append(draw(rng, Type(dtype, tuple(map(Dim.of, shape))), {}))
    return arrays, {}


def example_graph(op: OpDef, arrays: list[Any], attrs: dict[str, Any], dtype: str = "f32") -> Module:
    """Return a module whose @main applies `op` to inputs typed after `arrays`.

    Float operands whose dtype the signature leaves open get `dtype`.
    """
    m = Module({"main": Graph("main")})
    g = m.graphs["main"]
    slots = list(op.operands)
    while slots and len(slots) < len(arrays):
        slots.append(slots[-1])
    for i, (slot, x) in enumerate(zip(slots, arrays, strict=False)):
        x = np.asarray(x)
        of_kind = {"f": dtype, "b": "bool"}.get(x.dtype.kind) or f"{x.dtype.kind}{8 * x.dtype.itemsize}"
        t = Type(slot.dtype if slot.dtype in DTYPES else of_kind, tuple(map(Dim.of, x.shape)), slot.state)
        g.input(f"x{i}", t)
    g.outputs = list(g.add(op, g.inputs, attrs).results)
    return m
