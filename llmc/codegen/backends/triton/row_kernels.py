"""Generates Triton kernels of row programs: pointwise groups, norms, softmax, casts and `fused`.

A program computes some rows. Rows with reductions are kept in registers if they fit, and are read again by every pass
otherwise. Without reductions, a program computes a block of columns of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from llmc.codegen.backends.triton.tiling import (
    MAX_ELEMENTS,
    cost_us,
    decompose,
    factored,
    max_block_warps,
    next_power_of_2,
    tiles,
    times,
    wide,
)
from llmc.codegen.backends.triton.triton_expr import (
    constant,
    convert,
    dtypes,
    fold,
    helpers,
    loaded,
    number,
    statement,
    stored,
)
from llmc.codegen.backends.triton.triton_kernel import FLOAT8, Code, TritonKernel, Unit, unsupported
from llmc.codegen.emit import indent
from llmc.codegen.kernel import Schedule, schedule_text
from llmc.codegen.row_program import RowProgram, expressions, same_layout
from llmc.ir.dim import Dim, product
from llmc.ir.dtype import FLOATS, INTS
from llmc.ir.graph import Node
from llmc.targets.target import Target

START = MappingProxyType({"row_sum": "0.0", "row_mean": "0.0", "row_max": 'float("-inf")'})


def program(node: Node) -> RowProgram:
    """Return the row program of a node, with constants folded."""
    return RowProgram(node, [fold(e) for e in expressions(node) or []])


def reduces(p: RowProgram) -> bool:
    """Whether a program contains reductions of the row."""
    return any(p.reduction(i) for i in p.dag.below(p.roots))


class Rows(TritonKernel):
    """Row programs of any dtypes. Schedule: `rows` and `cols` of a program's tile, `warps`."""

    def claims(self, node: Node) -> bool:
        return expressions(node) is not None

    def reject(self, node: Node, target: Target) -> str | None:
        if any(v.type.dtype in FLOAT8 for v in node.operands):
            return "an operand of 8-bit floats"
        return unsupported(node, (*FLOATS, *INTS, "bool", *FLOAT8), target)

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return same_layout(node)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return row_schedules(program(node), target)

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        return f"{self.name} {schedule_text(schedule)}" if reduces(program(node)) else "one element by itself"

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        count = programs(program(node), schedule)
        return cost_us(node, target, env, count[0] * count[1], schedule["warps"])

    def code(self, u: Unit) -> Code:
        w = Writer(u, program(u.node))
        body = w.looped() if w.loops else w.unrolled()
        rows, cols = programs(w.p, u.schedule)
        used = [fn for fn, _ in w.p.dag.nodes]
        return Code(body, (rows * cols,), helpers(used, u.interpret), u.schedule["warps"])


def rowless(p: RowProgram) -> bool:
    """Whether a result has no row axis: every program then writes the same value to it."""
    return any(not any(varies[:-1]) for varies in p.space.varies[p.count :])


def programs(p: RowProgram, schedule: Schedule) -> tuple[Dim, Dim]:
    """Return the number of programs along the rows and along the columns."""
    cols = Dim.of(1) if reduces(p) else p.space.row.ceildiv(schedule["cols"])
    return product(p.space.outer).ceildiv(schedule["rows"]), cols


def row_schedules(p: RowProgram, target: Target) -> list[Schedule]:
    """Return the schedules of a row program: tiles of whole rows if it reduces them."""
    shapes = reducing_tiles(p, target) if reduces(p) else tiles(product(p.space.outer), p.space.row, target)
    return [{"rows": rows, "cols": cols, "warps": warps} for rows, cols, warps in dict.fromkeys(shapes)]


def reducing_tiles(p: RowProgram, target: Target) -> list[tuple[int, int, int]]:
    """Return tiles (rows, cols, warps) of whole rows, with 8 elements per thread first, and 1 to 32 in the others."""
    n, warp, max_warps = p.space.row.const, target.limits.warp, max_block_warps(target)
    if n is None or n > MAX_ELEMENTS:
        first = (1, 1024, 4) if n is None else (1, MAX_ELEMENTS, max_warps)
        return [first, (1, 4096, min(16, max_warps))]
    cols = next_power_of_2(n)
    warps = max(1, min(max_warps, cols // (warp * 8)))
    counts = [w for w in (warps, warps // 2, warps * 2, warps // 4) if 0 < w <= max_warps and cols <= 32 * warp * w]
    single_row = [(1, cols, w) for w in counts if w == 1 or cols >= warp * w]
    if cols > 512 or product(p.space.outer).const == 1 or rowless(p):
        return single_row
    return [*single_row[:1], (1024 // cols, cols, 4), (max(1, 256 // cols), cols, 1)]


@dataclass
class Writer:
    """Prints one node's program. Depending on its axes, a value is a scalar, a column [rows, 1], a row or a tile.

    names: DAG node -> the Triton expression of its value. Of all values, operands first: `totals` are the numbers of
    elements and `dtypes` the stored dtypes. kinds: the computed dtype of each DAG node. rows, cols: the tile's sizes.
    loops: whether a row is read tile by tile. row_mask, col_mask: whether tiles may extend beyond the rows or columns.
    far: whether column offsets need 64 bits.
    """

    u: Unit
    p: RowProgram
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = [*self.u.node.operands, *self.u.node.results]
        self.totals = [v.type.numel for v in values]
        self.dtypes = [v.type.dtype for v in values]
        self.kinds = dtypes(self.p.dag, self.dtypes[: self.p.count])
        self.rows, self.cols = self.u.schedule["rows"], self.u.schedule["cols"]
        self.reduces = reduces(self.p)
        sp = self.p.space
        self.loops = self.reduces and (sp.row.const is None or sp.row.const > self.cols)
        self.outer = product(sp.outer)
        self.row_mask = self.tall and not self.outer.divisible(self.rows)
        self.col_mask = not sp.row.divisible(self.cols)
        self.far = not sp.outer and wide(sp.row)

    # -- places ---------------------------------------------------------------------------------------------------

    def width(self) -> str:
        """Print the size of a row."""
        return factored(self.p.space.row, self.u.sizes, self.far)

    def coordinates(self) -> list[str]:
        """Return the code that defines `row`, its coordinates i0, i1, ..., and, without a loop, the columns `col`."""
        sp, (rows, cols) = self.p.space, programs(self.p, self.u.schedule)
        lines, at = [], "tl.program_id(0)"
        if cols.const != 1 and rows.const != 1:
            lines.append(f"here = tl.program_id(0) // {self.u.sizes(cols)}")
            lines.append(f"start = tl.program_id(0) % {self.u.sizes(cols)} * {self.cols}")
            at = "here"
        elif cols.const != 1:
            lines.append(f"start = tl.program_id(0){'.to(tl.int64)' if self.far else ''} * {self.cols}")
        if sp.outer:
            tile = f"{at} * {self.rows} + tl.arange(0, {self.rows})[:, None]"
            lines.append(f"row = {tile if self.tall else at}")
            lines += decompose("row", sp.outer, self.u.sizes)
            if self.row_mask:
                lines.append(f"valid = row < {factored(self.outer, self.u.sizes)}")
        if not self.loops:
            lines += self._columns("start + " if cols.const != 1 else "")
        return lines

    def _columns(self, start: str) -> list[str]:
        lines = [f"col = {start}tl.arange(0, {self.cols}){'[None, :]' if self.tall else ''}"]
        return lines + ([f"inside = col < {self.width()}"] if self.col_mask else [])

    @property
    def tall(self) -> bool:
        """Whether columns and tiles have two axes."""
        return self.rows > 1 and bool(self.p.space.outer)

    def place(self, v: int) -> tuple[str, str]:
        """Return (offset terms, mask argument) of value `v` (operands first, then results)."""
        space = self.p.space
        varies = space.varies[v]
        axes = [axis for axis in range(len(space.outer)) if varies[axis]]
        terms = [times(f"i{axis}", space.stride(v, axis), self.totals[v], self.u.sizes) for axis in axes]
        masks = ["valid"] if self.row_mask and any(varies[:-1]) else []
        if varies[-1]:
            terms.append("col")
            masks += ["inside"] if self.col_mask else []
        return "".join(f" + {t}" for t in terms), f", mask={' & '.join(masks)}" if masks else ""

    # -- statements -----------------------------------------------------------------------------------------------

    def load(self, i: int) -> str:
        """Return the statement that reads argument node `i`."""
        k = self.p.dag.argument(i)
        offset, mask = self.place(k)
        pointers = f"x{k}{offset}"
        if self.tall and offset == " + col" and not rowless(self.p):
            # One vector per thread; a row would be distributed through shared memory.
            pointers = f"tl.broadcast_to({pointers}, ({self.rows}, {self.cols}))"
        self.names[i] = f"a{k}"
        return f"a{k} = {loaded(f'tl.load({pointers}{mask})', self.dtypes[k])}"

    def compute(self, i: int) -> list[str]:
        """Return the statement of a node other than an argument; a constant has none and is printed in its users."""
        fn, args = self.p.dag.nodes[i]
        if fn == "const":
            self.names[i] = number(args[0])
            return []
        if fn.startswith("row_"):
            (of,) = self.p.dag.operands(i)
            self.names[i] = convert(self.names[of], self.kinds[of], "f32")
            return []
        line = f"t{i} = {statement(self.p.dag, i, self.names, self.kinds)}"
        self.names[i] = f"t{i}"
        return [line]

    def inner(self, i: int) -> str:
        """Return the operand of reduction `i`, with the neutral element outside the row."""
        (of,) = self.p.dag.operands(i)
        value = convert(self.names[of], self.kinds[of], "f32")
        return f"tl.where(inside, {value}, {START[self.p.dag.nodes[i].fn]})" if self.col_mask else value

    def folded(self, i: int, text: str) -> str:
        """Return the statement that reduces a tile along the row."""
        fn, axis = self.p.dag.nodes[i].fn, int(self.tall)
        self.names[i] = f"t{i}"
        if fn == "row_max":
            return f"t{i} = largest({text}, {axis}, {self.tall})"
        keep = ", keep_dims=True" if self.tall else ""
        divided = f" / {self.width()}" if fn == "row_mean" else ""
        return f"t{i} = tl.sum({text}, {axis}{keep}){divided}"

    def store(self, k: int) -> str:
        """Return the statement that stores result `k`."""
        v, root = self.p.count + k, self.p.roots[k]
        offset, mask = self.place(v)
        fn, args = self.p.dag.nodes[root]
        value, kind = self.names[root], self.kinds[root]
        if fn == "const":
            value = constant(args[0], self.dtypes[v])
            kind = "f32" if self.dtypes[v] in FLOATS else self.dtypes[v]
        return f"tl.store(y{k}{offset}, {stored(value, kind, self.dtypes[v])}{mask})"

    def weight(self, i: int) -> bool:
        """Whether argument node `i` is a weight, which may be loaded before the wait."""
        return self.u.node.operands[self.p.dag.argument(i)].weight

    # -- bodies ---------------------------------------------------------------------------------------------------

    def unrolled(self) -> str:
        """Return the code without loops: weights are loaded before the wait, all other operands right after it."""
        needed = self.p.dag.below(self.p.roots)
        args = [i for i in needed if self.p.dag.nodes[i].fn == "arg"]
        lines = self.coordinates()
        lines += [self.load(i) for i in args if self.weight(i)]
        lines.append(self.u.wait)
        lines += [self.load(i) for i in args if not self.weight(i)]
        for i in needed:
            if self.p.reduction(i):
                lines.append(self.folded(i, self.inner(i)))
            elif i not in args:
                lines += self.compute(i)
        lines += [self.store(k) for k in range(len(self.p.roots))]
        return "\n".join(x for x in lines if x)

    def looped(self) -> str:
        """Return the code with one loop over the row per level of reductions, and one that stores results."""
        lines = [*self.coordinates(), self.u.wait]
        for level, targets in enumerate(self.p.passes):
            lines += self._uniform(level)
            lines += self._pass(targets, level == len(self.p.passes) - 1)
        for k, root in enumerate(self.p.roots):
            if not self.p.space.varies[self.p.count + k][-1]:
                if root not in self.names:
                    lines += self._uniform(len(self.p.passes))
                lines.append(self.store(k))
        return "\n".join(x for x in lines if x)

    def _uniform(self, level: int) -> list[str]:
        """Return the statements for the values that are constant along the row and known before pass `level`."""
        lines: list[str] = []
        for i in self.p.dag.below(self.p.roots):
            if self.p.varies[i] or i in self.names or self.p.reduction(i) or self.p.level[i] > level:
                continue
            lines += [self.load(i)] if self.p.dag.nodes[i].fn == "arg" else self.compute(i)
        return lines

    def _pass(self, targets: Sequence[int], last: bool) -> list[str]:
        """Return a loop over the columns that accumulates the reductions among `targets`; the last one stores results.

        Nodes that it computes have names within the loop only. Without reductions and stores, there is no loop.
        """
        outer_names = dict(self.names)
        body = self._columns("at + ")
        for i in self.p.work(targets):
            body += [self.load(i)] if self.p.dag.nodes[i].fn == "arg" else self.compute(i)
        reductions = [t for t in targets if self.p.reduction(t)]
        shape = f"({self.rows}, {self.cols})" if self.tall else f"({self.cols},)"
        before = []
        for t in reductions:
            fn = self.p.dag.nodes[t].fn
            before.append(f"sum{t} = tl.full({shape}, {START[fn]}, tl.float32)")
            updated = f"larger(sum{t}, {self.inner(t)})" if fn == "row_max" else f"sum{t} + {self.inner(t)}"
            body.append(f"sum{t} = {updated}")
        stored = [k for k in range(len(self.p.roots)) if self.p.space.varies[self.p.count + k][-1]] if last else []
        body += [self.store(k) for k in stored]
        self.names = outer_names
        after = [self.folded(t, f"sum{t}") for t in reductions]
        if not reductions and not stored:
            return []
        loop = f"for at in range(0, {self.width()}, {self.cols}):"
        return [*before, loop, indent("\n".join(body), 4), *after]


ROWS = Rows("triton/rows", can_trigger_before_wait=True)
