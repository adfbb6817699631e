"""Evaluates a graph of a module and compares its outputs with those of another version.

A sharded graph is interpreted on all ranks: every node on each, and a collective on the ranks' operands together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from llmc_runtime.format.program import RANK

from llmc.check.random_inputs import Array, Inputs
from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Module, Node, Value
from llmc.ir.interp import bind_symbols, concrete, last_uses, round_to_type, run, run_node
from llmc.ir.ops.comm import COLLECTIVES

TOLERANCE = 1e-5  # largest relative difference of an output in float64
MAX_GROWTH = 2.0  # permitted ratio of rounding errors after and before a pass
IGNORED_UNITS = 2.0  # permitted rounding errors, in units in the last place of the coarsest dtype


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


@dataclass(frozen=True)
class Rounding:
    """The effect of a change on rounded results, over all float outputs of a graph.

    before, after: the largest difference of a rounded result from the one in float64, relative to the output's largest
    magnitude. changed: share of the elements of all outputs that differ between the rounded results.
    """

    before: float
    after: float
    changed: float


@dataclass(frozen=True)
class Compared:
    """The result for one graph: number of outputs, the largest relative difference of any output in float64, and the
    effect on rounded results if they were compared.
    """

    graph: str
    outputs: int
    worst: float
    rounding: Rounding | None = None

    def __str__(self) -> str:
        counted = "1 output agrees" if self.outputs == 1 else f"{self.outputs} outputs agree"
        text = f"@{self.graph}: {counted}, the largest difference is {self.worst:.1e}"
        if self.rounding is None:
            return text
        r = self.rounding
        return f"{text}; rounded: error {r.after:.1e} (before: {r.before:.1e}), {r.changed:.1%} of the elements changed"


def evaluate(m: Module, g: Graph, inputs: Inputs, exact: bool = True) -> list[Array]:
    """Return the graph's outputs, evaluating @weights first if the module has it.

    In float64, or, if not `exact`, as the interpreter defines them: in float32, with every op's result rounded to its
    dtype. Of a sharded module, all ranks are evaluated, and the outputs of the first are returned.
    """
    if any(n.op.name in COLLECTIVES for n in g.nodes):
        return _first_rank(m, g, inputs, exact)
    arrays = dict(inputs.arrays)
    weights = m.graphs.get("weights")
    if weights is not None and weights is not g:
        packed = run(weights, [arrays[v.name] for v in weights.inputs], exact=exact)
        arrays |= dict(zip((v.name for v in weights.outputs), packed, strict=True))
    return run(g, [arrays[v.name] for v in g.inputs], inputs.sizes, exact=exact)


def _first_rank(m: Module, g: Graph, inputs: Inputs, exact: bool) -> list[Array]:
    """Evaluate a graph on all ranks; raises Diagnostic E425 if it has states, of which each rank has its own."""
    if any(v.type.state for v in g.inputs):
        cause = f"@{g.name} is sharded and has states, of which each rank has its own"
        raise Diagnostic("E425", cause, "check the pass shard before page-attention, which adds the states")
    weights, arrays = m.graphs.get("weights"), []
    for rank in range(m.symbols[RANK][1] + 1):
        known = dict(inputs.arrays)
        if weights is not None:
            packed = run(weights, [known[v.name] for v in weights.inputs], {RANK: rank}, exact=exact)
            known |= dict(zip((v.name for v in weights.outputs), packed, strict=True))
        arrays.append([known[v.name] for v in g.inputs])
    return run_ranks(g, arrays, inputs.sizes, exact)[0]


def judged_rounding(
    name: str,
    exact: Sequence[Array],
    before: Sequence[Array],
    after: Sequence[Array],
    dtypes: Sequence[str],
    unit: float,
) -> Rounding:
    """Compare rounded results with those in float64; raises Diagnostic E425 if the rounding error has grown.

    An output fails if its error is more than twice that before the change, and more than twice `unit`, one unit in the
    last place (see `unit_of`). Outputs that are not floats, such as token ids, may differ if results are nearly tied.
    """
    largest_old = largest_new = 0.0
    changed = total = 0
    for i, (value, old, new, dtype) in enumerate(zip(exact, before, after, dtypes, strict=True)):
        changed, total = changed + int((old != new).sum()), total + old.size
        if DTYPES[dtype].kind != "f":
            continue
        was, error = difference(value, old), difference(value, new)
        if error > max(MAX_GROWTH * was, IGNORED_UNITS * unit):
            cause = f"@{name}: the rounding error of output {i} ({dtype}) is {error:.3g} of its size; it was {was:.3g}"
            raise Diagnostic("E425", cause, "round once, at the end; or omit --rounded if this is intended")
        largest_old, largest_new = max(largest_old, was), max(largest_new, error)
    return Rounding(largest_old, largest_new, changed / max(1, total))


def judged(name: str, expected: Sequence[Array], actual: Sequence[Array], names: Sequence[str]) -> Compared:
    """Compare the outputs; raises Diagnostic E425 if one differs by more than the tolerance."""
    if len(expected) != len(actual):
        cause = f"@{name} had {len(expected)} outputs and has {len(actual)}"
        raise Diagnostic("E425", cause, "correct the pass: it must keep the number of outputs")
    worst = 0.0
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if a.shape != b.shape:
            cause = f"@{name}: output {i} has shape {b.shape}, it had {a.shape}"
            raise Diagnostic("E425", cause, "correct the pass: it must keep the shapes of outputs")
        error = difference(a, b)
        worst = max(worst, error)
        if error > TOLERANCE:
            label = f"{i} (%{names[i]})" if i < len(names) and names[i] else str(i)
            remedy = "bisect with --fuel; --only restricts the pass to one place"
            raise Diagnostic("E425", f"@{name}: output {label} differs by {error:.3g} of its size", remedy)
    return Compared(name, len(expected), worst)


def unit_of(g: Graph) -> float:
    """Return one unit in the last place, relative to the value, of the coarsest float dtype of a graph's nodes.

    Floats of 8 bits are not counted: ops convert them before they compute. Without floats, it is that of float32.
    """
    dtypes = {r.type.dtype for n in g.nodes for r in n.results}
    floats = [DTYPES[d].np for d in {*dtypes, "f32"} if DTYPES[d].kind == "f" and DTYPES[d].bits >= 16]
    return max(float(ml_dtypes.finfo(d).eps) for d in floats)


def difference(a: Array, b: Array) -> float:
    """Return the largest difference over the largest magnitude, or infinity if non-finite values differ."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not a.size:
        return 0.0
    finite = np.isfinite(a)
    if (finite != np.isfinite(b)).any() or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(a[finite] - b[finite]).max() / max(1e-6, np.abs(a[finite]).max()))
