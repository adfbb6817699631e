"""Generated kernels that move elements: transpose, slice, reshape, concat, take, gather, iota."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from llmc.codegen.backends.triton.tiling import cost_us, decompose, factored, masked, tiles, times, wide
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, element, unsupported
from llmc.codegen.emit import merged, strided_view
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import D, Dim, product
from llmc.ir.dtype import DTYPES, FLOATS, INTS
from llmc.ir.graph import Node
from llmc.targets.target import Target

Axes = list[tuple[Dim, Dim]]  # (size, stride of the operand in elements)


class Moving(TritonKernel):
    """Base class: a program moves a tile of the two-dimensional space (rows, columns) that `space` returns."""

    constant_reduction_order = EXACT

    def space(self, node: Node) -> tuple[Dim, Dim]:
        """Return (rows, columns)."""
        return D(1), node.results[0].type.numel

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        per_thread = 128 // DTYPES[node.results[0].type.dtype].bits  # 16 bytes
        shapes = tiles(*self.space(node), target, per_thread)
        return [{"rows": r, "cols": c, "warps": w} for r, c, w in shapes]

    def programs(self, node: Node, schedule: Schedule) -> Dim:
        """Return the number of programs of a schedule."""
        rows, cols = self.space(node)
        return rows.ceildiv(schedule["rows"]) * cols.ceildiv(schedule["cols"])

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        copied = sum((r.type.nbytes * 2 for r in node.results), D(0))  # bytes read and written
        return cost_us(node, target, env, self.programs(node, schedule), schedule["warps"], copied)

    def tile(self, u: Unit, rows: Dim, cols: Dim) -> tuple[list[str], str]:
        """Return (code that defines `row` and `col` of this program's tile, the name of its mask or "").

        Their shapes are [rows, 1] and [1, cols], or () and [cols] for tiles of one row.
        """
        r, c = u.schedule["rows"], u.schedule["cols"]
        blocks, flat = cols.ceildiv(c), rows.const == 1
        far = flat and wide(cols)
        row, start = "tl.program_id(0)", ""
        if flat:
            start = f"tl.program_id(0){'.to(tl.int64)' if far else ''} * {c} + "
        elif blocks.const != 1:
            row, start = f"{row} // {u.sizes(blocks)}", f"{row} % {u.sizes(blocks)} * {c} + "
        if r > 1:
            lines = [f"row = {row} * {r} + tl.arange(0, {r})[:, None]", f"col = {start}tl.arange(0, {c})[None, :]"]
        elif flat:
            lines = [f"col = {start}tl.arange(0, {c})"]
        else:
            lines = [f"row = {row}", f"col = {start}tl.arange(0, {c})"]
        return bounded(lines, u, (rows, r), (cols, c), far)

    def finish(self, u: Unit, lines: list[str]) -> Code:
        """Return the code made of these statements."""
        return Code("\n".join(x for x in lines if x), (self.programs(u.node, u.schedule),), "", u.schedule["warps"])


def row_offset(u: Unit, rows: Dim, width: Dim, total: Dim) -> str:
    """Print the offset of `row`, whose rows have `width` of `total` elements, with a plus sign; "" for a single row."""
    return "" if rows.const == 1 else f"{times('row', width, total, u.sizes)} + "


def bounded(lines: list[str], u: Unit, row: tuple[Dim, int], col: tuple[Dim, int], far: bool) -> tuple[list[str], str]:
    """Append the mask `inside` if a tile does not divide its size; return the lines and the name of the mask or ""."""
    tests = [f"({x} < {factored(n, u.sizes, far)})" for x, (n, t) in (("row", row), ("col", col)) if not n.divisible(t)]
    return ([*lines, f"inside = {' & '.join(tests)}"], "inside") if tests else (lines, "")


def copy_axes(node: Node) -> tuple[Axes, Dim]:
    """Return the result's axes with the operand's strides (merged if contiguous) and the first element's offset."""
    if node.op.name == "reshape":
        return [(node.operands[0].type.numel, D(1))], D(0)
    strides, start = strided_view(node)
    return merged(node.result.type.shape, strides), start


def transposed_axis(axes: Axes) -> int | None:
    """Return the axis along which the operand is contiguous if that is not the last axis of the result, else None."""
    if axes[-1][1].const == 1:
        return None
    return next((a for a, (_, s) in enumerate(axes) if s.const == 1), None)


class Copy(Moving):
    """Any affine copy.

    If operand and result are contiguous along different axes, a tile spans both axes, so that reads and writes are
    coalesced.
    """

    def space(self, node: Node) -> tuple[Dim, Dim]:
        axes, _ = copy_axes(node)
        a = transposed_axis(axes)
        if a is None:
            return product([n for n, _ in axes[:-1]]), axes[-1][0]
        return axes[a][0], axes[-1][0]

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        if transposed_axis(copy_axes(node)[0]) is None:
            return super().schedules(node, target)
        return [{"rows": n, "cols": n, "warps": 4} for n in (64, 32)]

    def programs(self, node: Node, schedule: Schedule) -> Dim:
        axes, _ = copy_axes(node)
        a = transposed_axis(axes)
        others = [n for i, (n, _) in enumerate(axes[:-1]) if a is not None and i != a]
        return super().programs(node, schedule) * product(others)

    def code(self, u: Unit) -> Code:
        axes, start = copy_axes(u.node)
        a = transposed_axis(axes)
        total = u.node.operands[0].type.numel
        if a is None:
            rows = product([n for n, _ in axes[:-1]])
            lines, inside = self.tile(u, rows, axes[-1][0])
            names = decompose("row", [n for n, _ in axes[:-1]], u.sizes)
            source = [times(f"i{i}", s, total, u.sizes) for i, (_, s) in enumerate(axes[:-1])]
            target = "col" if not names else f"{times('row', axes[-1][0], u.node.result.type.numel, u.sizes)} + col"
            lines += names
        else:
            lines, inside, source, target = self._crossed(u, axes, a)
        source.append(times("col", axes[-1][1], total, u.sizes))
        first = "" if start.const == 0 else f" + {factored(start, u.sizes, wide(total))}"
        lines += [u.wait, f"v = tl.load(x0{first} + {' + '.join(source)}{masked(inside)})"]
        return self.finish(u, [*lines, f"tl.store(y0 + {target}, v{masked(inside)})"])

    def _crossed(self, u: Unit, axes: Axes, a: int) -> tuple[list[str], str, list[str], str]:
        """Return the code of a tile: rows along axis `a`, columns along the last; programs enumerate the others."""
        rows, cols = u.schedule["rows"], u.schedule["cols"]  # tile sizes
        num_rows, num_cols = axes[a][0], axes[-1][0]
        others = [i for i in range(len(axes) - 1) if i != a]  # p0, p1, ... are the program's indices along these
        sizes = [*(axes[i][0] for i in others), num_rows.ceildiv(rows), num_cols.ceildiv(cols)]
        lines = decompose("tl.program_id(0)", sizes, u.sizes, "p")
        lines += [
            f"row = p{len(others)} * {rows} + tl.arange(0, {rows})[:, None]",
            f"col = p{len(others) + 1} * {cols} + tl.arange(0, {cols})[None, :]",
        ]
        lines, inside = bounded(lines, u, (num_rows, rows), (num_cols, cols), False)
        read, written = u.node.operands[0].type.numel, u.node.result.type.numel
        strides = [product([n for n, _ in axes[i + 1 :]]) for i in range(len(axes))]  # strides of the result
        source = [times(f"p{j}", axes[i][1], read, u.sizes) for j, i in enumerate(others)] + ["row"]
        target = [times(f"p{j}", strides[i], written, u.sizes) for j, i in enumerate(others)]
        target += [times("row", strides[a], written, u.sizes), "col"]
        return lines, inside, source, " + ".join(target)


class Concat(Moving):
    """Concatenation; every operand has its own programs."""

    def segments(self, node: Node) -> tuple[Dim, list[Dim]]:
        """Return (rows, the number of elements per row of each operand)."""
        shape = node.result.type.shape
        axis = node.attrs["axis"] % len(shape)
        return product(shape[:axis]), [product(v.type.shape[axis:]) for v in node.operands]

    def space(self, node: Node) -> tuple[Dim, Dim]:
        rows, parts = self.segments(node)
        return rows, max(parts, key=lambda d: d.const or 2**62)

    def programs(self, node: Node, schedule: Schedule) -> Dim:
        rows, parts = self.segments(node)
        return sum((p.ceildiv(schedule["cols"]) for p in parts), D(0)) * rows.ceildiv(schedule["rows"])

    def code(self, u: Unit) -> Code:
        rows, parts = self.segments(u.node)
        r, c = u.schedule["rows"], u.schedule["cols"]
        far = wide(u.node.result.type.numel)
        total = factored(sum(parts, D(0)), u.sizes, far)
        height = rows.ceildiv(r)
        lines = [u.wait, "at = tl.program_id(0)"]
        before, shift = D(0), D(0)
        for i, n in enumerate(parts):
            blocks = n.ceildiv(c)
            size = ", ".join(factored(d, u.sizes, far) for d in (rows, n))
            at = f"at - {factored(before, u.sizes)}" if i else "at"
            to = f"y0 + {factored(shift, u.sizes, far)}" if i else "y0"
            call = f"segment(x{i}, {to}, {at}, {u.sizes(blocks)}, {size}, {total}, {r}, {c})"
            before, shift = before + blocks * height, shift + n
            test = f"at < {u.sizes(before)}" if i < len(parts) - 1 else ""
            lines.append(branch(i == 0, test, call))
        code = self.finish(u, lines)
        return Code(code.body, code.grid, SEGMENT, code.warps)


def branch(first: bool, test: str, call: str) -> str:
    """Print one arm of an if statement; the last arm has no test, and a single arm needs no statement."""
    if not test:
        return call if first else f"else:\n    {call}"
    return f"{'if' if first else 'elif'} {test}:\n    {call}"


SEGMENT = '''
@triton.jit
def segment(x, y, at, blocks, rows, n, total, R: tl.constexpr, C: tl.constexpr):
    """Copy tile `at` of x [rows, n] to rows of `total` elements."""
    row = (at // blocks).to(tl.int64) * R + tl.arange(0, R)[:, None]
    col = (at % blocks).to(tl.int64) * C + tl.arange(0, C)[None, :]
    inside = (row < rows) & (col < n)
    tl.store(y + row * total + col, tl.load(x + row * n + col, mask=inside), mask=inside)
'''


class Indexed(Moving):
    """Base class of kernels with an index operand."""

    def reject(self, node: Node, target: Target) -> str | None:
        if node.operands[1].type.dtype not in INTS:
            return f"the index has dtype {node.operands[1].type.dtype}"
        return unsupported(node)


class Take(Indexed):
    """Rows by index: embeddings, parts of them, and last tokens. Previous kernels write the index, so all loads follow
    the wait.
    """

    def space(self, node: Node) -> tuple[Dim, Dim]:
        rows = node.operands[1].type.numel
        return rows, node.attrs["k"] * D(1) if "k" in node.attrs else product(node.operands[0].type.shape[1:])

    def code(self, u: Unit) -> Code:
        rows, cols = self.space(u.node)
        head, inside = self.tile(u, rows, cols)
        known = "" if rows.divisible(u.schedule["rows"]) else f"row < {u.sizes(rows)}"
        at = "x1" if rows.const == 1 else "x1 + row"
        target = row_offset(u, rows, cols, u.node.result.type.numel)
        exists, start = "(index >= 0)", ""
        if "start" in u.node.attrs:
            start = f" - {u.sizes(u.node.attrs['start'])}"
            exists += f" & (index < {u.sizes(self.height(u.node.operands[0].type.shape))})"
        lines = [
            *head,
            u.wait,
            f"index = tl.load({at}{masked(known, other='-1')}).to(tl.int64){start}",
            f"v = tl.load(x0 + {self.source(u, cols)}{masked(inside, exists, other='0')})",
            f"tl.store(y0 + {target}col, v{masked(inside)})",
        ]
        return self.finish(u, lines)

    def height(self, shape: Sequence[Dim]) -> Dim:
        """Return the number of rows of an operand with this shape."""
        return shape[0]

    def source(self, u: Unit, cols: Dim) -> str:
        """Print the offset of column `col` of row `index` in the operand."""
        return f"index * {factored(cols, u.sizes)} + col"


class PageTake(Take):
    """Rows of a pool of pages by slot."""

    def space(self, node: Node) -> tuple[Dim, Dim]:
        return node.operands[1].type.numel, node.operands[0].type.shape[-1]


class PagePut(Moving):
    """Write rows to slots of a pool of pages."""

    def space(self, node: Node) -> tuple[Dim, Dim]:
        return node.operands[1].type.shape[0], node.operands[1].type.shape[1]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        copied = node.operands[1].type.nbytes * 2
        return cost_us(node, target, env, self.programs(node, schedule), schedule["warps"], copied)

    def code(self, u: Unit) -> Code:
        rows, cols = self.space(u.node)
        head, inside = self.tile(u, rows, cols)
        known = "" if rows.divisible(u.schedule["rows"]) else f"row < {u.sizes(rows)}"
        source = row_offset(u, rows, cols, u.node.operands[1].type.numel)
        slots = "x2" if rows.const == 1 else "x2 + row"
        lines = [
            *head,
            u.wait,
            f"slot = tl.load({slots}{masked(known, other='-1')}).to(tl.int64)",
            f"v = tl.load(x1 + {source}col{masked(inside, other='0')})",
            f"tl.store(y0 + slot * {factored(cols, u.sizes)} + col, v{masked(inside, '(slot >= 0)')})",
        ]
        return self.finish(u, lines)


class PackedTake(Take):
    """Rows by index of a weight in panels, or of a part of one."""

    def height(self, shape: Sequence[Dim]) -> Dim:
        return shape[0] * shape[2]

    def source(self, u: Unit, cols: Dim) -> str:
        _, depth, rows, pair = u.node.operands[0].type.shape
        panel = f"(index // {rows} * {depth} + col // {pair}) * {prod((rows.const or 1, pair.const or 1))}"
        return f"{panel} + index % {rows} * {pair} + col % {pair}"


class Gather(Indexed):
    """Elements by index along an axis; a negative index counts from the end."""

    def code(self, u: Unit) -> Code:
        x, idx = (v.type for v in u.node.operands)
        a = u.node.attrs["axis"] % x.rank
        inner = product(x.shape[a + 1 :])
        count = u.sizes(x.shape[a])
        step = f" * {factored(inner, u.sizes)}" if inner.const != 1 else ""
        head, inside = self.tile(u, D(1), idx.numel)
        lines = [
            *head,
            u.wait,
            f"index = tl.load(x1 + col{masked(inside, other='0')}).to(tl.int64)",
            f"index = tl.where(index < 0, index + {count}, index)",
            f"outer = col // {factored(idx.shape[a] * inner, u.sizes)}",
            f"at = (outer * {count} + index){step}" + (f" + col % {factored(inner, u.sizes)}" if step else ""),
            f"tl.store(y0 + col, tl.load(x0 + at{masked(inside)}){masked(inside)})",
        ]
        return self.finish(u, lines)


class TakeColumns(Indexed):
    """Columns by index, the same for all rows."""

    def space(self, node: Node) -> tuple[Dim, Dim]:
        return product(node.result.type.shape[:-1]), node.result.type.shape[-1]

    def code(self, u: Unit) -> Code:
        rows, cols = self.space(u.node)
        x, y = u.node.operands[0].type, u.node.result.type
        head, inside = self.tile(u, rows, cols)
        known = "" if cols.divisible(u.schedule["cols"]) else f"col < {u.sizes(cols)}"
        source = row_offset(u, rows, x.shape[-1], x.numel)
        target = row_offset(u, rows, cols, y.numel)
        lines = [
            *head,
            u.wait,
            f"index = tl.load(x1 + col{masked(known, other='0')})",
            f"v = tl.load(x0 + {source}index{masked(inside)})",
            f"tl.store(y0 + {target}col, v{masked(inside)})",
        ]
        return self.finish(u, lines)


class Iota(Moving):
    """0, 1, 2, ..."""

    dtypes = (*FLOATS, *INTS)

    def code(self, u: Unit) -> Code:
        t = u.node.result.type
        value = "col.to(tl.float32)" if t.dtype in FLOATS else "col"
        lines, inside = self.tile(u, D(1), t.shape[0])
        return self.finish(u, [*lines, u.wait, f"tl.store(y0 + col, {value}.to({element(t)}){masked(inside)})"])


COPY = Copy("triton/copy", ("reshape", "transpose", "slice"))
CONCAT = Concat("triton/concat", ("concat",))
TAKE = Take("triton/take", ("take", "take_part"))
PAGE_TAKE = PageTake("triton/page_take", ("page_take",))
PAGE_PUT = PagePut("triton/page_put", ("page_put",))
PACKED_TAKE = PackedTake("triton/packed_take", ("packed_take", "packed_take_part"))
GATHER = Gather("triton/gather", ("gather",))
TAKE_COLUMNS = TakeColumns("triton/take_columns", ("take_columns",))
IOTA = Iota("triton/iota", ("iota",))
