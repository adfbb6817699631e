"""Random inputs for interpreting a graph, valid for their readers: indices are in range and row data is consistent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from llmc_runtime.format.row_abi import FLOAT_COLUMNS, INT_COLUMNS

from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.ir.types import Type

ROWS, LONGEST = 3, 4  # number of rows of a step, and maximum tokens per row
THROUGH = ("cast", "reshape", "slice", "broadcast", "concat", "transpose")
PAGES = (
    "row_slots.pages",
    "row_begin.pages",
    *(f"paged_attention{kind}.pages" for kind in ("", "_split", "_single")),
)
SPANS = ("row_spans", "row_begin")
BLOCKS = ("row_block_max", "row_sample_blocks", "row_finish")
Array = np.ndarray


@dataclass
class Inputs:
    """Arrays by input name, and the sizes of the symbols."""

    arrays: dict[str, Array] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def of(self, g: Graph) -> list[Array]:
        """Return the arrays in the order of the graph's inputs."""
        return [self.arrays[v.name] for v in g.inputs]


def draw(m: Module, g: Graph, rng: np.random.Generator) -> Inputs:
    """Draw inputs for graph `g` of module `m`."""
    out = Inputs(sizes=_sizes(m, g, rng))
    roles = {v.name: _role(v) for v in g.inputs}
    maker = _Maker(g, out, rng)
    for v in g.inputs:
        out.arrays[v.name] = maker.make(v, roles[v.name])
    return out


def elements(m: Module) -> int:
    """Number of input elements of the largest graph, with small values for all symbols."""
    small = dict.fromkeys(m.symbols, 4)
    totals = [sum(v.type.numel.subs(small).const or 0 for v in g.inputs) for g in m.graphs.values()]
    return max(totals, default=0)


def _sizes(m: Module, g: Graph, rng: np.random.Generator) -> dict[str, int]:
    """Sizes of all symbols: small, within their bounds, and consistent with the step's rows and tokens."""
    sizes = {s: int(np.clip(5 + i, lo, hi)) for i, (s, (lo, hi)) in enumerate(m.symbols.items())}
    if spans := next((n for n in g.nodes if n.op.name in SPANS), None):
        (rows,), states = spans.operands[0].type.shape, [v for v in g.inputs if v.type.state]
        r = rows.const or min(ROWS, *(v.type.shape[0].const or ROWS for v in states), m.symbols[str(rows)][1])
        if rows.const is None:
            sizes[str(rows)] = r
        tokens = spans.attrs["tokens"]
        if tokens.const is None and tokens != rows:
            sizes[str(tokens)] = min(r * LONGEST - 2, m.symbols[str(tokens)][1])
    return sizes | _pool(g)


def _pool(g: Graph) -> dict[str, int]:
    """Number of pages of the KV pool: as many as the rows' page tables have entries."""
    tables = [v for v in g.inputs if _role(v)[0] in PAGES]
    slots = [(s.name, v) for n in g.nodes for s, v in zip(n.op.operands, n.operands, strict=False)]
    pools = {str(v.type.shape[0]) for name, v in slots if name == "kv" and v.type.state}
    named = {p for p in pools if p.isidentifier()}
    return dict.fromkeys(named, tables[0].type.numel.const or 8) if tables else dict.fromkeys(named, 8)


def _role(v: Value) -> tuple[str, Node | None]:
    """("op.operand", node) of the reader that says most about the meaning of the value."""
    found: list[tuple[str, Node]] = []
    for n in dict.fromkeys(v.uses):
        if n.op.name in THROUGH and DTYPES[v.type.dtype].kind == "i":
            inner = _role(n.results[0])
            found += [(inner[0], inner[1])] if inner[1] else []
        for slot, operand in zip(n.op.operands, n.operands, strict=False):
            if operand is v:
                found.append((f"{n.op.name}.{slot.name}", n))
    known = [f for f in found if f[0] in RULES] or found
    return known[0] if known else ("", None)


class _Maker:
    """Draws one array at a time, keeping the rows of a step consistent."""

    def __init__(self, g: Graph, out: Inputs, rng: np.random.Generator) -> None:
        self.g, self.out, self.rng = g, out, rng

    def shape(self, t: Type) -> tuple[int, ...]:
        return tuple(int(d.subs(self.out.sizes).const or 0) for d in t.shape)

    def size(self, v: Value, axis: int = 0) -> int:
        return self.shape(v.type)[axis]

    def make(self, v: Value, role: tuple[str, Node | None]) -> Array:
        """Draw the array of one input, by the rule of its role if there is one."""
        shape = self.shape(v.type)
        kind = DTYPES[v.type.dtype].kind
        if role[1] is not None and role[0] in RULES:
            return RULES[role[0]](self, role[1], shape)
        if kind == "b":
            return self.rng.random(shape) > 0.5
        if kind == "i":
            return self.rng.integers(0, 3, shape)
        if len(shape) < 2:
            return (1 + 0.3 * self.rng.standard_normal(shape)).astype(np.float32)
        return (self.rng.standard_normal(shape) / max(1, shape[-1]) ** 0.5).astype(np.float32)

    def indices(self, shape: tuple[int, ...], below: int) -> Array:
        return self.rng.integers(0, max(1, below), shape)

    def qlens(self, n: Node, shape: tuple[int, ...]) -> Array:
        tokens = int(n.attrs["tokens"].subs(self.out.sizes).const or shape[0])
        q = np.full(shape, tokens // shape[0], np.int32)
        q[: tokens - int(q.sum())] += 1
        return q

    def ids(self, n: Node, shape: tuple[int, ...], result: int = 0) -> Array:
        role, reader = _role(n.results[result])
        return self.indices(shape, self.size(reader.operands[0]) if reader and role == "take.idx" else 3)

    def fparams(self, n: Node, shape: tuple[int, ...]) -> Array:
        columns = {"temperature": np.arange(shape[0]) % 2 * 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
        return _columns(shape, np.float32, FLOAT_COLUMNS, {**columns, "frequency_penalty": 0.1})

    def iparams(self, n: Node, shape: tuple[int, ...]) -> Array:
        odd = np.arange(shape[0]) % 2
        columns = {"seed_lo": np.arange(shape[0]) + 11, "min_len": 5, "want_logprobs": odd, "masked": odd}
        return _columns(shape, np.int32, INT_COLUMNS, {**columns, "num_biases": shape[0] % 2})

    def stops(self, n: Node, shape: tuple[int, ...]) -> Array:
        s = np.full(shape, -1, np.int32)
        s[:, 0] = 1
        return s


def _columns(shape: tuple[int, ...], dtype: type, names: tuple[str, ...], values: Mapping[str, Any]) -> Array:
    """Parameters of rows: zeros but for the named columns."""
    out: Array = np.zeros(shape, dtype)
    for name, value in values.items():
        out[:, names.index(name)] = value
    return out


def _positions(k: _Maker, n: Node, shape: tuple[int, ...]) -> Array:
    """Positions of two consecutive prompts."""
    first = (shape[0] + 1) // 2
    return np.concatenate([np.arange(first), np.arange(shape[0] - first)])


Rule = Callable[[_Maker, Node, tuple[int, ...]], Array]


def _of(ops: tuple[str, ...], operand: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for an operand of several ops."""
    return {f"{op}.{operand}": rule for op in ops}


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "attention.pos": _positions,
        "take.idx": lambda k, n, s: k.indices(s, k.size(n.operands[0])),
        "gather.idx": lambda k, n, s: k.indices(s, k.size(n.operands[0], n.attrs["axis"])),
        "moe.idx": lambda k, n, s: k.indices(s, k.size(n.operands[3])),
        "rope_tables.pos": _positions,
        **_of(SPANS, "rows", lambda k, n, s: k.rng.permutation(max(s[0], k.size(n.operands[2])))[: s[0]]),
        **_of(SPANS, "qlens", lambda k, n, s: k.qlens(n, s)),
        **_of(SPANS, "length", lambda k, n, s: k.indices(s, 4)),
        "row_ids.tokens": lambda k, n, s: k.ids(n, s),
        "row_begin.tokens": lambda k, n, s: k.ids(n, s, 3),
        **dict.fromkeys(PAGES, lambda k, n, s: k.rng.permutation(int(np.prod(s))).reshape(s)),
        **_of(("row_penalize", "row_sample", *BLOCKS), "fparams", lambda k, n, s: k.fparams(n, s)),
        **_of(("row_sample", "row_mask", "row_penalize", *BLOCKS), "iparams", lambda k, n, s: k.iparams(n, s)),
        **_of(("row_mask", *BLOCKS), "stops", lambda k, n, s: k.stops(n, s)),
        **_of(
            ("row_penalize", *BLOCKS), "bias_ids", lambda k, n, s: np.tile(np.arange(s[1], dtype=np.int32), (s[0], 1))
        ),
        **_of(("row_mask", *BLOCKS), "allowed", lambda k, n, s: np.full(s, 0x5B6DB6DB, np.int32)),
        **_of(("row_commit", "row_finish"), "emit", lambda k, n, s: np.ones(s, np.int32)),
    }
)
