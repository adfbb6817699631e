"""Compares two versions of a module by interpreting both on the same random inputs, states included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmc.check.compare_outputs import Compared, evaluate, judged, judged_rounding, unit_of
from llmc.check.compare_serving import SERVED, Evaluated, is_prompt, serving_results
from llmc.check.random_inputs import Inputs, draw, elements
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Module
from llmc.ir.interp import round_to_type
from llmc.passes.lower.page_attention import DRAFT

MAX_ELEMENTS = 30_000_000  # maximum number of input elements; more would take too long to interpret


def compare(before: Module, after: Module, seed: int = 0, rounded: bool = False) -> list[Compared]:
    """Interpret corresponding graphs of both modules in float64; raises Diagnostic E425 if an output differs.

    If `rounded`, also interpret both with every op's result rounded to its dtype, on inputs that are rounded to theirs,
    and compare the rounding errors; raises Diagnostic E425 if they have grown (see `judged_rounding`).

    Graphs with equal names correspond. A prompt graph @main also corresponds to the serving graphs made from it: the
    prompts then run through the step in two chunks, and through @decode token by token.
    """
    if elements(before) > MAX_ELEMENTS:
        raise Diagnostic(
            "E425", f"--check would interpret {elements(before) / 1e6:.0f} million elements", "check a smaller model"
        )
    rng = np.random.default_rng(seed)
    return [
        _compared(before, g, after, counterpart, rng, rounded)
        for g in before.graphs.values()
        for counterpart in _counterparts(g.name, after)
    ]


def _compared(
    before: Module, g: Graph, after: Module, other: Graph, rng: np.random.Generator, rounded: bool
) -> Compared:
    """Compare the graph `g` of `before` with the graph `other` of `after`, as `compare` describes."""
    inputs = draw(before, g, rng)
    if is_prompt(g) and not is_prompt(other):
        inputs = _with_weights(inputs, after, other, rng)
        evaluated = serving_results(before, g, after, other, _rounded(inputs, g) if rounded else inputs)
        names, dtypes = map(list, SERVED)
    else:
        if other.name == "decode" and g.name != "decode":
            inputs = _decoding(inputs, draw(after, other, rng), other)
        evaluated = _results(before, g, after, other, _rounded(inputs, g) if rounded else inputs)
        names, dtypes = [v.name for v in other.outputs], [v.type.dtype for v in other.outputs]
    expected, actual = evaluated(True)
    compared = judged(other.name, expected, actual, names)
    if not rounded:
        return compared
    rounding = judged_rounding(other.name, expected, *evaluated(False), dtypes, unit_of(g))
    return replace(compared, rounding=rounding)


def _results(before: Module, g: Graph, after: Module, other: Graph, inputs: Inputs) -> Evaluated:
    """Return a function: whether in float64 -> the outputs of both graphs."""
    return lambda exact: (evaluate(before, g, inputs, exact), evaluate(after, other, inputs, exact))


def _rounded(inputs: Inputs, g: Graph) -> Inputs:
    """Round inputs to the dtypes that they have in `g`, so that both ways of interpreting start from equal numbers."""
    types = {v.name: v.type for v in g.inputs}
    arrays = {name: round_to_type(x, types[name]) if name in types else x for name, x in inputs.arrays.items()}
    return Inputs(arrays, inputs.sizes)


def _counterparts(name: str, after: Module) -> list[Graph]:
    """Return the graphs of `after` that correspond to the graph `name` of the earlier module."""
    if name == "weights" or (name == DRAFT and DRAFT not in after.graphs):
        return []  # the entry points of a draft model return drafts, not logits
    if name in after.graphs:
        return [after.graphs[name]]
    if name == "main" and "step" in after.graphs:
        return [after.graphs[n] for n in ("step", "decode") if n in after.graphs]
    raise Diagnostic("E425", f"@{name} is gone from the module", "a pass may only rename @main to @step")


def _with_weights(inputs: Inputs, m: Module, g: Graph, rng: np.random.Generator) -> Inputs:
    """Draw the weights that a serving graph has besides those of its prompt graph: a head's."""
    if lacking := [v.name for v in g.inputs if v.weight and v.name not in inputs.arrays]:
        drawn = draw(m, g, rng).arrays
        return Inputs(inputs.arrays | {name: drawn[name] for name in lacking}, inputs.sizes)
    return inputs


def _decoding(inputs: Inputs, drawn: Inputs, g: Graph) -> Inputs:
    """Return the weights of `inputs`, together with the other inputs of @decode as drawn for it (one token per row)."""
    arrays = {v.name: drawn.arrays[v.name] for v in g.inputs if not v.weight}
    return Inputs(inputs.arrays | arrays, inputs.sizes | drawn.sizes | {"T": drawn.sizes["R"]})
