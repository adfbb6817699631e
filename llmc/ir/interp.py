"""The reference interpreter: every op's own reference, in order; it defines what a graph means and is never fast.

Float values are held as float32 (exact=True: float64) arrays already rounded to their type's dtype: op bodies see
full precision, storage is rounded at op boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .dim import Dim
from .dtype import DTYPES
from .graph import Graph, Node, Value
from .types import Type

Observer = Callable[[Node, list[np.ndarray]], None]


def run(
    g: Graph,
    inputs: Sequence[Any],
    symbols: Mapping[str, int] | None = None,
    exact: bool = False,
    observe: Observer | None = None,
) -> list[np.ndarray]:
    """Evaluate the graph's outputs.

    inputs: one array per graph input, shapes as the types say (sizes bind the symbols; `symbols` may add some).
    exact: compute in float64 and round nothing. Raises ValueError where an input's shape does not fit.
    """
    env = {v: hold(x, v.type, exact) for v, x in zip(g.inputs, inputs, strict=True)}
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
    """One node on held arrays."""
    attrs = {k: concrete(v, sizes) for k, v in n.attrs.items()}
    out = n.op.ref(*operands, **attrs)
    parts = out if isinstance(out, tuple) else (out,)
    held = [hold(x, r.type, exact) for x, r in zip(parts, n.results, strict=True)]
    for x, r in zip(held, n.results, strict=True):
        want = tuple(concrete(d, sizes) for d in r.type.shape)
        if x.shape != want:
            raise ValueError(f"{n.op.name} ({n.loc or 'no loc'}): its reference gave shape {x.shape}, its rule {want}")
    return held


def last_uses(g: Graph) -> dict[int, list[Value]]:
    """Node index -> values that nothing reads afterwards."""
    at: dict[Value, int] = {}
    for i, n in enumerate(g.nodes):
        for v in [*n.operands, *n.results]:
            at[v] = i
    keep = set(g.outputs)
    out: dict[int, list[Value]] = {}
    for v, i in at.items():
        if v not in keep:
            out.setdefault(i, []).append(v)
    return out


def concrete(v: Any, sizes: Mapping[str, int]) -> Any:
    """An attribute or size with its symbols replaced by integers."""
    if isinstance(v, tuple):
        return tuple(concrete(x, sizes) for x in v)
    if not isinstance(v, Dim):
        return v
    n = v.subs(sizes).const
    if n is None:
        raise ValueError(f"the size {v} has symbols that no input binds")
    return n


def hold(x: Any, t: Type, exact: bool = False) -> np.ndarray:
    """The array in its held form: floats rounded to the type's dtype but stored wide, integers in their dtype."""
    dt = DTYPES[t.dtype]
    x = np.asarray(x)
    if dt.kind != "f":
        return x.astype(dt.np)
    if exact:
        return x.astype(np.float64)
    if t.dtype == "f64":
        return x.astype(np.float64)
    if t.dtype == "f32":
        return x.astype(np.float32)
    return x.astype(dt.np).astype(np.float32)


def bind_symbols(g: Graph, inputs: Sequence[np.ndarray], given: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the symbols from the inputs' shapes; ValueError where two inputs disagree."""
    sizes = dict(given)
    for v, x in zip(g.inputs, inputs, strict=True):
        if x.ndim != v.type.rank:
            raise ValueError(f"input %{v.name} has rank {x.ndim}, its type is {v.type}")
        for d, n in zip(v.type.shape, x.shape, strict=True):
            if len(d.symbols) == 1 and str(d) in d.symbols:
                sizes.setdefault(str(d), n)
    for v, x in zip(g.inputs, inputs, strict=True):
        want = tuple(d.subs(sizes).const for d in v.type.shape)
        if want != x.shape:
            raise ValueError(f"input %{v.name} has shape {x.shape}, its type {v.type} wants {want}")
    return sizes
