"""Attention of rows with one token in a batch whose longer rows are computed by another kernel.

The kernel is in `kernels/single_token_attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.decode_attention import (
    AttentionProblem,
    DecodeAttention,
    paged_attention,
    reject_attention,
)
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.triton_kernel import Code, Unit
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target


class SingleTokenAttention(DecodeAttention):
    """Writes the outputs of rows of one token to y, which contains the outputs of the other rows.

    If the result does not share memory with y, those are copied.
    """

    def reject(self, node: Node, target: Target) -> str | None:
        return reject_attention(node, target)

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        """Return all inputs but the outputs of the longer rows and the sinks."""
        scales = node.operand("scales")
        return (0, 1, 2, 3, 4, 5, *(i for i, v in enumerate(node.operands) if v is scales))

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((6, 0),)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the time of decode attention with one token per row."""
        rows = node.operands[3].type.shape[0].subs(env).const or 1
        tokens = node.operands[0].type.shape[0]
        return super().cost_us(node, schedule, target, {**env, **({str(tokens): rows} if tokens.const is None else {})})

    def code(self, u: Unit) -> Code:
        n, p = u.node, AttentionProblem.of(u.node)
        return u.launch(
            Template("single_token_attention", "single_token_attention"),
            (n.operands[3].type.shape[0], p.kv_heads),
            attention=paged_attention(u),
            longer_ptr=u.pointer("y"),
            out_ptr="y0",
            token_count=u.sizes(n.operands[0].type.shape[0]),
            QUERY_ROWS=self.rows(p),
            KEYS_PER_TILE=u.schedule["keys"],
            INPUTS_SETTLED=u.reads_before_wait,
        )


SINGLE_TOKEN_ATTENTION = SingleTokenAttention("triton/single_token_attention", ("paged_attention_single",))
