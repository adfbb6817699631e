"""Kernels that move elements: transpose, slice, concat, take, gather, iota, and reshapes that must copy."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import CppKernel, ctype, pointers, unsupported
from llmc.codegen.emit import Sizes, merged, strided_view
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import D, Dim, product
from llmc.ir.dtype import DTYPES, INTS
from llmc.ir.graph import Node
from llmc.targets.target import Target


def item(node: Node, operand: int = 0) -> int:
    """Return the bytes of one element of an operand."""
    return DTYPES[node.operands[operand].type.dtype].bits // 8


def raw(node: Node) -> str:
    """Return the unsigned C++ type with the width of an element, sufficient for moving it."""
    return {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t"}[item(node)]


class Moving(CppKernel):
    """Base class of kernels that move elements unchanged."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_shape.h")


class Copy(Moving):
    """A reshape that cannot be an alias: copies all bytes."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        n = sizes(node.operands[0].type.nbytes)
        return f"copy_rows(ctx, (char*)args[1], 0, (const char*)args[0], 0, 1, {n});"


class Strided(Moving):
    """A transpose, or a slice along one axis: a strided copy to the dense result, with contiguous axes merged."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        strides, start = strided_view(node)
        axes = merged(node.result.type.shape, strides)
        t = raw(node)
        return "\n".join(
            [
                f"const int64_t size[] = {{{', '.join(sizes(a) for a, _ in axes)}}};",
                f"const int64_t step[] = {{{', '.join(sizes(s) for _, s in axes)}}};",
                f"const {t}* x = (const {t}*)args[0] + {sizes(start)};",
                f"copy_strided<{t}, {len(axes)}>(ctx, ({t}*)args[1], x, size, step);",
            ]
        )


class Concat(Moving):
    """Concatenation along one axis."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        shape = node.result.type.shape
        axis = node.attrs["axis"] % len(shape)
        row = sizes(product(shape[axis:]) * item(node))
        rows = sizes(product(shape[:axis]))
        lines, at = [f"char* y = (char*)args[{len(node.operands)}];"], D(0)
        for i, v in enumerate(node.operands):
            n = product(v.type.shape[axis:]) * item(node)
            src = f"(const char*)args[{i}], {sizes(n)}"
            lines.append(f"copy_rows(ctx, y + {sizes(at)}, {row}, {src}, {rows}, {sizes(n)});")
            at = at + n
        return "\n".join(lines)


class Take(Moving):
    """Rows by index: embeddings, parts of them, last tokens."""

    def reject(self, node: Node, target: Target) -> str | None:
        if node.operands[1].type.dtype not in INTS:
            return f"the index has dtype {node.operands[1].type.dtype}"
        return unsupported(node)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        x, idx = (v.type for v in node.operands)
        count = sizes(idx.numel)
        nbytes = sizes(product(x.shape[1:]) * item(node))
        part = part_arguments(node, x.shape[0], sizes)
        i = ctype(idx)
        return f"take_rows(ctx, (char*)args[2], (const char*)args[0], (const {i}*)args[1], {count}, {nbytes}{part});"


class PageTake(Take):
    """Rows of a pool of pages by slot."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        pool, slots = (v.type for v in node.operands)
        count = sizes(slots.numel)
        nbytes = sizes(pool.shape[-1] * item(node))
        return f"take_rows(ctx, (char*)args[2], (const char*)args[0], (const int32_t*)args[1], {count}, {nbytes});"


class PagePut(Moving):
    """Write rows to slots of a pool of pages."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        x = node.operands[1].type
        count = sizes(x.shape[0])
        nbytes = sizes(x.shape[1] * item(node))
        return f"put_rows(ctx, (char*)args[3], (const char*)args[1], (const int32_t*)args[2], {count}, {nbytes});"


def part_arguments(node: Node, rows: Dim, sizes: Sizes) -> str:
    """Return the arguments for the first index and the rows of a part of a table; "" if the operand is a whole one."""
    return f", {sizes(node.attrs['start'])}, {sizes(rows)}" if "start" in node.attrs else ""


def indexed_pointers(node: Node) -> str:
    """Return the arguments of functions that read by index: pointers to the result, the elements and the indices."""
    element, index = raw(node), ctype(node.operands[1].type)
    return f"({element}*)args[2], (const {element}*)args[0], (const {index}*)args[1]"


class PackedTake(Take):
    """Rows by index of a packed weight, or of a packed part of one."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        wp, idx = (v.type for v in node.operands)
        shape = f"{node.attrs['k']}, {wp.shape[1]}, {wp.shape[2]}, {wp.shape[3]}"
        types = f"{raw(node)}, {ctype(idx)}, {shape}"
        part = part_arguments(node, wp.shape[0] * wp.shape[2], sizes)
        return f"take_packed<{types}>(ctx, {indexed_pointers(node)}, {sizes(idx.numel)}{part});"


class Gather(Moving):
    """Elements by index along an axis."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        x, idx = (v.type for v in node.operands)
        a = node.attrs["axis"] % x.rank
        numbers = product(x.shape[:a]), x.shape[a], idx.shape[a], product(x.shape[a + 1 :])
        return f"gather(ctx, {indexed_pointers(node)}, {', '.join(map(sizes, numbers))});"


class TakeColumns(Take):
    """Columns by index, the same for all rows."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        x, idx = (v.type for v in node.operands)
        numbers = product(x.shape[:-1]), x.shape[-1], idx.numel
        return f"take_columns(ctx, {indexed_pointers(node)}, {', '.join(map(sizes, numbers))});"


class Iota(CppKernel):
    """The integers 0, 1, 2, ..."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_store.h")

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        n = sizes(node.result.type.shape[0])
        split = f"int64_t lo, hi;\nllmc_split(ctx, {n}, 64, &lo, &hi);"
        return f"{pointers(node)}\n{split}\nfor (int64_t i = lo; i < hi; i++) put(y0 + i, i);"


COPY = Copy("cpu/copy", ("reshape",))
TRANSPOSE = Strided("cpu/transpose", ("transpose",))
SLICE = Strided("cpu/slice", ("slice",))
CONCAT = Concat("cpu/concat", ("concat",))
TAKE = Take("cpu/take", ("take", "take_part"))
PAGE_TAKE = PageTake("cpu/page_take", ("page_take",))
PAGE_PUT = PagePut("cpu/page_put", ("page_put",))
PACKED_TAKE = PackedTake("cpu/packed_take", ("packed_take", "packed_take_part"))
GATHER = Gather("cpu/gather", ("gather",))
TAKE_COLUMNS = TakeColumns("cpu/take_columns", ("take_columns",))
IOTA = Iota("cpu/iota", ("iota",))
