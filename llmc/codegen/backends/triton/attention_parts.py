"""Decode attention of deterministic targets in parts of a fixed number of keys, and the combination of the parts.

The kernels are in `kernels/attention_parts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmc.codegen.backends.triton.decode_attention import CONTEXT, AttentionCombine, AttentionProblem, paged_attention
from llmc.codegen.backends.triton.prefill_attention import FAR, PREFILL_ATTENTION, PrefillAttention, blocks_us
from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.triton_kernel import Code, Unit
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target

STEP_US = 0.05  # time of combining one part with the others


class AttentionParts(PrefillAttention):
    """One part of one token and key head per program, with the tiles of PREFILL_ATTENTION and its order of sums."""

    def reject(self, node: Node, target: Target) -> str | None:
        if why := super().reject(node, target):
            return why
        return None if self.schedules(node, target) else f"no tile of keys divides a part of {node.attrs['part']} keys"

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        return PREFILL_ATTENTION.reduction_order(node, schedule, target)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """Return the schedules whose tiles of keys divide a part: a tile is not masked at the end of a part."""
        return [s for s in super().schedules(node, target) if node.attrs["part"] % s["keys"] == 0]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, part = AttentionProblem.of(node), node.attrs["part"]
        tokens = node.operands[0].type.shape[0].subs(env).const or 1
        seen = min(CONTEXT, p.window or FAR)
        blocks = tokens * p.kv_heads * math.ceil(seen / part)
        return blocks_us(node, schedule, target, blocks, min(part, seen)) + target.launch_us

    def code(self, u: Unit) -> Code:
        n, p = u.node, AttentionProblem.of(u.node)
        return u.launch(
            Template("attention_parts", "attention_parts"),
            (n.operands[0].type.shape[0], p.kv_heads, n.attrs["splits"]),
            attention=paged_attention(u),
            partial_ptr="y0",
            lse_ptr="y1",
            PART=n.attrs["part"],
            PARTS=n.attrs["splits"],
            QUERY_ROWS=u.schedule["rows"],
            KEYS_PER_TILE=u.schedule["keys"],
        )


class JoinParts(AttentionCombine):
    """Adds the parts of a token and head one after another, in the order in which PREFILL_ATTENTION adds them."""

    constant_reduction_order = EXACT
    template = Template("attention_parts", "join_parts")

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"warps": 1}]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: those of adding all parts at once, and a step for each part."""
        return super().cost_us(node, schedule, target, env) + STEP_US * int(node.operands[0].type.shape[2])

    def part_arguments(self, u: Unit, parts: int) -> dict[str, Argument]:
        return {"PARTS": parts}


ATTENTION_PARTS = AttentionParts("triton/attention_parts", ("paged_attention_parts",))
JOIN_PARTS = JoinParts("triton/join_parts", ("attention_combine",))
