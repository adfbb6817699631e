"""The mean of prompts in Triton. The kernel is in `kernels/pooling.py`; the other ops of pooling are in `row_state`."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import cost_us
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit
from llmc.codegen.kernel import Schedule
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

TILE = 16  # tokens that a program adds at once
COLUMNS = 128  # columns of a program
WARPS = 4


class Mean(TritonKernel):
    """row_mean: a program adds the tokens of one entry, for a block of columns."""

    dtypes = (*FLOATS, "i32")

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        entries, columns = node.result.type.shape
        return cost_us(node, target, env, entries * columns.ceildiv(COLUMNS), WARPS)

    def code(self, u: Unit) -> Code:
        entries, columns = u.node.result.type.shape
        return u.launch(
            Template("pooling", "row_mean"),
            (entries, columns.ceildiv(COLUMNS)),
            **u.pointers("x_ptr starts_ptr", "out_ptr"),
            columns=u.sizes(columns),
            TOKENS_PER_TILE=TILE,
            COLUMNS_PER_PROGRAM=COLUMNS,
        )


ROW_MEAN = Mean("triton/row_mean", ("row_mean",), "triton")
