"""Evaluates a graph of a module and compares its outputs with those of another version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.check.random_inputs import Array, Inputs
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module
from llmc.ir.interp import run

TOLERANCE = 1e-5  # largest relative difference of an output


@dataclass(frozen=True)
class Compared:
    """The result for one graph: number of outputs, and the largest relative difference of any output."""

    graph: str
    outputs: int
    worst: float


def evaluate(m: Module, g: Graph, inputs: Inputs) -> list[Array]:
    """Return the graph's outputs in float64, evaluating @weights first if the module has it."""
    arrays = dict(inputs.arrays)
    weights = m.graphs.get("weights")
    if weights is not None and weights is not g:
        made = run(weights, [arrays[v.name] for v in weights.inputs], exact=True)
        arrays |= dict(zip((v.name for v in weights.outputs), made, strict=True))
    return run(g, [arrays[v.name] for v in g.inputs], inputs.sizes, exact=True)


def judged(name: str, want: Sequence[Array], got: Sequence[Array], names: Sequence[str]) -> Compared:
    """Compare the outputs; raises Diagnostic E425 if one differs by more than the tolerance."""
    if len(want) != len(got):
        raise Diagnostic("E425", f"@{name} had {len(want)} outputs and has {len(got)}", "the pass changes the meaning")
    worst = 0.0
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if a.shape != b.shape:
            raise Diagnostic("E425", f"@{name}: output {i} has shape {b.shape}, it had {a.shape}", "the pass is wrong")
        error = difference(a, b)
        worst = max(worst, error)
        if error > TOLERANCE:
            label = f"{i} (%{names[i]})" if i < len(names) and names[i] else str(i)
            remedy = "bisect with --fuel; --only restricts the pass to one place"
            raise Diagnostic("E425", f"@{name}: output {label} differs by {error:.3g} of its size", remedy)
    return Compared(name, len(want), worst)


def difference(a: Array, b: Array) -> float:
    """Return the largest difference over the largest magnitude, or infinity if non-finite values differ."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not a.size:
        return 0.0
    finite = np.isfinite(a)
    if (finite != np.isfinite(b)).any() or (a[~finite] != b[~finite]).any():
        same_nan = np.isnan(a[~finite]) & np.isnan(b[~finite])
        if (finite != np.isfinite(b)).any() or not (same_nan | (a[~finite] == b[~finite])).all():
            return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(a[finite] - b[finite]).max() / max(1e-6, np.abs(a[finite]).max()))
