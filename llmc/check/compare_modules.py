"""Compares two versions of a module by interpreting both on the same random inputs, states included.

A prompt graph is compared with the step that serves it: prompts run in chunks and must give the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS, INT_COLUMNS, OFF

from llmc.check.compare_outputs import Compared, evaluate, judged, judged_rounding, unit_of
from llmc.check.random_inputs import Array, Inputs, draw, elements
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import WEIGHTS, Graph, Module
from llmc.ir.interp import round_to_type
from llmc.passes.lower.page_attention import DRAFT

MAX_ELEMENTS = 30_000_000  # maximum number of input elements; more would take too long to interpret
LENGTHS = (5, 3)  # lengths of the two prompts in tokens
SERVED = (("ids", "logprob"), ("i32", "f32"))  # names and dtypes of the results that are compared
# Whether in float64 -> (the outputs before the change, the outputs after it).
Evaluated: TypeAlias = Callable[[bool], tuple[list[Array], list[Array]]]


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
    inputs = _drawn(before, g, rng)
    if is_prompt(g) and not is_prompt(other):
        inputs = _with_weights(inputs, after, other, rng)
        evaluated = serving_results(before, g, after, other, _rounded(inputs, before, g) if rounded else inputs)
        names, dtypes = map(list, SERVED)
    else:
        if other.name == "decode" and g.name != "decode":
            inputs = _decoding(inputs, draw(after, other, rng), other)
        evaluated = _results(before, g, after, other, _rounded(inputs, before, g) if rounded else inputs)
        names = [v.name for v in other.outputs]
        dtypes = [v.type.dtype for v in other.outputs]
    expected, actual = evaluated(True)
    compared = judged(other.name, expected, actual, names)
    if not rounded:
        return compared
    rounding = judged_rounding(other.name, expected, *evaluated(False), dtypes, unit_of(g))
    return replace(compared, rounding=rounding)


def _results(before: Module, g: Graph, after: Module, other: Graph, inputs: Inputs) -> Evaluated:
    """Return a function: whether in float64 -> the outputs of both graphs."""
    return lambda exact: (evaluate(before, g, inputs, exact), evaluate(after, other, inputs, exact))


def _drawn(m: Module, g: Graph, rng: np.random.Generator) -> Inputs:
    """Draw the inputs of `g`, and those of @weights, which computes weights of `g`, if the module has it."""
    inputs = draw(m, g, rng)
    if WEIGHTS not in m.graphs:
        return inputs
    return Inputs(draw(m, m.graphs[WEIGHTS], rng).arrays | inputs.arrays, inputs.sizes)


def _rounded(inputs: Inputs, m: Module, g: Graph) -> Inputs:
    """Round inputs to their dtypes in `g` or @weights, so that both ways of interpreting start from equal numbers."""
    types = {v.name: v.type for graph in (m.graphs.get(WEIGHTS, g), g) for v in graph.inputs}
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


def is_prompt(g: Graph) -> bool:
    """Whether a graph is @main(tokens, positions, last, weights) -> logits."""
    return {"tokens", "positions", "last"} <= {v.name for v in g.inputs}


@dataclass
class _Rows:
    """The states of two device rows, as the runtime keeps them between steps."""

    states: dict[str, Array]
    sizes: dict[str, int]

    @staticmethod
    def fresh(g: Graph, tokens: Array) -> _Rows:
        """Return rows 0 and 1 with the two prompts, before any step; sampling is greedy, with log-probabilities."""
        sizes: dict[str, int] = {}
        table = next(v for v in g.inputs if v.name == "row.pages")
        sizes["P"] = int(table.type.numel)
        states: dict[str, Array] = {}
        for v in g.inputs:
            if v.type.state:
                shape = tuple(int(d.subs(sizes)) for d in v.type.shape)
                states[v.name] = np.zeros(shape)
        states["row.pages"] = np.arange(sizes["P"])[::-1].reshape(states["row.pages"].shape)
        for at, name in enumerate(FLOAT_COLUMNS):
            states["row.fparams"][:, at] = OFF[name]
        states["row.iparams"][:, INT_COLUMNS.index("want_logprobs")] = 1
        states["row.stops"] -= 1
        at = 0
        for row, n in enumerate(LENGTHS):
            states["row.tokens"][row, :n] = tokens[at : at + n]
            at += n
        return _Rows(states, sizes)

    def step(
        self, m: Module, g: Graph, weights: dict[str, Array], qlens: tuple[int, int], emit: bool, exact: bool
    ) -> list[Array]:
        """Advance rows 1 and 0 by `qlens` tokens, keep the new states, and return ids and log-probabilities."""
        fixed = {"rows": np.array([1, 0]), "qlens": np.array(qlens), "emit": np.full(2, emit)}
        sizes = self.sizes | {"R": 2, "T": sum(qlens)}
        out = evaluate(m, g, Inputs(weights | fixed | self.states, sizes), exact)
        self.states |= {name: array for name, array in zip(_written(g), out, strict=True) if name}
        return out[:2]


def _written(g: Graph) -> list[str]:
    """Return, for each output, the name of the state whose next version it is; "" for other outputs."""
    names = []
    for v in g.outputs:
        while v.type.state and (n := v.node) is not None:
            slots = [i for i, s in enumerate(n.op.operands) if s.name in n.op.writes]
            states = [r for r in n.results if r.type.state]
            v = n.operands[slots[states.index(v)]]
        names.append(v.name if v.type.state else "")
    return names


def serving_results(before: Module, main: Graph, after: Module, g: Graph, inputs: Inputs) -> Evaluated:
    """Return a function: whether in float64 -> (ids and log-probabilities of whole prompts through `main`; those of two
    chunks through @step and the last tokens through `g`).
    """
    weights = {v.name: inputs.arrays[v.name] for v in (*main.inputs, *g.inputs) if v.weight}
    limit = min(int(v.type.shape[0]) for v in main.inputs if v.weight and _embeds(v))
    tokens = np.random.default_rng(7).integers(0, limit, sum(LENGTHS))
    step = after.graphs.get("step", g)

    def evaluated(exact: bool) -> tuple[list[Array], list[Array]]:
        rows = _Rows.fresh(step, tokens)
        rows.step(after, step, weights, (1, 2), False, exact)
        rows.step(after, step, weights, (LENGTHS[1] - 2, LENGTHS[0] - 3), False, exact)
        return _expected(before, main, weights, tokens, exact), rows.step(after, g, weights, (1, 1), True, exact)

    return evaluated


def _embeds(v: Any) -> bool:
    return any(n.op.name == "take" and n.operands[0] is v for n in v.uses)


def _expected(before: Module, main: Graph, weights: dict[str, Array], tokens: Array, exact: bool) -> list[Array]:
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    last = np.array([sum(LENGTHS) - 1, LENGTHS[0] - 1])
    fixed = {"tokens": tokens, "positions": positions, "last": last}
    logits, *_ = evaluate(before, main, Inputs(weights | fixed, {"T": sum(LENGTHS), "R": 2}), exact)
    ids = logits.argmax(-1)
    x = logits - logits.max(-1, keepdims=True)
    return [ids, -np.log(np.exp(x).sum(-1))]
