"""Kernels of recurrent layers on device rows: each instantiates a C++ template in llmc_recurrent.h."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import CppKernel, ctype, pointers, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node, Value
from llmc.targets.target import Target

MAX_WIDTH = 16  # maximum width of a convolution, whose window is kept in registers
VECTOR_COLUMNS = 4  # columns of a state that a thread updates together, in vectors


class _Recurrent(CppKernel):
    """Base class of the kernels of recurrent layers."""

    headers = ("llmc_recurrent.h",)
    constant_reduction_order = "one token after another"

    def named(self, node: Node) -> dict[str, tuple[str, Value]]:
        """Return the pointer and the value of each operand that the node has, by its name."""
        slots = node.op.slots([v.type for v in node.operands])
        return {s.name: (f"x{i}", v) for i, (s, v) in enumerate(zip(slots, node.operands, strict=False))}

    def reject(self, node: Node, target: Target) -> str | None:
        if reason := unsupported(node, (*FLOATS, "i32")):
            return reason
        known = node.op.sizes([v.type for v in node.operands], node.attrs)
        changing = [k for k, d in known.items() if d.const is None and k not in "mrt"]
        return f"the size {changing[0]} must be constant" if changing else None

    @staticmethod
    def step(of: dict[str, tuple[str, Value]], sizes: Sizes) -> str:
        """Return the C++ struct of the step."""
        rows, positions = of["rows"][1].type, of["positions"][1].type
        pointers = ", ".join(of[name][0] for name in ("rows", "starts", "positions"))
        return f"const step_rows step = {{{pointers}, {sizes(rows.shape[0])}, {sizes(positions.shape[0])}}};"


class RowConv(_Recurrent):
    """Convolution along a sequence; threads divide the channels."""

    def reject(self, node: Node, target: Target) -> str | None:
        if reason := super().reject(node, target):
            return reason
        width = node.operands[1].type.shape[1].const or 0
        return f"the width of the convolution, {width}, is above {MAX_WIDTH}" if width > MAX_WIDTH else None

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        of = self.named(node)
        (c, w), n = of["weight"][1].type.shape, of["recent"][1].type.shape[1]
        bias = of["bias"][0] if "bias" in of else f"(const {ctype(of['x'][1].type)}*)nullptr"
        step = self.step(of, sizes)
        return f"{pointers(node)}\n{step}\nrow_conv<{w}>(ctx, y0, y1, x0, x1, {bias}, step, {c}, {n});"


class RowRecurrence(_Recurrent):
    """Linear recurrence; threads divide the heads and the columns of their states."""

    def reject(self, node: Node, target: Target) -> str | None:
        if reason := super().reject(node, target):
            return reason
        (_, h, d, _), factors = node.operands[4].type.shape, node.operands[3].type.shape[1]
        return None if factors in (h, h * d) else f"{factors} decays of {h} heads with {d} channels"

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        if "log" not in self.named(node):
            return D(0)
        d = self.named(node)["memory"][1].type.shape[2]
        return d * (VECTOR_COLUMNS * target.vector)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        of = self.named(node)
        (_, h, d, e), factors = of["memory"][1].type.shape, of["decay"][1].type.shape[1]
        g = of["k"][1].type.shape[1]
        n = of["log"][1].type.shape[1] if "log" in of else 0
        names = ("q", "k", "v", "decay", "beta", "base", "log")
        operands = ", ".join(of[name][0] if name in of else "nullptr" for name in names)
        vectors = min(VECTOR_COLUMNS, -(-(e.const or 1) // (target.vector // 4)))
        return (
            f"{pointers(node)}\n{self.step(of, sizes)}\n"
            f"const recurrence_args<{ctype(of['q'][1].type)}> a = {{y0, y1, {operands}, step}};\n"
            f"recurrence<{g}, {h}, {d}, {e}, {n}, {int(factors) // int(h)}, {vectors}>(ctx, a);"
        )


class RowLog(_Recurrent):
    """The log of a recurrence's last tokens; threads divide its columns."""

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        of = self.named(node)
        (_, g, d), (_, h, e) = of["k"][1].type.shape, of["v"][1].type.shape
        beta = of["beta"][0] if "beta" in of else "(const float*)nullptr"
        n, step = of["log"][1].type.shape[1], self.step(of, sizes)
        numbers = f"{g * d}, {h * e}, {of['decay'][1].type.shape[1]}, {h}, {n}"
        return f"{pointers(node)}\n{step}\nrow_log(ctx, y0, y1, x0, x1, x2, {beta}, step, {numbers});"


ROW_CONV = RowConv("cpu/row_conv", ("row_conv",))
ROW_RECURRENCE = RowRecurrence("cpu/row_recurrence", ("row_recurrence", "row_recurrence_draft"))
ROW_LOG = RowLog("cpu/row_log", ("row_log",))
