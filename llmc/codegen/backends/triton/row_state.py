"""Kernels over device rows in Triton: a step's flat tokens, ids and slots, the commit, drafts, and pooled prompts.

They bind the templates in `kernels/row_state.py`, `kernels/row_draft.py` and `kernels/pooling.py` to the ops of the
same names. A row is the state of one sequence; an entry of a step has a row, or -1 for padding, and some tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import cost_us, next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import Dim
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

LANES = 128  # threads of a program, each of which has one entry or token
TOKENS = 32  # tokens of a program that searches all entries for them
ENTRIES = 256  # entries that such a program reads at once
BLOCK = 1024  # tokens of a history that are searched at once
DRAFT_LANES = 32  # drafts that are written at once
MEAN_TOKENS = 16  # tokens that a program of row_mean adds at once
MEAN_COLUMNS, MEAN_WARPS = 128, 4  # columns and warps of such a program
LATENCY_US = 0.6  # microseconds of a load whose address depends on another load


@dataclass(frozen=True)
class RowKernel(TritonKernel):
    """A kernel over 32-bit integers, whose time hardly depends on the sizes of a step.

    module: of the template; its function has the op's name. operands, results: the template's pointers (see
    `Unit.pointers`). items: how many items the programs divide, as a size in terms of the op's signature, such as "r".
    per_program: items of a program. arguments: other template parameters, as numbers or sizes of the signature. chain:
    number of loads that depend on each other. searches: whether a program reads all entries, ENTRIES_PER_STEP at once.
    """

    constant_reduction_order: ClassVar[str | None] = EXACT
    dtypes: ClassVar[tuple[str, ...]] = ("i32",)
    module: str = "row_state"
    operands: str = ""
    results: str = "out_ptr"
    items: str = "r"
    per_program: int = LANES
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    chain: int = 2
    searches: bool = False

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return target.launch_us + self.chain * LATENCY_US

    def code(self, u: Unit) -> Code:
        known = u.node.op.sizes([v.type for v in u.node.operands], u.node.attrs)
        sizes = {name: Dim.of(size).subs(known) for name, size in self.arguments.items()}
        if self.searches:
            entries = sizes["entry_count"].const
            step = ENTRIES if entries is None else min(ENTRIES, max(16, next_power_of_2(entries)))
            sizes["ENTRIES_PER_STEP"] = Dim.of(step)
        return u.launch(
            Template(self.module, u.node.op.name),
            (Dim.of(self.items).subs(known).ceildiv(self.per_program),),
            **u.pointers(self.operands, self.results),
            **{name: u.sizes(size) for name, size in sizes.items()},
        )


class Mean(TritonKernel):
    """row_mean: a program adds the tokens of one entry, for a block of columns."""

    dtypes = (*FLOATS, "i32")

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        entries, columns = node.result.type.shape
        return cost_us(node, target, env, entries * columns.ceildiv(MEAN_COLUMNS), MEAN_WARPS)

    def code(self, u: Unit) -> Code:
        entries, columns = u.node.result.type.shape
        return u.launch(
            Template("pooling", "row_mean"),
            (entries, columns.ceildiv(MEAN_COLUMNS)),
            **u.pointers("x_ptr starts_ptr", "out_ptr"),
            columns=u.sizes(columns),
            TOKENS_PER_TILE=MEAN_TOKENS,
            COLUMNS_PER_PROGRAM=MEAN_COLUMNS,
        )


ROW_SPANS = RowKernel(
    "triton/row_spans", ("row_spans",), operands="rows_ptr counts_ptr length_ptr",
    results="starts_ptr token_row_ptr positions_ptr", items="tokens", per_program=TOKENS, searches=True,
    arguments={"entry_count": "r", "token_count": "tokens", "TOKENS_PER_PROGRAM": TOKENS},
)  # fmt: skip
ROW_BEGIN = RowKernel(
    "triton/row_begin", ("row_begin",), operands="rows_ptr counts_ptr length_ptr token_ids_ptr page_table_ptr",
    results="starts_ptr token_row_ptr positions_ptr ids_ptr slots_ptr", items="tokens", per_program=TOKENS,
    searches=True, chain=3,
    arguments={
        "entry_count": "r", "token_count": "tokens", "max_length": "l", "table_width": "p", "PAGE": "page",
        "TOKENS_PER_PROGRAM": TOKENS,
    },
)  # fmt: skip
ROW_LAST = RowKernel(
    "triton/row_last", ("row_last",), operands="starts_ptr", items="r-1", chain=1,
    arguments={"entry_count": "r-1", "LANES": LANES},
)  # fmt: skip
ROW_COMMIT = RowKernel(
    "triton/row_commit", ("row_commit",),
    operands="- - - rows_ptr starts_ptr positions_ptr emit_ptr sampled_ptr",
    results="token_ids_ptr length_ptr counts_ptr",
    arguments={"entry_count": "r", "max_length": "l", "vocab": "v", "LANES": LANES},
)  # fmt: skip
ROW_ACCEPT = RowKernel(
    "triton/row_accept", ("row_accept",), module="row_draft", chain=4,
    operands="- - - rows_ptr starts_ptr positions_ptr emit_ptr sampled_ptr",
    results="taken_ptr token_ids_ptr length_ptr counts_ptr",
    arguments={"entry_count": "r", "max_length": "l", "vocab": "v", "LIMIT": "limit", "LANES": LANES},
)  # fmt: skip
ROW_PROPOSE = RowKernel(
    "triton/row_propose", ("row_propose",), module="row_draft", chain=4, per_program=1,
    operands="- - length_ptr rows_ptr starts_ptr emit_ptr", results="proposed_ptr token_ids_ptr drafts_ptr",
    arguments={"entry_count": "r", "max_length": "l", "BLOCK": BLOCK, "LANES": DRAFT_LANES},
)  # fmt: skip
ROW_REWIND = RowKernel(
    "triton/row_rewind", ("row_rewind",), module="row_draft", operands="- length_ptr rows_ptr", results="reach_ptr",
    arguments={"entry_count": "r", "LANES": LANES},
)  # fmt: skip
ROW_EXTEND = RowKernel(
    "triton/row_extend", ("row_extend",), module="row_draft",
    operands="- - rows_ptr starts_ptr positions_ptr emit_ptr sampled_ptr", results="token_ids_ptr reach_ptr",
    arguments={"entry_count": "r", "max_length": "l", "LANES": LANES},
)  # fmt: skip
ROW_FIRST = RowKernel(
    "triton/row_first", ("row_first",), module="pooling", operands="starts_ptr", items="r-1", chain=1,
    arguments={"entry_count": "r-1", "LANES": LANES},
)  # fmt: skip
ROW_REACH = RowKernel(
    "triton/row_reach", ("row_reach",), module="pooling", operands="starts_ptr positions_ptr", items="t",
    per_program=TOKENS, searches=True,
    arguments={"entry_count": "r-1", "token_count": "t", "TOKENS_PER_PROGRAM": TOKENS},
)  # fmt: skip
ROW_ADVANCE = RowKernel(
    "triton/row_advance", ("row_advance",), module="pooling", operands="- rows_ptr starts_ptr positions_ptr",
    results="length_ptr", arguments={"entry_count": "r", "LANES": LANES},
)  # fmt: skip
ROW_IDS = RowKernel(
    "triton/row_ids", ("row_ids",), operands="token_ids_ptr token_row_ptr positions_ptr", items="t",
    arguments={"max_length": "l", "token_count": "t", "LANES": LANES},
)  # fmt: skip
ROW_SLOTS = RowKernel(
    "triton/row_slots", ("row_slots",), operands="page_table_ptr token_row_ptr positions_ptr", items="t",
    arguments={"table_width": "l", "token_count": "t", "PAGE": "page", "LANES": LANES},
)  # fmt: skip
ROW_MEAN = Mean("triton/row_mean", ("row_mean",), "triton")
