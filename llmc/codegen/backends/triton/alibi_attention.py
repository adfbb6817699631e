"""Attention with a bias by distance (ALiBi) in Triton: over KV pages, and over packed prompts.

The kernels are in `kernels/alibi_attention.py`.
"""

from __future__ import annotations

from llmc.codegen.backends.triton.decode_attention import AttentionProblem
from llmc.codegen.backends.triton.prefill_attention import PackedAttention, PrefillAttention
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.triton_kernel import Code, Unit
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target


def few_warps(schedules: list[Schedule], target: Target) -> list[Schedule]:
    """Return the schedules without those that spill registers: on AMD GPUs, with biases, tiles of 8 warps do."""
    return [s for s in schedules if target.family != "hip" or s["warps"] < 8]


class AlibiAttention(PrefillAttention):
    """Paged attention of any mixture of rows and tokens; a tile belongs to one row."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return few_warps(super().schedules(node, target), target)

    def code(self, u: Unit) -> Code:
        n, p, s = u.node, AttentionProblem.of(u.node), u.schedule
        tokens, count = n.operands[0].type.shape[0], n.operands[3].type.shape[0]
        constants = {name: x for name, x in p.constants().items() if name not in ("WINDOW", "SOFTCAP")}
        return u.launch(
            Template("alibi_attention", "paged_alibi"),
            (tokens.ceildiv(s["rows"] // p.group_size) + count + 1, p.kv_heads),
            **u.pointers(
                "query_ptr kv_ptr page_table_ptr rows_ptr starts_ptr positions_ptr scales_ptr slopes_ptr", "out_ptr"
            ),
            row_count=u.sizes(count),
            token_count=u.sizes(tokens),
            table_width=u.sizes(n.operands[2].type.shape[1]),
            **constants,
            QUERY_ROWS=s["rows"],
            KEYS_PER_TILE=s["keys"],
            INTERPRET=u.interpret,
        )


class PackedAlibiAttention(PackedAttention):
    """Packed prompts without pages. The kernel finds the boundaries of the sequences from the positions."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return few_warps(super().schedules(node, target), target)

    def code(self, u: Unit) -> Code:
        return self.launch(u, Template("alibi_attention", "packed_alibi"), "slopes_ptr")


ALIBI_ATTENTION = AlibiAttention("triton/alibi_attention", ("paged_alibi_attention",))
PACKED_ALIBI_ATTENTION = PackedAlibiAttention("triton/packed_alibi_attention", ("alibi_attention",))
