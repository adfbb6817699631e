"""Generates C++ for row programs (see `llmc.codegen.row_program`): pointwise groups, norms, softmax and `fused`.

Reductions split a row program into passes over the row; expensive values that two passes need are kept in scratch.
"""

from __future__ import annotations

from types import MappingProxyType

from llmc.codegen.backends.cpp.cpp_kernel import CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes, indent
from llmc.codegen.kernel import Schedule
from llmc.codegen.print_expr import ELEMENT, VECTOR, Names, convert, statements
from llmc.codegen.row_program import RowProgram, Space, expressions, same_layout
from llmc.ir.dim import Dim, product
from llmc.ir.dtype import FLOATS, INTS
from llmc.ir.graph import Node
from llmc.ir.scalar import reduces_rows
from llmc.targets.target import Target

_SUM = ("0.0f", "s{0} + {1}", "hsum")
# Reduction -> its neutral element, the step that adds a vector, and the function that reduces the lanes of the result.
FOLD = MappingProxyType({"row_sum": _SUM, "row_mean": _SUM, "row_max": ("-INFINITY", "m_max(s{0}, {1})", "hmax_nan")})


class Rows(CppKernel):
    """Float groups, vectorized along the row. Threads divide the rows, or the single row if nothing is reduced."""

    constant_reduction_order = "lanes of a vector"
    headers = ("llmc_abi.h", "llmc_math.h", "llmc_store.h")
    dtypes = (*FLOATS, "bool")

    def claims(self, node: Node) -> bool:
        return expressions(node) is not None

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return same_layout(node)

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        p = RowProgram(node, expressions(node) or [])
        return (p.space.row * 4 + 64) * len(p.cached)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        p = RowProgram(node, expressions(node) or [])
        flat = not p.space.outer and len(p.passes) == 1 and all(varies[-1] for varies in p.space.varies[p.count :])
        return row_loops(p, sizes, _row_text(p, flat), flat)


class Elements(CppKernel):
    """Groups of any dtype, one element at a time: integer and bool arithmetic, casts to and from integers."""

    constant_reduction_order = "one element after another"
    headers = ("llmc_abi.h", "llmc_math.h", "llmc_store.h", "llmc_element.h")

    def claims(self, node: Node) -> bool:
        return expressions(node) is not None

    def reject(self, node: Node, target: Target) -> str | None:
        if any(map(reduces_rows, expressions(node) or [])):
            return "row reductions are not supported"
        return unsupported(node, (*FLOATS, *INTS, "bool"))

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return same_layout(node)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: object) -> float:
        """Estimate the time: about four times that of the vectorized kernel."""
        return 4 * super().cost_us(node, schedule, target, env)  # type: ignore[arg-type]

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        p = RowProgram(node, expressions(node) or [])
        flat = not p.space.outer and all(varies[-1] for varies in p.space.varies[p.count :])
        names: Names = {}
        lines = []
        for i in p.dag.below(p.roots):
            if p.dag.nodes[i].fn == "arg":
                k = p.dag.argument(i)
                lines.append(f"const auto t{i} = scalar(q{k}[{'j' if p.space.varies[k][-1] else 0}]);")
                names[i] = (f"t{i}", "s")
            else:
                lines += statements(p.dag, [i], names, ELEMENT)
        for k, root in enumerate(p.roots):
            at = "j" if p.space.varies[p.count + k][-1] else "0"
            lines.append(f"put(r{k} + {at}, {names[root][0]});")
        head, n = ("lo", "hi") if flat else ("0", "n")
        loop = f"for (int64_t j = {head}; j < {n}; j++) {{\n{indent(chr(10).join(lines))}\n}}"
        return row_loops(p, sizes, loop, flat)


def row_loops(p: RowProgram, sizes: Sizes, row: str, flat: bool) -> str:
    """Return the loops around a row's text: this thread's rows, and pointers to each value's part of the row."""
    space = p.space
    lines = [pointers(p.node), f"const int64_t n = {sizes(space.row)};", "int64_t lo, hi;"]
    # (the pointer to a row's part, the pointer to the whole) of each value
    values = [(f"q{i}", f"x{i}") for i in range(p.count)] + [(f"r{i}", f"y{i}") for i in range(len(p.node.results))]
    if flat:
        lines += ["llmc_split(ctx, n, 256, &lo, &hi);"]
        lines += [f"const auto {part} = {whole};" for part, whole in values]
        return "\n".join([*lines, row])
    lines.append(f"llmc_split(ctx, {sizes(product(space.outer))}, 1, &lo, &hi);")
    lines.append("for (int64_t row = lo; row < hi; row++) {")
    inner = _indices(space, sizes)
    for v, (part, whole) in enumerate(values):
        axes = [axis for axis in range(len(space.outer)) if space.varies[v][axis]]
        terms = [f"i{axis} * {sizes(space.stride(v, axis))}" for axis in axes]
        inner.append(f"const auto {part} = {' + '.join([whole, *terms])};")
    return "\n".join([*lines, indent("\n".join([*inner, row])), "}"])


def _indices(space: Space, sizes: Sizes) -> list[str]:
    """Return the statements that compute the outer indices i0, i1, ... from the flat row number."""
    if len(space.outer) == 1:
        return ["const int64_t i0 = row;"]
    lines, rest = [], "row"
    for axis in range(len(space.outer) - 1, 0, -1):
        size = sizes(space.outer[axis])
        lines.append(f"const int64_t i{axis} = {rest} % {size}, rest{axis} = {rest} / {size};")
        rest = f"rest{axis}"
    if space.outer:
        lines.append(f"const int64_t i0 = {rest};")
    return lines


def _row_text(p: RowProgram, flat: bool) -> str:
    """Return the passes over one row, and the stores of results that are constant along the row."""
    names: Names = {}
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
            if p.space.varies[p.count + k][-1]:
                lines.append(f"for (int64_t j = 0; j < n; j++) put(r{k} + j, {convert(*names[root], 'f')}[0]);")
            else:
                lines.append(f"put(r{k}, {convert(*names[root], 'f')}[0]);")
    return "\n".join(lines)


def _uniform(p: RowProgram, names: Names, level: int) -> list[str]:
    """Return the statements for the values that are constant along the row and known before pass `level`."""
    lines = []
    for i in p.dag.below(p.roots):
        fn = p.dag.nodes[i].fn
        if p.varies[i] or i in names or p.reduction(i) or p.level[i] > level:
            continue
        if fn == "arg":
            lines.append(f"const vf t{i} = splat((float)scalar(q{p.dag.argument(i)}[0]));")
            names[i] = (f"t{i}", "f")
        elif fn.startswith("row_"):
            names[i] = names[p.dag.operands(i)[0]]
        else:
            lines += statements(p.dag, [i], names, VECTOR)
    return lines


def _pass(p: RowProgram, targets: list[int], names: Names, k: int, flat: bool) -> list[str]:
    """Return one pass over the row: accumulate the reductions of this level, or store results.

    names: the C++ variables that hold nodes, with their kinds. Nodes that the pass computes have variables that are
    valid within its body only; `names` gets those of the reductions.
    """
    local = dict(names)
    body = _pass_values(p, targets, local, k)
    before, after = [], []
    for target in filter(p.reduction, targets):
        fn = p.dag.nodes[target].fn
        value = local[p.dag.operands(target)[0]]
        start, fold, finish = FOLD[fn]
        before.append(f"vf s{target} = splat({start});")
        masked = f"keep({convert(*value, 'f')}, {start}, m)"  # `start` beyond the end of the row
        body.append(f"s{target} = {fold.format(target, masked)};")
        mean = " / (float)n" if fn == "row_mean" else ""
        after.append(f"const vf t{target} = splat({finish}(s{target}){mean});")
        names[target] = (f"t{target}", "f")
    for result, root in enumerate(p.roots):
        if p.varies[root] and root in targets:
            body.append(f"set(r{result} + j, {convert(*local[root], 'f')}, m);")
    begin, end = ("lo", "hi") if flat else ("0", "n")
    text = [*before, f"auto pass{k} = [&](int64_t j, auto m) {{", indent("\n".join(body)), "};"]
    text.append(f"for (int64_t j = {begin}; j < {end}; j += VN) {{")
    text.append(f"  if (j + VN <= {end}) pass{k}(j, Full{{}});\n  else pass{k}(j, Part{{(int)({end} - j)}});\n}}")
    return [*text, *after]


def _pass_values(p: RowProgram, targets: list[int], local: Names, k: int) -> list[str]:
    """Return the statements that load or compute the nodes that pass `k` needs for `targets`, and add them to `local`.

    Values that an earlier pass has stored in the scratch memory are read from there.
    """
    lines: list[str] = []
    for i in p.work(targets):
        if p.cached.get(i, k) < k:
            lines.append(f"const vf t{i} = get(c{i} + j, m);")
            local[i] = (f"t{i}", "f")
        elif not _only_for_cached(p, i, targets, k):
            if p.dag.nodes[i].fn == "arg":
                lines.append(f"const vf t{i} = get(q{p.dag.argument(i)} + j, m);")
                local[i] = (f"t{i}", "f")
            else:
                lines += statements(p.dag, [i], local, VECTOR)
            if p.cached.get(i) == k:
                lines.append(f"set(c{i} + j, {local[i][0]}, m);")
    return lines


def _only_for_cached(p: RowProgram, i: int, targets: list[int], k: int) -> bool:
    """Whether a node is needed only by values that this pass reads back from scratch."""
    roots = [p.dag.operands(t)[0] if p.reduction(t) else t for t in targets]
    stop = lambda x: not p.varies[x] or p.cached.get(x, k) < k  # noqa: E731
    return i not in p.dag.below(roots, stop=stop)


ROWS = Rows("cpu/rows")
ELEMENTS = Elements("cpu/elements")
