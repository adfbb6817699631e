"""The reference interpreter: evaluates a graph with the ops' numpy references. It defines what a graph means.

Float values are stored as float32 arrays (float64 if exact=True) whose elements are already rounded to the type's
dtype: an op computes in full precision and its results are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmc.diagnostics import extension_code
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Node, Value
from llmc.ir.types import Type

Observer = Callable[[Node, list[np.ndarray]], None]


def run(
    g: Graph,
    inputs: Sequence[Any],
    symbols: Mapping[str, int] | None = None,
    exact: bool = False,
    observe: Observer | None = None,
) -> list[np.ndarray]:
    """Evaluate a graph and return its outputs.

    inputs: one array per graph input; their shapes bind the symbols, and `symbols` may bind further ones. exact:
    compute in float64 without rounding. observe: called with every node and its results. Raises ValueError if the shape
    of an input does not match its type.
    """
    env = {v: round_to_type(x, v.type, exact) for v, x in zip(g.inputs, inputs, strict=True)}
    sizes = bind_symbols(g, [env[v] for v in g.inputs], symbols or {})
    last = last_uses(g)
    for i, n in enumerate(g.nodes):
        results = run_node(n, [env[v] for v in n.operands], sizes, exact)
        if observe:
            observe(n, results)
        env |= dict(zip(n.results, results, strict=True))
        for v in last.get(i, ()):
            del env[v]
    return [env[v] for v in g.outputs]


def run_node(n: Node, operands: list[np.ndarray], sizes: Mapping[str, int], exact: bool = False) -> list[np.ndarray]:
    """Evaluate one node on arrays in interpreter form (see `round_to_type`).

    Raises ValueError if the reference returns other shapes than the type rule gives.
    """
    attrs = {k: concrete(v, sizes) for k, v in n.attrs.items()}
    with extension_code(f"the reference of the op {n.op.name!r}", n.op.ref, n):
        out = n.op.evaluate([v.type for v in n.operands], operands, attrs)
        parts = out if isinstance(out, tuple) else (out,)
        results = [round_to_type(x, r.type, exact) for x, r in zip(parts, n.results, strict=True)]
        for x, r in zip(results, n.results, strict=True):
            expected = tuple(concrete(d, sizes) for d in r.type.shape)
            if x.shape != expected:
                found = f"the reference returned shape {x.shape}, the type rule {expected}"
                raise ValueError(f"{n.op.name} ({n.loc or 'no loc'}): {found}")
        return results


def last_uses(g: Graph) -> dict[int, list[Value]]:
    """Map each node's index to the values that are not read after it."""
    at: dict[Value, int] = {}
    for i, n in enumerate(g.nodes):
        for v in [*n.operands, *n.results]:
            at[v] = i
    outputs = set(g.outputs)
    out: dict[int, list[Value]] = {}
    for v, i in at.items():
        if v not in outputs:
            out.setdefault(i, []).append(v)
    return out


def concrete(v: Any, sizes: Mapping[str, int]) -> Any:
    """Replace the symbols in an attribute or size by integers; raises ValueError if one is unbound."""
    if isinstance(v, tuple):
        return tuple(concrete(x, sizes) for x in v)
    if not isinstance(v, Dim):
        return v
    n = v.subs(sizes).const
    if n is None:
        raise ValueError(f"the size {v} contains a symbol that no input binds")
    return n


def round_to_type(x: Any, t: Type, exact: bool = False) -> np.ndarray:
    """Convert an array to interpreter form: floats rounded to the type's dtype but stored wide.

    A quantised tensor is its dequantised numbers, which are not rounded again.
    """
    dt = DTYPES[t.dtype]
    x = np.asarray(x)
    if dt.kind != "f":
        return x.astype(dt.np)
    if exact or t.dtype == "f64":
        return x.astype(np.float64)
    if t.dtype == "f32" or t.format is not None:
        return x.astype(np.float32)
    return x.astype(dt.np).astype(np.float32)


def bind_symbols(g: Graph, inputs: Sequence[np.ndarray], symbols: Mapping[str, int]) -> dict[str, int]:
    """Derive the symbols' sizes from the inputs' shapes; raises ValueError if they contradict each other."""
    sizes = dict(symbols)
    for v, x in zip(g.inputs, inputs, strict=True):
        if x.ndim != v.type.rank:
            raise ValueError(f"input %{v.name} has rank {x.ndim}, its type is {v.type}")
        for d, n in zip(v.type.shape, x.shape, strict=True):
            if len(d.symbols) == 1 and str(d) in d.symbols:
                sizes.setdefault(str(d), n)
    for v, x in zip(g.inputs, inputs, strict=True):
        expected = tuple(d.subs(sizes).const for d in v.type.shape)
        if expected != x.shape:
            raise ValueError(f"input %{v.name} has shape {x.shape}, expected {expected} for its type {v.type}")
    return sizes
