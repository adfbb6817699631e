"""Random operands for a node, or for an op without a graph, drawn from the op's declaration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Content, Drawing, Shape, Step
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.ops.quantize import FLOAT_CODES
from llmc.ir.types import Type

SIZES = (3, 5, 4, 6, 2, 7)


def named_operands(n: Node) -> list[tuple[str, Value]]:
    """Return (name in the op's declaration, value) per operand; the last name repeats for variadic ops."""
    names = [s.name for s in n.op.slots([v.type for v in n.operands])]
    return [(names[min(i, len(names) - 1)], v) for i, v in enumerate(n.operands)]


def node_drawing(
    n: Node, sizes: Mapping[str, int], step: Step | None, rng: np.random.Generator, **options: Any
) -> Drawing:
    """Return the drawing of a node's operands at the given sizes of symbols; None: on a random step that fits."""
    operands = dict(reversed(named_operands(n)))
    shapes = {k: tuple(int(d.subs(sizes).const or 0) for d in v.type.shape) for k, v in operands.items()}
    step = step or random_step(n.op.holds, shapes, n.attrs, rng)
    return Drawing(shapes, {k: v.type.dtype for k, v in operands.items()}, n.attrs, n.op.holds, step, rng, **options)


def op_example(op: OpDef, rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    """Return (operand arrays, attributes) for an op, with the sizes of its `example` and the contents that it declares.

    Positions, rows and pages agree; the step has padding, and entries that share a device row.
    """
    attrs = {k: v for k, v in op.example.items() if k in op.attrs}
    operands = _operands(op)
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, str] = {}
    for name, shape, dtype in operands:
        shapes.setdefault(name, shape)
        dtypes.setdefault(name, dtype)
    step = random_step(op.holds, shapes, attrs, rng)
    d = Drawing(shapes, dtypes, op.normal_attrs(attrs), op.holds, step, rng)
    variadic = {s.name for s in op.operands if s.many}
    return [d.draw(*o) if o[0] in variadic else d.operand(o[0]) for o in operands], attrs


def _operands(op: OpDef) -> list[tuple[str, Shape, str]]:
    """Return the name, shape and dtype of each operand of the example."""
    sizes = {k: v for k, v in op.example.items() if isinstance(v, int) and (k not in op.attrs)}
    out: list[tuple[str, Shape, str]] = []
    for slot in op.operands:
        if slot.scales and op.example.get(slot.scales) not in FLOAT_CODES:
            continue
        hint = op.example.get(slot.name)
        dtype = hint if isinstance(hint, str) else {"i": "i64", "b": "bool"}.get(slot.dtype, slot.dtype)
        dtype = dtype if dtype in DTYPES else "f32"
        shapes = hint if isinstance(hint, list) else [_shape(op, slot.dims, sizes)]  # a list: of a variadic operand
        out += [(slot.name, shape, dtype) for shape in shapes]
    return out


def _shape(op: OpDef, dims: Sequence[str], sizes: dict[str, int]) -> Shape:
    """Return the shape of an operand with these axes. Symbols that `sizes` lacks are added to it."""
    shape: list[int] = []
    for dim in dims:
        if dim[0] == "*":
            shape += op.example.get(dim, (2, 3))
            continue
        size = Dim.of(dim)
        for symbol in sorted(size.symbols):
            sizes.setdefault(symbol, SIZES[len(sizes) % len(SIZES)])
        shape.append(int(size.subs(sizes).const or 0))
    return tuple(shape)


def random_step(
    holds: Mapping[str, Content], shapes: Mapping[str, Shape], attrs: Mapping[str, Any], rng: np.random.Generator
) -> Step:
    """Draw a step with padding that fits the shapes of a node's operands."""
    of = {content: shapes[name] for name, content in holds.items() if name in shapes}

    def size(axis: int, *kinds: Content) -> int:
        return next((of[k][axis] for k in kinds if k in of), 0)

    tokens = int(attrs.get("tokens", 0)) or size(0, contents.positions, contents.token_row, contents.slots)
    entries = size(0, contents.rows, contents.qlens) or size(0, contents.starts) - 1
    entries = entries if entries > 0 else max(1, min(3, tokens - 1))
    pool, table = of.get(contents.kv_pool, ()), of.get(contents.page_table, ())
    page = pool[-2] if pool else int(attrs.get("page", 1))
    pages = pool[0] if pool else int(np.prod(table)) or 8
    widths = [size(1, contents.history), table[1] * page if table else 0]
    limit = min([w for w in widths if w], default=50)
    of_rows = (contents.length, contents.iparams, contents.page_table, contents.history, contents.row_numbers)
    device_rows = size(0, *of_rows) or entries
    tokens = max(tokens or 2 * entries + 1, entries)
    return Step.random(
        rng, entries=entries, tokens=tokens, rows=device_rows, limit=limit, padding=True, pages=pages, page=page,
        vocabulary=41,
    )  # fmt: skip


def example_graph(op: OpDef, arrays: list[Any], attrs: dict[str, Any], dtype: str = "f32") -> Module:
    """Return a module whose @main applies `op` to inputs typed after `arrays`.

    Float operands whose dtype the signature leaves open get `dtype`.
    """
    m = Module({"main": Graph("main")})
    g = m.graphs["main"]
    slots = [s for s in op.operands if not s.scales or op.example.get(s.scales) in FLOAT_CODES]
    while slots and len(slots) < len(arrays):
        slots.append(slots[-1])
    for i, (slot, x) in enumerate(zip(slots, arrays, strict=False)):
        x = np.asarray(x)
        of_kind = {"f": dtype, "b": "bool"}.get(x.dtype.kind) or f"{x.dtype.kind}{8 * x.dtype.itemsize}"
        t = Type(slot.dtype if slot.dtype in DTYPES else of_kind, tuple(map(Dim.of, x.shape)), slot.state)
        g.input(f"x{i}", t)
    g.outputs = list(g.add(op, g.inputs, attrs).results)
    return m
