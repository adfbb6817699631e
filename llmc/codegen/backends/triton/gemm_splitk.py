"""Split-k products: partial products over parts of the depth on tensor cores, and their sum with the epilogue."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from llmc.codegen.backends.triton.gemm_small import Gemm
from llmc.codegen.backends.triton.linear_problem import Product, epilogue, output
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim, product
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

MAX_BLOCK = 1024  # preferred maximum of columns per program
_WARPS = 4


class PartialSums(Product):
    """The epilogue of linear_combine, whose accumulator is the sum of the partial products."""

    @cached_property
    def n(self) -> int:
        """The number of columns."""
        return int(self.x.shape[-1])

    @property
    def m(self) -> Dim:
        """The number of tokens: the product of the leading axes of the result."""
        return product(self.out.shape[:-1])

    @property
    def first_extra(self) -> int:
        """The index of the first epilogue operand."""
        return 1

    @property
    def dot(self) -> str:
        """The dtype of the partial products."""
        return "f32"


class SplitKCombine(TritonKernel):
    """linear_combine: a program computes one block of columns of one token."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, FLOATS):
            return why
        splits, columns = (node.operands[0].type.shape[i].const for i in (0, -1))
        return "the number of parts or columns is not constant" if splits is None or columns is None else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"block": b, "warps": w} for b, w in self._shapes(node)]

    def _shapes(self, node: Node) -> Iterator[tuple[int, int]]:
        wide = 1 << (PartialSums(node).n - 1).bit_length()
        for block in (MAX_BLOCK, MAX_BLOCK // 2, 2 * MAX_BLOCK):
            yield max(16, min(block, wide)), _WARPS

    def code(self, u: Unit) -> Code:
        p, block = PartialSums(u.node), u.schedule["block"]
        return u.launch(
            Template("splitk_combine", "splitk_combine"),
            (p.m, D(-(-p.n // block))),
            u.schedule["warps"],
            0,
            (epilogue(u, p),),
            **u.pointers("partial_ptr", ""),
            output=output(u, p, 1),
            SPLITS=int(u.node.operands[0].type.shape[0]),
            BLOCK=block,
        )


GEMM_SPLITK = Gemm("triton/gemm_splitk", ("linear_split",))
SPLITK_COMBINE = SplitKCombine("triton/splitk_combine", ("linear_combine",))
