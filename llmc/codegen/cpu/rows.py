"""Pointwise and last-axis reduction groups as row programs: norms, softmax, `fused`; one generator for all of them.

A row is the last axis after merging axes that every value treats alike. Reductions split the row program into passes;
a costly value that two passes need is kept in scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.codegen.cpu.base import FLOATS, INTS, CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes, indent
from llmc.codegen.kernel import Schedule
from llmc.codegen.spell import ELEMENT, VECTOR, Dag, convert, statements
from llmc.ir.dim import D, Dim, product
from llmc.ir.graph import Node
from llmc.ir.scalar import E, arg, parse_expr, walk
from llmc.targets.target import Target

COSTLY = frozenset(("exp", "exp2", "log", "sin", "cos", "tanh", "erf", "sigmoid", "pow"))
FOLD = {"row_sum": ("0.0f", "s{0} + {1}", "hsum"), "row_max": ("-INFINITY", "m_max(s{0}, {1})", "hmax_nan")}.items()


def expressions(node: Node) -> list[E] | None:
    """What each result is, as an expression over the operands; None where the op is not of this kind."""
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
    """A reduction op over the last axis of floats, as an expression."""
    of = {"sum": "row_sum", "mean": "row_mean", "amax": "row_max", "amin": "row_max"}.get(node.op.name)
    x = node.operands[0].type if node.operands else None
    if of is None or x is None or x.dtype not in FLOATS or node.attrs["axis"] % x.rank != x.rank - 1:
        return None
    return -E(of, (-arg(0),)) if node.op.name == "amin" else E(of, (arg(0),))


def result_shapes(node: Node) -> list[tuple[Dim, ...]]:
    """Shapes of the results, a dropped last axis kept as 1."""
    shapes = [v.type.shape for v in node.results]
    if node.attrs.get("keepdim") is False:
        return [(*s, D(1)) for s in shapes]
    return shapes


@dataclass(frozen=True)
class Space:
    """The iteration space: outer axes and the row; for every value, which of them it has (operands, then results)."""

    outer: tuple[Dim, ...]
    row: Dim
    has: tuple[tuple[bool, ...], ...]

    def stride(self, value: int, axis: int) -> Dim:
        """Elements of `value` between neighbours along an outer axis that it has."""
        axes = [*self.outer, self.row]
        return product([d for d, h in zip(axes[axis + 1 :], self.has[value][axis + 1 :]) if h])


def space(shapes: Sequence[tuple[Dim, ...]], reduces: bool) -> Space:
    """Merge axes that all values treat alike; with reductions the last axis stays what it is."""
    rank = max((len(s) for s in shapes), default=0)
    rank = max(rank, 1)
    padded = [(D(1),) * (rank - len(s)) + tuple(s) for s in shapes]
    axes: list[tuple[Dim, tuple[bool, ...]]] = []
    for i in range(rank):
        sizes = [p[i] for p in padded]
        full = next((d for d in sizes if d.const != 1), D(1))
        last = i == rank - 1
        if full.const == 1 and not last:
            continue
        has = tuple(d == full for d in sizes)
        keep = last and reduces
        if axes and axes[-1][1] == has and not keep:
            axes[-1] = (axes[-1][0] * full, has)
        elif full.const == 1 and axes and not keep:
            continue
        else:
            axes.append((full, has))
    dims = [d for d, _ in axes]
    return Space(tuple(dims[:-1]), dims[-1], tuple(zip(*(h for _, h in axes))))


class RowProgram:
    """Everything about one node that the text is printed from: the space, the expressions as a DAG, and the passes."""

    def __init__(self, node: Node, roots: Sequence[E]):
        self.node = node
        self.dag = Dag()
        self.roots = [self.dag.add(e) for e in roots]
        self.count = len(node.operands)
        reduces = any(fn.startswith("row_") for fn, _ in self.dag.nodes)
        self.space = space([*(v.type.shape for v in node.operands), *result_shapes(node)], reduces)
        self.varies: list[bool] = []
        self.level: list[int] = []
        for i, (fn, args) in enumerate(self.dag.nodes):
            below = self.dag.operands(i)
            if fn == "arg":
                self.varies.append(self.space.has[int(args[0])][-1])
            else:
                self.varies.append(not fn.startswith("row_") and any(self.varies[b] for b in below))
            self.level.append(max((self.level[b] + self.reduction(b) for b in below), default=0))
        self.passes = self._passes()
        self.cached = self._cached()

    def reduction(self, i: int) -> bool:
        """Whether a node folds the row; of a value that is one number a row, a reduction is that number."""
        return self.dag.nodes[i][0].startswith("row_") and self.varies[self.dag.operands(i)[0]]

    def _passes(self) -> list[list[int]]:
        """For each pass, the nodes it computes last: reductions of its level, and in the last pass the results."""
        needed = self.dag.below(self.roots)
        reductions = [i for i in needed if self.reduction(i)]
        last = max((self.level[i] + self.reduction(i) for i in self.roots), default=0)
        levels = [[i for i in reductions if self.level[i] == k] for k in range(last)]
        varying = [i for i in self.roots if self.varies[i]]
        return [*levels, varying]

    def work(self, targets: Sequence[int]) -> list[int]:
        """The varying nodes that a pass computes per element for its targets."""
        roots = [self.dag.operands(t)[0] if self.reduction(t) else t for t in targets]
        return [i for i in self.dag.below(roots, stop=lambda i: not self.varies[i]) if self.varies[i]]

    def _cached(self) -> dict[int, int]:
        """Costly varying nodes that two passes need -> the pass that computes them."""
        first: dict[int, int] = {}
        again: dict[int, int] = {}
        for k, targets in enumerate(self.passes):
            for i in self.work(targets):
                if self.dag.nodes[i][0] in COSTLY:
                    if i in first:
                        again[i] = first[i]
                    first.setdefault(i, k)
        return again


class Rows(CppKernel):
    """Float groups, vectorised along the row; threads take rows (or parts of the one row where nothing is reduced)."""

    headers = ("llmc_abi.h", "llmc_math.h", "llmc_store.h")

    def claims(self, node: Node) -> bool:
        return expressions(node) is not None

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, (*FLOATS, "bool"))

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return same_layout(node)

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        p = RowProgram(node, expressions(node) or [])
        return (p.space.row * 4 + 64) * len(p.cached)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        p = RowProgram(node, expressions(node) or [])
        flat = not p.space.outer and len(p.passes) == 1 and all(h[-1] for h in p.space.has[p.count :])
        return row_loops(p, sizes, _row_text(p, sizes, flat), flat)


class Elements(CppKernel):
    """Any dtype, one element at a time: integer and bool arithmetic, casts to and from integers."""

    headers = ("llmc_abi.h", "llmc_math.h", "llmc_store.h", "llmc_element.h")

    def claims(self, node: Node) -> bool:
        return expressions(node) is not None

    def reject(self, node: Node, target: Target) -> str | None:
        if any(x.fn.startswith("row_") for e in expressions(node) or [] for x in walk(e)):
            return "it reduces rows, which this kernel computes for no dtype"
        return unsupported(node, (*FLOATS, *INTS, "bool"))

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return same_layout(node)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: object) -> float:
        return 4 * super().cost_us(node, schedule, target, env)  # type: ignore[arg-type]

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        p = RowProgram(node, expressions(node) or [])
        flat = not p.space.outer and all(h[-1] for h in p.space.has[p.count :])
        names: dict[int, tuple[str, str]] = {}
        lines = []
        for i in p.dag.below(p.roots):
            fn, args = p.dag.nodes[i]
            if fn == "arg":
                k = int(args[0])
                lines.append(f"const auto t{i} = scalar(q{k}[{'j' if p.space.has[k][-1] else 0}]);")
                names[i] = (f"t{i}", "s")
            else:
                lines += statements(p.dag, [i], names, ELEMENT)
        for k, root in enumerate(p.roots):
            at = "j" if p.space.has[p.count + k][-1] else "0"
            lines.append(f"put(r{k} + {at}, {names[root][0]});")
        head, n = ("lo", "hi") if flat else ("0", "n")
        loop = f"for (int64_t j = {head}; j < {n}; j++) {{\n{indent(chr(10).join(lines))}\n}}"
        return row_loops(p, sizes, loop, flat)


def same_layout(node: Node) -> tuple[tuple[int, int], ...]:
    """Pairs of an operand and a result of equal type: element j is read before it is written, by the same thread."""
    return tuple(
        (i, k)
        for k, r in enumerate(node.results)
        for i, v in enumerate(node.operands)
        if v.type.dtype == r.type.dtype and v.type.shape == r.type.shape
    )


def row_loops(p: RowProgram, sizes: Sizes, row: str, flat: bool) -> str:
    """The loops around a row's text: this thread's rows, and each value's pointer to its part of the row."""
    sp = p.space
    lines = [pointers(p.node), f"const int64_t n = {sizes(sp.row)};", "int64_t lo, hi;"]
    values = [*(("q", "x", i) for i in range(p.count)), *(("r", "y", i) for i in range(len(p.node.results)))]
    if flat:
        lines += ["llmc_split(ctx, n, 256, &lo, &hi);"]
        lines += [f"const auto {q}{i} = {x}{i};" for q, x, i in values]
        return "\n".join([*lines, row])
    lines += [f"llmc_split(ctx, {sizes(product(sp.outer))}, 1, &lo, &hi);", "for (int64_t row = lo; row < hi; row++) {"]
    inner = _indices(sp, sizes)
    for v, (q, x, i) in enumerate(values):
        terms = [f"i{a} * {sizes(sp.stride(v, a))}" for a in range(len(sp.outer)) if sp.has[v][a]]
        inner.append(f"const auto {q}{i} = {' + '.join([f'{x}{i}', *terms])};")
    return "\n".join([*lines, indent("\n".join([*inner, row])), "}"])


def _indices(sp: Space, sizes: Sizes) -> list[str]:
    if len(sp.outer) == 1:
        return ["const int64_t i0 = row;"]
    lines, rest = [], "row"
    for a in range(len(sp.outer) - 1, -1, -1):
        if a == 0:
            lines.append(f"const int64_t i0 = {rest};")
        else:
            d = sizes(sp.outer[a])
            lines.append(f"const int64_t i{a} = {rest} % {d}, rest{a} = {rest} / {d};")
            rest = f"rest{a}"
    return lines


def _row_text(p: RowProgram, sizes: Sizes, flat: bool) -> str:
    """The passes over one row, vector by vector, and the stores of results that are one number a row."""
    names: dict[int, tuple[str, str]] = {}
    lines: list[str] = []
    for slot, i in enumerate(p.cached):
        lines.append(f"float* const c{i} = (float*)ctx->scratch + {slot} * (n + 16);")
    for k, targets in enumerate(p.passes):
        lines += _uniform(p, names, k)
        if targets:
            lines += _pass(p, targets, names, k, flat)
    lines += _uniform(p, names, len(p.passes))
    for k, root in enumerate(p.roots):
        if not p.varies[root]:
            if p.space.has[p.count + k][-1]:
                lines.append(f"for (int64_t j = 0; j < n; j++) put(r{k} + j, {convert(*names[root], 'f')}[0]);")
            else:
                lines.append(f"put(r{k}, {convert(*names[root], 'f')}[0]);")
    return "\n".join(lines)


def _uniform(p: RowProgram, names: dict[int, tuple[str, str]], level: int) -> list[str]:
    """Statements for everything that is one number a row and known before pass `level`."""
    lines = []
    for i in p.dag.below(p.roots):
        fn, args = p.dag.nodes[i]
        if p.varies[i] or i in names or p.reduction(i) or p.level[i] > level:
            continue
        if fn == "arg":
            lines.append(f"const vf t{i} = splat((float)scalar(q{int(args[0])}[0]));")
            names[i] = (f"t{i}", "f")
        elif fn.startswith("row_"):
            names[i] = names[p.dag.operands(i)[0]]
        else:
            lines += statements(p.dag, [i], names, VECTOR)
    return lines


def _pass(p: RowProgram, targets: list[int], names: dict[int, tuple[str, str]], k: int, flat: bool) -> list[str]:
    """One sweep over the row: fold the reductions of this level, or store the results that vary."""
    local = dict(names)
    inner: list[str] = []
    for i in p.work(targets):
        fn, args = p.dag.nodes[i]
        if p.cached.get(i, k) < k:
            inner.append(f"const vf t{i} = get(c{i} + j, m);")
            local[i] = (f"t{i}", "f")
        elif not _hidden(p, i, targets, k):
            if fn == "arg":
                inner.append(f"const vf t{i} = get(q{int(args[0])} + j, m);")
                local[i] = (f"t{i}", "f")
            else:
                inner += statements(p.dag, [i], local, VECTOR)
            if p.cached.get(i) == k:
                inner.append(f"set(c{i} + j, {local[i][0]}, m);")
    before, after = [], []
    for t in targets:
        if p.reduction(t):
            start, fold, finish = _fold(p.dag.nodes[t][0])
            value = convert(*local[p.dag.operands(t)[0]], "f")
            before.append(f"vf s{t} = splat({start});")
            inner.append(f"s{t} = {fold.format(t, f'keep({value}, {start}, m)')};")
            mean = " / (float)n" if p.dag.nodes[t][0] == "row_mean" else ""
            after.append(f"const vf t{t} = splat({finish}(s{t}){mean});")
            names[t] = (f"t{t}", "f")
    for q, t in enumerate(p.roots):
        if p.varies[t] and t in targets:
            inner.append(f"set(r{q} + j, {convert(*local[t], 'f')}, m);")
    head, n = ("lo", "hi") if flat else ("0", "n")
    text = [*before, f"auto pass{k} = [&](int64_t j, auto m) {{", indent("\n".join(inner)), "};"]
    text.append(f"for (int64_t j = {head}; j < {n}; j += VN) {{")
    text.append(f"  if (j + VN <= {n}) pass{k}(j, Full{{}});\n  else pass{k}(j, Part{{(int)({n} - j)}});\n}}")
    return [*text, *after]


def _fold(fn: str) -> tuple[str, str, str]:
    return dict(FOLD)["row_max" if fn == "row_max" else "row_sum"]


def _hidden(p: RowProgram, i: int, targets: list[int], k: int) -> bool:
    """True where a node is needed only by values that this pass reads back from scratch."""
    roots = [p.dag.operands(t)[0] if p.reduction(t) else t for t in targets]
    stop = lambda x: not p.varies[x] or p.cached.get(x, k) < k  # noqa: E731
    return i not in p.dag.below(roots, stop=stop)


ROWS = Rows("cpu/rows")
ELEMENTS = Elements("cpu/elements")
