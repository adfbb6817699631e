"""Compares two versions of a module by interpreting both on the same random inputs, states included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module
from llmc.ir.interp import run

from .draw import Array, Inputs, draw, elements

TOLERANCE = 1e-5
MOST = 30_000_000  # maximum number of input elements; more would take too long to interpret


@dataclass(frozen=True)
class Compared:
    """The result for one graph: number of outputs, and the largest relative difference of any output."""

    graph: str
    outputs: int
    worst: float


def compare(before: Module, after: Module, seed: int = 0) -> list[Compared]:
    """Interpret corresponding graphs of both modules in float64; raises Diagnostic E425 if an output differs.

    Graphs with equal names correspond. A prompt graph @main also corresponds to the serving graphs made from it: the
    prompts then run through the step in two chunks, and through @decode token by token.
    """
    if elements(before) > MOST:
        raise Diagnostic(
            "E425", f"--check would interpret {elements(before) / 1e6:.0f} million elements", "check a smaller model"
        )
    from .check_serving import compare_serving, is_prompt

    rng = np.random.default_rng(seed)
    done = []
    for name, g in before.graphs.items():
        for other in _counterparts(name, g, after):
            inputs = draw(before, g, rng)
            if is_prompt(g) and not is_prompt(other):
                done.append(compare_serving(before, g, after, other, inputs))
                continue
            if other.name == "decode" and name != "decode":
                inputs = _decoding(inputs, draw(after, other, rng), other)
            want, got = evaluate(before, g, inputs), evaluate(after, other, inputs)
            done.append(judged(other.name, want, got, [v.name for v in other.outputs]))
    return done


def _counterparts(name: str, g: Graph, after: Module) -> list[Graph]:
    if name == "weights":
        return []
    if name in after.graphs:
        return [after.graphs[name]]
    if name == "main" and "step" in after.graphs:
        return [after.graphs[n] for n in ("step", "decode") if n in after.graphs]
    raise Diagnostic("E425", f"@{name} is gone from the module", "a pass may rename @main to @step alone")


def _decoding(inputs: Inputs, drawn: Inputs, g: Graph) -> Inputs:
    """The weights of `inputs`, together with the other inputs of @decode as drawn for it (one token per row)."""
    own = {v.name: drawn.arrays[v.name] for v in g.inputs if not v.weight}
    return Inputs(inputs.arrays | own, inputs.sizes | drawn.sizes | {"T": drawn.sizes["R"]})


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
