"""Linear recurrences in Triton whose states decay at a rate of each channel of a key (`kernels/row_channels.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.recurrent import LARGEST_STATE, TOKEN_US
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import cost_us, next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import FLOATS, Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target

BLOCKS = (32, 16)  # columns of the state of a program, if values have so many


class RowChannels(TritonKernel):
    """row_recurrence and row_recurrence_draft: a program has one run, one head and a block of the state's columns."""

    def reject(self, node: Node, target: Target) -> str | None:
        k, v, decay = (node.operands[i].type.shape for i in (1, 2, 3))
        if decay[1] != v[1] * k[2]:
            return "a decay for each head"
        if next_power_of_2(int(k[2])) * min(BLOCKS) > LARGEST_STATE:
            return f"keys of {k[2]} elements"
        return unsupported(node, (*FLOATS, "i32"), target)

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        return f"{self.name} {schedule['block']} columns, {schedule['warps']} warps"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        keys, width = (next_power_of_2(int(node.operands[i].type.shape[2])) for i in (1, 2))
        blocks = dict.fromkeys(min(width, b) for b in BLOCKS)
        return [{"block": b, "warps": 4 if keys * b >= 512 else 1} for b in blocks]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the traffic of all heads, and the latency of the longest run: all tokens but one for each entry."""
        q, _, v = (node.operands[i].type.shape for i in range(3))
        entries = node.operand("rows").type.shape[0]  # type: ignore[union-attr]
        programs = entries * v[1] * v[2].ceildiv(schedule["block"])
        tokens, rows = (d.subs(env).const or 1 for d in (q[0], entries))
        return max(1, tokens - rows + 1) * TOKEN_US + cost_us(node, target, env, programs, schedule["warps"])

    def code(self, u: Unit) -> Code:
        q, k, v = (u.node.operands[i].type.shape for i in range(3))
        entries, log = u.node.operand("rows"), u.node.operand("log")
        assert entries is not None
        names = "q_ptr k_ptr v_ptr decay_ptr -", "rows_ptr starts_ptr positions_ptr beta_ptr"
        pointers = u.pointers(f"{names[0]} {'base_ptr log_ptr ' if log else ''}{names[1]}", "out_ptr memory_ptr")
        return u.launch(
            Template("row_channels", "row_channels"),
            ((entries.type.shape[0] + 1) * v[1], v[2].ceildiv(u.schedule["block"])),
            **{"base_ptr": None, "log_ptr": None, **pointers},
            row_count=u.sizes(entries.type.shape[0]),
            token_count=u.sizes(q[0]),
            KEY_HEADS=int(k[1]),
            VALUE_HEADS=int(v[1]),
            KEY_DIM=int(k[2]),
            VALUE_DIM=int(v[2]),
            KEY_PADDED=next_power_of_2(int(k[2])),
            VALUE_BLOCK=u.schedule["block"],
            LOG_TOKENS=int(log.type.shape[1]) if log else 0,
        )


ROW_CHANNELS = RowChannels("triton/row_channels", ("row_recurrence", "row_recurrence_draft"))
