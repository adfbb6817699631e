"""Pooling on the CPU: instantiates the C++ templates in llmc_pooling.h."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import FLOATS, CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target


class Pooling(CppKernel):
    """First tokens, last positions, means and new lengths."""

    headers = ("llmc_abi.h", "llmc_pooling.h")

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, (*FLOATS, "i32"))

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        shapes = [[sizes(d) for d in v.type.shape] for v in node.operands]
        entries = sizes(node.result.type.shape[0])
        match node.op.name:
            case "row_first":
                arguments = f"y0, x0, {entries}"
            case "row_reach":
                arguments = f"y0, x0, x1, {shapes[0][0]} - 1, {shapes[1][0]}"
            case "row_mean":
                arguments = f"y0, x0, x1, {entries}, {shapes[0][1]}"
            case _:
                arguments = f"y0, x1, x2, x3, {shapes[1][0]}"
        return f"{pointers(node)}\n{node.op.name}(ctx, {arguments});"


POOLING = Pooling("cpu/pooling", ("row_first", "row_reach", "row_mean", "row_advance"))
