"""Collectives between ranks over shared memory; the algorithm is in kernels/llmc_group.h."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import CppKernel, pointers
from llmc.codegen.backends.cpp.shape import item
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import product
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target


class Collective(CppKernel):
    """A collective of two or more ranks."""

    headers = ("llmc_abi.h", "llmc_collective.h")

    def reject(self, node: Node, target: Target) -> str | None:
        return "the group has one rank" if node.attrs["ranks"] < 2 else super().reject(node, target)


class AllReduce(Collective):
    """The sum over the ranks, in their order."""

    constant_reduction_order = "by rank"
    dtypes = FLOATS

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        return f"{pointers(node)}\nall_reduce(ctx, y0, x0, {sizes(node.result.type.numel)});"


class AllGather(Collective):
    """The operands of all ranks, concatenated along an axis."""

    constant_reduction_order = EXACT

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        shape = node.operands[0].type.shape
        axis = node.attrs["axis"] % len(shape)
        rows = sizes(product(shape[:axis]))
        width = sizes(product(shape[axis:]) * item(node))
        return f"all_gather(ctx, (char*)args[1], (const char*)args[0], {rows}, {width});"


ALL_REDUCE = AllReduce("cpu/all_reduce", ("all_reduce",))
ALL_GATHER = AllGather("cpu/all_gather", ("all_gather",))
