"""Pooling of prompts in Triton. The kernels are in `kernels/pooling.py`."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.row_state import ENTRIES, LANES, TOKENS, Integers, Last
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import cost_us, power
from llmc.codegen.backends.triton.triton_kernel import FLOATS, Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target

TILE = 16  # tokens that a program of row_mean adds at once
COLUMNS = 128  # columns of such a program
WARPS = 4


class First(Last):
    """row_first, one thread per entry."""

    text = ("pooling", "row_first")


class Reach(Integers):
    """row_reach: every program compares its tokens with all entries."""

    def code(self, u: Unit) -> Code:
        starts, positions = (v.type.shape[0] for v in u.node.operands)
        entries = starts - 1
        return u.launch(
            Template("pooling", "row_reach"),
            (positions.ceildiv(TOKENS),),
            **u.pointers("starts_ptr positions_ptr", "out_ptr"),
            entry_count=u.sizes(entries),
            token_count=u.sizes(positions),
            TOKENS_PER_PROGRAM=TOKENS,
            ENTRIES_PER_STEP=ENTRIES if entries.const is None else min(ENTRIES, max(16, power(entries.const))),
        )


class Mean(TritonKernel):
    """row_mean: a program adds the tokens of one entry, for a block of columns."""

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, (*FLOATS, "i32"))

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


class Advance(Integers):
    """row_advance, one thread per entry."""

    def code(self, u: Unit) -> Code:
        entries = u.node.operands[1].type.shape[0]
        return u.launch(
            Template("pooling", "row_advance"),
            (entries.ceildiv(LANES),),
            **u.pointers("- rows_ptr starts_ptr positions_ptr", "length_ptr"),
            entry_count=u.sizes(entries),
            LANES=LANES,
        )


FIRST = First("triton/row_first", ("row_first",), "triton")
REACH = Reach("triton/row_reach", ("row_reach",), "triton")
MEAN = Mean("triton/row_mean", ("row_mean",), "triton")
ADVANCE = Advance("triton/row_advance", ("row_advance",), "triton")
