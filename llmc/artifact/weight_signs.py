"""Finds weights that are computed from others and negative, so that random weights can have the right sign."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmc.artifact.rank_weights import at_rank
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Value
from llmc.ir.weight_eval import Blocks, shape_of, widen

MAX_BYTES = 4 << 20  # bytes of a weight: larger ones are matrices of products, whose entries have either sign


def negative_weights(graph: Graph) -> tuple[str, ...]:
    """Return the names of the outputs of a weights graph that are negative if all of its inputs are ones.

    Outputs that are computed from a value of more than MAX_BYTES bytes are left out.

    Rates of decay are such outputs: -exp(A_log). States that grow instead of decaying would soon be infinite.
    """
    graph = at_rank(graph, 0)
    blocks = Blocks(graph, _OnesSource({v.name: (v.type.dtype, shape_of(v)) for v in graph.inputs}))
    small: set[Value] = {v for v in graph.inputs if _is_small(v)}
    for n in graph.nodes:
        if all(v in small for v in n.operands):
            small.update(v for v in n.results if _is_small(v))
    computed = [v for v in graph.outputs if v.node is not None and v in small and DTYPES[v.type.dtype].kind == "f"]
    return tuple(v.name for v in computed if np.all(widen(blocks.whole(v), v.type.dtype) < 0))


def _is_small(v: Value) -> bool:
    return (v.type.nbytes.const or 0) <= MAX_BYTES


class _OnesSource:
    """A source of weights that are all ones."""

    def __init__(self, types: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._types = types

    def read(self, name: str, rows: slice) -> np.ndarray:
        """See WeightSource."""
        dtype, shape = self._types[name]
        of_rows = (len(range(*rows.indices(shape[0]))), *shape[1:]) if shape else ()
        return np.ones(of_rows, DTYPES[dtype].np)
