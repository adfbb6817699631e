"""Kernels of speculative decoding in Triton: accepting drafted tokens, and drafting.

The kernels are in `kernels/row_draft.py`.
"""

from __future__ import annotations

from llmc.codegen.backends.triton.row_state import LANES, Integers
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.triton_kernel import Code, Unit

BLOCK = 1024  # tokens of a history that are searched at once
DRAFT_LANES = 32  # drafts that are written at once


class Accept(Integers):
    """row_accept, one thread per entry; the thread of a row's first entry that emits writes."""

    chain = 4

    def code(self, u: Unit) -> Code:
        history, _, counts, rows = (v.type.shape for v in u.node.operands[:4])
        return u.launch(
            Template("row_draft", "row_accept"),
            (rows[0].ceildiv(LANES),),
            **u.pointers(
                "- - - rows_ptr starts_ptr positions_ptr emit_ptr sampled_ptr",
                "taken_ptr token_ids_ptr length_ptr counts_ptr",
            ),
            entry_count=u.sizes(rows[0]),
            max_length=u.sizes(history[1]),
            vocab=u.sizes(counts[1]),
            LIMIT=u.node.attrs["limit"],
            LANES=LANES,
        )


class Propose(Integers):
    """row_propose, one program per entry."""

    chain = 4

    def code(self, u: Unit) -> Code:
        history, _, _, rows = (v.type.shape for v in u.node.operands[:4])
        return u.launch(
            Template("row_draft", "row_propose"),
            (rows[0],),
            **u.pointers("- - length_ptr rows_ptr starts_ptr emit_ptr", "proposed_ptr token_ids_ptr drafts_ptr"),
            entry_count=u.sizes(rows[0]),
            max_length=u.sizes(history[1]),
            BLOCK=BLOCK,
            LANES=DRAFT_LANES,
        )


class Rewind(Integers):
    """row_rewind, one thread per entry."""

    def code(self, u: Unit) -> Code:
        entries = u.node.operands[2].type.shape[0]
        return u.launch(
            Template("row_draft", "row_rewind"),
            (entries.ceildiv(LANES),),
            **u.pointers("- length_ptr rows_ptr", "reach_ptr"),
            entry_count=u.sizes(entries),
            LANES=LANES,
        )


class Extend(Integers):
    """row_extend, one thread per entry; only the last entry of a row writes."""

    def code(self, u: Unit) -> Code:
        history, _, rows = (v.type.shape for v in u.node.operands[:3])
        return u.launch(
            Template("row_draft", "row_extend"),
            (rows[0].ceildiv(LANES),),
            **u.pointers("- - rows_ptr starts_ptr positions_ptr emit_ptr sampled_ptr", "token_ids_ptr reach_ptr"),
            entry_count=u.sizes(rows[0]),
            max_length=u.sizes(history[1]),
            LANES=LANES,
        )


ACCEPT = Accept("triton/row_accept", ("row_accept",), "triton")
PROPOSE = Propose("triton/row_propose", ("row_propose",), "triton")
REWIND = Rewind("triton/row_rewind", ("row_rewind",), "triton")
EXTEND = Extend("triton/row_extend", ("row_extend",), "triton")
