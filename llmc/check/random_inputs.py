"""Random inputs for interpreting a graph, drawn from what the ops that read them declare (`llmc.ir.contents`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.ir import contents
from llmc.ir.contents import Array, Content, Index, Step, arbitrary
from llmc.ir.dtype import DTYPES
from llmc.ir.example import named_operands, node_drawing
from llmc.ir.graph import Graph, Module, Node, Value

ROWS, MAX_TOKENS, MAX_BEFORE = 3, 4, 3  # rows of a step, maximum tokens of each row in it and before it
PAGES = 8  # KV pages if the graph has no page table


@dataclass
class Inputs:
    """Arrays by input name, and the sizes of the symbols."""

    arrays: dict[str, Array]
    sizes: dict[str, int]

    def of(self, g: Graph) -> list[Array]:
        """Return the arrays in the order of the graph's inputs."""
        return [self.arrays[v.name] for v in g.inputs]


def draw(m: Module, g: Graph, rng: np.random.Generator) -> Inputs:
    """Draw inputs for graph `g` of module `m`."""
    sizes = _sizes(m, g)
    step = _step(g, sizes, rng)
    arrays = {}
    for v in g.inputs:
        name, reader = _reader(v)
        if reader is None:
            arrays[v.name] = arbitrary(rng, _shape(v, sizes), DTYPES[v.type.dtype].kind, scale=True)
        else:
            d = node_drawing(reader, sizes, step, rng, scale=True)
            arrays[v.name] = d.draw(name, _shape(v, sizes), v.type.dtype)
    return Inputs(arrays, sizes)


def elements(m: Module) -> int:
    """Return the number of input elements of the largest graph, with small values for all symbols."""
    small = dict.fromkeys(m.symbols, 4)
    totals = [sum(v.type.numel.subs(small).const or 0 for v in g.inputs) for g in m.graphs.values()]
    return max(totals, default=0)


def _shape(v: Value, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(d.subs(sizes).const or 0) for d in v.type.shape)


def _holding(g: Graph, content: Content) -> list[tuple[Node, Value]]:
    """Return the nodes that have an operand of that content, and the operand."""
    return [(n, v) for n in g.nodes for name, v in named_operands(n) if n.op.holds.get(name) is content]


def _sizes(m: Module, g: Graph) -> dict[str, int]:
    """Choose the sizes of all symbols: small, within their bounds, and consistent with the step's rows and tokens."""
    sizes = {symbol: int(np.clip(5 + i, lo, hi)) for i, (symbol, (lo, hi)) in enumerate(m.symbols.items())}
    for node, qlens in _holding(g, contents.qlens)[:1]:
        (rows,), tokens = qlens.type.shape, node.attrs["tokens"]
        count = rows.const
        if count is None:
            device_rows = (v.type.shape[0].const or ROWS for v in g.inputs if v.type.state)
            count = sizes[str(rows)] = min(ROWS, *device_rows, m.symbols[str(rows)][1])
        if tokens.const is None and tokens != rows:
            sizes[str(tokens)] = min(count * MAX_TOKENS - 2, m.symbols[str(tokens)][1])
    pools = {str(v.type.shape[0]) for _, v in _holding(g, contents.kv_pool) if v.type.state}
    return sizes | dict.fromkeys((p for p in pools if p.isidentifier()), _pages(g))


def _pages(g: Graph) -> int:
    """Return the number of pages of the KV pool: the number of entries in the page tables of the device rows."""
    tables = [v for _, v in _holding(g, contents.page_table) if v in g.inputs]
    return (tables[0].type.numel.const or PAGES) if tables else PAGES


def _step(g: Graph, sizes: dict[str, int], rng: np.random.Generator) -> Step:
    """Draw the step that the graph computes; the prompts of a prompt graph are two rows without earlier tokens."""
    tables = [_shape(n.operands[i], sizes)[0] for n in g.nodes for i in _table_operands(n)]
    more: dict[str, Any] = {"pages": _pages(g), "vocabulary": min(tables, default=3)}
    for n, qlens in _holding(g, contents.qlens)[:1]:
        entries = _shape(qlens, sizes)[0]
        tokens = int(n.attrs["tokens"].subs(sizes).const or 1)
        device_rows = [_shape(v, sizes)[0] for _, v in _holding(g, contents.length)]
        limit = max(MAX_TOKENS, -(-tokens // entries)) + MAX_BEFORE
        return Step.random(rng, entries=entries, tokens=tokens, rows=max(device_rows), limit=limit, **more)
    token_inputs = [*_holding(g, contents.positions), *_holding(g, contents.token_row)]
    tokens = _shape(token_inputs[0][1], sizes)[0] if token_inputs else 2
    entries = min(2, tokens)
    limit = -(-tokens // entries)
    return Step.random(rng, entries=entries, tokens=tokens, rows=entries, limit=limit, **more)


def _table_operands(n: Node) -> list[int]:
    """Return the numbers of the operands that are weights with a row per token id: others of the node index them."""
    names = [name for name, _ in named_operands(n)]
    indices = [c for name in names if isinstance(c := n.op.holds.get(name), Index) and c.of in names]
    return [i for c in indices if n.operands[i := names.index(c.of)].weight]


def _reader(v: Value) -> tuple[str, Node | None]:
    """Return the operand name and the reader that declare a value's content, skipping ops that only pass integers on.
    These ops accept any dtype, so they cannot interpret the integers.
    """
    readers: list[tuple[str, Node]] = []
    for n in dict.fromkeys(v.uses):
        for slot, (name, operand) in zip(_slots(n), named_operands(n), strict=True):
            if operand is not v:
                continue
            readers.append((name, n))
            if slot == "t" and DTYPES[v.type.dtype].kind == "i" and DTYPES[n.results[0].type.dtype].kind == "i":
                inner, reader = _reader(n.results[0])
                readers += [(inner, reader)] if reader else []
    known = [(name, n) for name, n in readers if name in n.op.holds] or readers
    return known[0] if known else ("", None)


def _slots(n: Node) -> list[str]:
    """Return the dtype class of each operand in the op's signature."""
    slots = n.op.slots([v.type for v in n.operands])
    return [slots[min(i, len(slots) - 1)].dtype for i in range(len(n.operands))]
