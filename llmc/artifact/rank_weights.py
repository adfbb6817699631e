"""The weights of an artifact of several ranks: one set shared by all ranks, and one set for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmc_runtime.format.manifest import WeightFile
from llmc_runtime.format.program import RANK

from llmc.artifact.files import Files
from llmc.artifact.weights import Progress, write_weights
from llmc.ir.dim import Dim
from llmc.ir.graph import Graph, Value
from llmc.ir.weight_eval import WeightSource
from llmc.passes.lower.specialize import with_sizes


def write_rank_weights(
    graph: Graph, source: WeightSource, files: Files, ranks: int, progress: Progress | None
) -> tuple[WeightFile, ...]:
    """Evaluate the outputs of `graph` into weights/, or into weights/rankN/ if they depend on the rank."""
    if ranks == 1:
        return write_weights(graph, source, files, progress=progress)
    parts = [(None, _with_outputs(graph, False)), *((r, at_rank(_with_outputs(graph, True), r)) for r in range(ranks))]
    sizes = [sum(v.type.nbytes.const or 0 for v in g.outputs) for _, g in parts]
    done, out = 0, []
    for (rank, g), size in zip(parts, sizes, strict=True):
        folder = "weights" if rank is None else f"weights/rank{rank}"
        shown = _shifted(progress, done, sum(sizes)) if progress else None
        out += [replace(w, rank=rank) for w in write_weights(g, source, files, folder, shown)]
        done += size
    return tuple(out)


def at_rank(graph: Graph, rank: int) -> Graph:
    """Return a copy of a weights graph for one rank: the symbol of the rank has this value."""
    out = graph.copy()
    for n in out.nodes:
        n.attrs = {name: with_sizes(value, {RANK: rank}) for name, value in n.attrs.items()}
    return out


def _with_outputs(graph: Graph, ranked: bool) -> Graph:
    """Return a copy of the graph with the outputs that depend on the rank, or with the others."""
    out = graph.copy()
    rank_values: set[Value] = set()
    for n in out.nodes:
        if any(v in rank_values for v in n.operands) or any(RANK in d.symbols for d in _dims(n.attrs.values())):
            rank_values.update(n.results)
    out.outputs = [v for v in out.outputs if (v in rank_values) == ranked]
    return out


def _dims(values: Any) -> Iterator[Dim]:
    for value in values:
        if isinstance(value, tuple):
            yield from _dims(value)
        elif isinstance(value, Dim):
            yield value


def _shifted(progress: Progress, done: int, total: int) -> Progress:
    return lambda now, _of: progress(done + now, total)
