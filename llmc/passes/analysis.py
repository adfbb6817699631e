"""Predicates and queries about values and nodes, shared by several passes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Node, Value
from llmc.ir.ops.quantize import FLOAT_CODES
from llmc.ir.scalar import reduces_rows
from llmc.ir.types import Type


def made_by(v: Value, *ops: str) -> Node | None:
    """Return the node that computes `v` if its op is one of `ops`, else None."""
    return v.node if v.node is not None and v.node.op.name in ops else None


def widens(src: str, dst: str) -> bool:
    """Whether dtype `dst` represents every value of dtype `src` exactly."""
    a, b = DTYPES[src], DTYPES[dst]
    exact = {"f64": ("f32", "bf16", "f16", *FLOAT_CODES), "f32": ("bf16", "f16", *FLOAT_CODES)}
    if a.kind == b.kind == "f":
        return src == dst or src in exact.get(dst, ()) or (dst in ("bf16", "f16") and src in FLOAT_CODES)
    if a.kind == b.kind == "i" and src[0] == dst[0]:
        return a.bits <= b.bits
    return src == dst


def rounds_little(n: Node) -> bool:
    """Whether a cast converts between f64, f32, bf16 and f16, so that removing it changes only the last bits.

    Casts to 8-bit floats or through integers lose more on purpose.
    """
    return all(v.type.dtype in ("f64", "f32", "bf16", "f16") for v in (n.operands[0], n.results[0]))


def core(v: Value) -> Value:
    """Return `v` without widening casts, which do not change the numbers."""
    while (n := made_by(v, "cast")) and widens(n.operands[0].type.dtype, v.type.dtype):
        v = n.operands[0]
    return v


def const_value(v: Value) -> float | None:
    """Return the number that all elements of `v` equal, rounded to its dtype, or None if it is not known."""
    n = made_by(v, "constant", "cast", "broadcast", "reshape")
    if n is None:
        return None
    if n.op.name != "constant":
        inner = const_value(n.operands[0])
        return inner if inner is None or n.op.name != "cast" else rounded_to(inner, v.type.dtype)
    return rounded_to(float(n.attrs["value"]), v.type.dtype)


def rounded_to(value: float, dtype: str) -> float:
    """Round `value` to `dtype`. float32 keeps the decimal as written, so that 1e-06 prints as 1e-06."""
    kind = DTYPES[dtype]
    if kind.kind == "b":
        return float(value != 0)
    if kind.kind == "i":
        return float(np.trunc(value))
    return value if dtype in ("f32", "f64") else float(np.asarray(value, kind.np))


def drop_ones(shape: Iterable[Dim]) -> tuple[Dim, ...]:
    """Return the shape without axes of size 1."""
    return tuple(d for d in shape if d.const != 1)


def squeezed(v: Value) -> Value:
    """Return `v` without casts, broadcasts and reshapes that only add or remove axes of size 1."""
    while n := made_by(v, "cast", "broadcast", "reshape"):
        inner = n.operands[0]
        if n.op.name == "cast" and DTYPES[v.type.dtype].kind != "f":
            return v
        if n.op.name != "cast" and drop_ones(inner.type.shape) != drop_ones(v.type.shape):
            return v
        v = inner
    return v


def only_reader(g: Graph, v: Value) -> Node | None:
    """Return the node that reads `v` if no other node does, it reads `v` once, and `v` is no output; else None."""
    return v.uses[0] if len(v.uses) == 1 and v not in g.outputs else None


def is_pointwise(n: Node) -> bool:
    """Whether an op is a single scalar expression without row reductions."""
    e = n.op.scalar(n.attrs) if n.op.scalar and not n.op.writes else None
    return e is not None and not reduces_rows(e)


class Origin(IntEnum):
    """The kinds of inputs that a value can depend on; a node has the largest origin of its operands."""

    CONSTANTS = 0
    WEIGHTS = 1
    INPUTS = 2


def origin(v: Value, known: dict[Value, Origin] | None = None) -> Origin:
    """Return what a value depends on: only constants, weights (and constants), or inputs and states of a step.

    `known` caches the results for values of the same graph, which may share operands.
    """
    known = {} if known is None else known
    todo = [v]
    while todo:
        u = todo[-1]
        if u.node is None or u.type.state or u.node.op.writes:
            known[u] = Origin.WEIGHTS if u.weight else Origin.INPUTS
        elif missing := [o for o in u.node.operands if o not in known]:
            todo += missing
            continue
        else:
            known[u] = max((known[o] for o in u.node.operands), default=Origin.CONSTANTS)
        todo.pop()
    return known[v]


def weight_only(g: Graph) -> set[Value]:
    """Return the values of a graph that depend on at least one weight and otherwise only on constants.

    A value whose size depends on the step, such as a weight that is repeated for each token, is not one of them.
    """
    known: dict[Value, Origin] = {}
    values = (v for v in g.values if origin(v, known) is Origin.WEIGHTS)
    return {v for v in values if all(d.const is not None for d in v.type.shape)}


def launched_nodes(g: Graph) -> list[Node]:
    """Return the nodes that a step launches, which are all nodes that do not depend only on weights."""
    weights = weight_only(g)
    return [n for n in g.nodes if not all(r in weights for r in n.results)]


def same_type(a: Type, b: Type) -> bool:
    """Whether two types are equal in dtype, shape, state and format."""
    return a.dtype == b.dtype and a.shape == b.shape and a.state == b.state and a.format == b.format
