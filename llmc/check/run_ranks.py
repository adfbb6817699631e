"""Interprets a sharded graph: every node on all ranks, and a collective on the ranks' operands together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llmc_runtime.format.program import RANK

from llmc.ir.graph import Graph, Node, Value
from llmc.ir.interp import bind_symbols, concrete, last_uses, round_to_type, run_node
from llmc.ir.ops.comm import COLLECTIVES


def run_ranks(
    g: Graph, inputs: Sequence[Sequence[Any]], symbols: Mapping[str, int] | None = None, exact: bool = False
) -> list[list[np.ndarray]]:
    """Evaluate a graph on all ranks and return the outputs of each.

    inputs: per rank, one array per graph input: the whole weights, and the rank's own part of a sharded state. symbols
    and exact: as for `llmc.ir.interp.run`.
    """
    live: list[dict[Value, np.ndarray]] = []  # the live values of each rank
    sizes: list[dict[str, int]] = []
    for rank, arrays in enumerate(inputs):
        rounded = [round_to_type(x, v.type, exact) for v, x in zip(g.inputs, arrays, strict=True)]
        live.append(dict(zip(g.inputs, rounded, strict=True)))
        sizes.append(bind_symbols(g, rounded, {**(symbols or {}), RANK: rank}))
    last = last_uses(g)
    for i, n in enumerate(g.nodes):
        results = _run_node(n, [[values[v] for v in n.operands] for values in live], sizes, exact)
        for values, result in zip(live, results, strict=True):
            values |= dict(zip(n.results, result, strict=True))
            for v in last.get(i, ()):
                del values[v]
    return [[values[v] for v in g.outputs] for values in live]


def _run_node(
    n: Node, operands: Sequence[list[np.ndarray]], sizes: Sequence[Mapping[str, int]], exact: bool
) -> list[list[np.ndarray]]:
    """Return the results of a node on each rank; `operands` and `sizes` have one entry per rank."""
    if n.op.name not in COLLECTIVES:
        return [run_node(n, arrays, env, exact) for arrays, env in zip(operands, sizes, strict=True)]
    exchanged = [of_rank[0] for of_rank in operands]
    shared = operands[0][1:]  # the other operands are the same on all ranks
    return [_collective(n, [*exchanged, *shared], sizes[0], exact)] * len(operands)


def _collective(n: Node, xs: Sequence[np.ndarray], sizes: Mapping[str, int], exact: bool) -> list[np.ndarray]:
    """Return the results of a collective, which are the same on all ranks."""
    attrs = {k: concrete(v, sizes) for k, v in n.attrs.items()}
    result = n.op.ref(*xs, **attrs)
    results = result if isinstance(result, tuple) else (result,)
    return [round_to_type(x, r.type, exact) for x, r in zip(results, n.results, strict=True)]
