"""Kernels over device rows in Triton: flat tokens, ids, slots and the commit.

The kernels are in `kernels/row_state.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.tiling import power
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target

LANES = 128
TOKENS = 32  # tokens per program of row_spans and row_begin
ENTRIES = 256  # entries that such a program reads at once
LATENCY_US = 0.6  # microseconds of a load whose address depends on another load


class Integers(TritonKernel):
    """Base class: kernels over 32-bit integers, whose time hardly depends on the sizes of a step."""

    sums = EXACT
    chain = 2  # number of loads that depend on each other

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, ("i32",))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return target.launch_us + self.chain * LATENCY_US


class Spans(Integers):
    """row_spans: the flat token axis. Every program sums the counts of all entries, so that one launch suffices."""

    function = "row_spans"

    def code(self, u: Unit) -> Code:
        entries, tokens = u.node.operands[0].type.shape[0], u.node.results[1].type.shape[0]
        count = entries.const
        return u.launch(
            Template("row_state", self.function),
            (tokens.ceildiv(TOKENS),),
            **u.pointers("rows_ptr counts_ptr length_ptr", "starts_ptr token_row_ptr positions_ptr"),
            entry_count=u.sizes(entries),
            token_count=u.sizes(tokens),
            **self.lookups(u),
            TOKENS_PER_PROGRAM=TOKENS,
            ENTRIES_PER_STEP=ENTRIES if count is None else min(ENTRIES, max(16, power(count))),
        )

    def lookups(self, u: Unit) -> dict[str, Argument]:
        """Return the arguments of further lookups (see `Begin`)."""
        return {}


class Begin(Spans):
    """row_begin: the flat token axis, and each token's id and slot."""

    chain = 3
    function = "row_begin"

    def lookups(self, u: Unit) -> dict[str, Argument]:
        history, table = (u.node.operands[i].type.shape[1] for i in (3, 4))
        return {
            "token_ids_ptr": "x3", "page_table_ptr": "x4", "ids_ptr": "y3", "slots_ptr": "y4",
            "max_length": u.sizes(history), "table_width": u.sizes(table), "PAGE": u.node.attrs["page"],
        }  # fmt: skip


class OfToken(Integers):
    """row_ids and row_slots, one thread per token."""

    def code(self, u: Unit) -> Code:
        tokens, width = u.node.result.type.shape[0], u.sizes(u.node.operands[0].type.shape[1])
        table: dict[str, Argument] = {"token_ids_ptr": "x0", "max_length": width}
        if u.node.op.name == "row_slots":
            table = {"page_table_ptr": "x0", "table_width": width, "PAGE": u.node.attrs["page"]}
        return u.launch(
            Template("row_state", u.node.op.name),
            (tokens.ceildiv(LANES),),
            **u.pointers("- token_row_ptr positions_ptr", "out_ptr"),
            token_count=u.sizes(tokens),
            **table,
            LANES=LANES,
        )


class Last(Integers):
    """row_last, one thread per entry."""

    chain = 1
    text: tuple[str, str] = ("row_state", "row_last")

    def code(self, u: Unit) -> Code:
        entries = u.node.result.type.shape[0]
        return u.launch(
            Template(*self.text),
            (entries.ceildiv(LANES),),
            **u.pointers("starts_ptr", "out_ptr"),
            entry_count=u.sizes(entries),
            LANES=LANES,
        )


class Commit(Integers):
    """row_commit, one thread per entry; only the last entry of a row writes."""

    def code(self, u: Unit) -> Code:
        history, _, counts, rows = (v.type.shape for v in u.node.operands[:4])
        return u.launch(
            Template("row_state", "row_commit"),
            (rows[0].ceildiv(LANES),),
            **u.pointers(
                "- - - rows_ptr starts_ptr positions_ptr emit_ptr sampled_ptr", "token_ids_ptr length_ptr counts_ptr"
            ),
            entry_count=u.sizes(rows[0]),
            max_length=u.sizes(history[1]),
            vocab=u.sizes(counts[1]),
            LANES=LANES,
        )


SPANS = Spans("triton/row_spans", ("row_spans",), "triton")
BEGIN = Begin("triton/row_begin", ("row_begin",), "triton")
OF_TOKEN = OfToken("triton/row_tokens", ("row_ids", "row_slots"), "triton")
LAST = Last("triton/row_last", ("row_last",), "triton")
COMMIT = Commit("triton/row_commit", ("row_commit",), "triton")
