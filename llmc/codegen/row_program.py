"""Row programs: the language-independent form of pointwise and last-axis reduction groups.

A row is the last axis, after merging axes along which every value either varies or is constant. Reductions split a row
program into passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.codegen.print_expr import Dag
from llmc.ir.dim import D, Dim, product
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.ir.scalar import E, arg, parse_expr

COSTLY = frozenset(("exp", "exp2", "log", "sin", "cos", "tanh", "erf", "sigmoid", "pow"))


def expressions(node: Node) -> list[E] | None:
    """Return each result as an expression over the operands; None if it is neither pointwise nor a reduction."""
    name, attrs = node.op.name, node.attrs
    if name == "fused":
        return [parse_expr(b) for b in attrs["body"]]
    if name in ("cast", "broadcast"):
        return [arg(0)]
    if name == "constant":
        return [E("const", (attrs["value"],))]
    if (row := _row_reduction(node)) is not None:
        return [row]
    if node.op.scalar is None:
        return None
    if "axis" in attrs and attrs["axis"] == node.operands[0].type.rank - 1:
        attrs = {**attrs, "axis": -1}
    e = node.op.scalar(attrs)
    return None if e is None else [e]


def _row_reduction(node: Node) -> E | None:
    """Return a reduction op over the last axis of floats as an expression, or None."""
    reduction = {"sum": "row_sum", "mean": "row_mean", "amax": "row_max", "amin": "row_max"}.get(node.op.name)
    x = node.operands[0].type if node.operands else None
    if reduction is None or x is None or x.dtype not in FLOATS or node.attrs["axis"] % x.rank != x.rank - 1:
        return None
    return -E(reduction, (-arg(0),)) if node.op.name == "amin" else E(reduction, (arg(0),))


def result_shapes(node: Node) -> list[tuple[Dim, ...]]:
    """Return the results' shapes; a dropped last axis is kept as size 1."""
    shapes = [v.type.shape for v in node.results]
    if node.attrs.get("keepdim") is False:
        return [(*s, D(1)) for s in shapes]
    return shapes


@dataclass(frozen=True)
class Space:
    """The iteration space: outer axes and the row.

    `varies[value][axis]` is true if the value varies along the axis; operands precede results.
    """

    outer: tuple[Dim, ...]
    row: Dim
    varies: tuple[tuple[bool, ...], ...]

    def stride(self, value: int, axis: int) -> Dim:
        """Return the distance in elements between neighbours of `value` along an outer axis."""
        axes = [*self.outer, self.row]
        return product([d for d, varies in zip(axes[axis + 1 :], self.varies[value][axis + 1 :]) if varies])


def space(shapes: Sequence[tuple[Dim, ...]], reduces: bool) -> Space:
    """Return the iteration space. Adjacent axes along which the same values vary are merged.

    `reduces` keeps the last axis separate.
    """
    rank = max([len(shape) for shape in shapes] + [1])
    padded = [(D(1),) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    axes: list[tuple[Dim, tuple[bool, ...]]] = []  # size, and which values vary along it
    for i in range(rank):
        sizes = [shape[i] for shape in padded]
        size = next((d for d in sizes if d.const != 1), D(1))
        is_last = i == rank - 1
        if size.const == 1 and not is_last:
            continue
        varies = tuple(d == size for d in sizes)
        separate = is_last and reduces
        if axes and axes[-1][1] == varies and not separate:
            axes[-1] = (axes[-1][0] * size, varies)
        elif size.const == 1 and axes and not separate:
            continue
        else:
            axes.append((size, varies))
    dims = [size for size, _ in axes]
    return Space(tuple(dims[:-1]), dims[-1], tuple(zip(*(varies for _, varies in axes))))


class RowProgram:
    """A node as a row program: its iteration space, its expressions as a DAG, and its passes over the row.

    roots: the DAG nodes of the results. count: number of operands; value numbers count operands first, then results.
    varies: whether each DAG node varies along the row. level: the pass before which each DAG node is known, if it is
    constant along the row, or that computes it. passes: see `_passes`. cached: see `_cached`.
    """

    def __init__(self, node: Node, roots: Sequence[E]):
        """Build the program of a node whose first results are the expressions `roots`."""
        self.node = node
        self.dag = Dag()
        self.roots = [self.dag.add(e) for e in roots]
        self.count = len(node.operands)
        reduces = any(fn.startswith("row_") for fn, _ in self.dag.nodes)
        shapes = [*(v.type.shape for v in node.operands), *result_shapes(node)[: len(self.roots)]]
        self.space = space(shapes, reduces)
        self.varies: list[bool] = []
        self.level: list[int] = []
        for i, (fn, _) in enumerate(self.dag.nodes):
            below = self.dag.operands(i)
            if fn == "arg":
                self.varies.append(self.space.varies[self.dag.argument(i)][-1])
            else:
                self.varies.append(not fn.startswith("row_") and any(self.varies[b] for b in below))
            self.level.append(max((self.level[b] + self.reduction(b) for b in below), default=0))
        self.passes = self._passes()
        self.cached = self._cached()

    def reduction(self, i: int) -> bool:
        """Whether DAG node `i` reduces the row.

        A value that is constant along the row has size 1 there, so reducing it is the identity.
        """
        return self.dag.nodes[i].fn.startswith("row_") and self.varies[self.dag.operands(i)[0]]

    def _passes(self) -> list[list[int]]:
        """Return the target nodes of each pass: the reductions of its level, in the last pass the results that vary."""
        needed = self.dag.below(self.roots)
        reductions = [i for i in needed if self.reduction(i)]
        last = max((self.level[i] + self.reduction(i) for i in self.roots), default=0)
        levels = [[i for i in reductions if self.level[i] == k] for k in range(last)]
        varying = [i for i in self.roots if self.varies[i]]
        return [*levels, varying]

    def work(self, targets: Sequence[int]) -> list[int]:
        """Return the nodes that a pass computes per element for its targets."""
        roots = [self.dag.operands(t)[0] if self.reduction(t) else t for t in targets]
        return [i for i in self.dag.below(roots, stop=lambda i: not self.varies[i]) if self.varies[i]]

    def _cached(self) -> dict[int, int]:
        """Map expensive per-element nodes that two passes need -> the first pass that computes them."""
        first: dict[int, int] = {}
        in_two_passes: dict[int, int] = {}
        for k, targets in enumerate(self.passes):
            for i in self.work(targets):
                if self.dag.nodes[i].fn in COSTLY:
                    if i in first:
                        in_two_passes[i] = first[i]
                    first.setdefault(i, k)
        return in_two_passes


def same_layout(node: Node) -> tuple[tuple[int, int], ...]:
    """Return (operand, result) pairs with equal dtype that both fill the iteration space.

    Each of their elements is read and written at a single, common place, so the pair can share memory.
    """
    p = RowProgram(node, expressions(node) or [])
    full = [i for i, varies in enumerate(p.space.varies) if all(varies)]
    return tuple(
        (i, k)
        for k, r in enumerate(node.results)
        for i, v in enumerate(node.operands)
        if i in full and p.count + k in full and v.type.dtype == r.type.dtype
    )
