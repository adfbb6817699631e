"""Attention of chunks of prompts and of single tokens in one launch. The kernel is in `kernels/mixed_attention.py`."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.decode_attention import AttentionProblem, paged_attention, reject_unskipped
from llmc.codegen.backends.triton.prefill_attention import PREFILL_ATTENTION, WARP_ROWS, shared, tiles
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.passes.split.split_single import in_one_launch
from llmc.targets.target import PDL, Target

LARGE_ROWS, SINGLE_KEYS = 64, 64


class MixedAttention(TritonKernel):
    """Paged attention in which a row of one token has a program with few queries, and longer rows have tiles."""

    def reject(self, node: Node, target: Target) -> str | None:
        return reject_unskipped(node, target)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = AttentionProblem.of(node)
        wide, min_rows = p.dot_dtype == "tl.float32", next_power_of_2(p.group)
        schedules = tiles(p.padded_dim, max(2, p.item), wide, min_rows, target)
        # Programs of 4 warps and tiles of 32 keys use 168 registers, so that three of them share a multiprocessor.
        small = [s for s in schedules if s["warps"] <= 4 and s["keys"] <= 32]
        return [{**s, "keys": max(s["keys"], p.min_keys), "single": self._single_keys(p, s, target)} for s in small]

    def _single_keys(self, p: AttentionProblem, tile: Schedule, target: Target) -> int:
        """Return the keys of the tiles of a single token: SINGLE_KEYS where a large tile of a prompt fits."""
        if tile["rows"] < LARGE_ROWS:
            return max(tile["keys"], p.min_keys)
        nbytes = shared(WARP_ROWS, SINGLE_KEYS, tile["stages"], p.padded_dim, max(2, p.item), target)
        return SINGLE_KEYS if nbytes <= target.limits.shared else max(tile["keys"], p.min_keys)

    def leads(self, node: Node, target: Target, env: Mapping[str, int]) -> bool:
        """Whether `split-single` does not apply to the node. `bench.gpu.pairs` compares it with two launches."""
        tokens = node.operands[0].type.shape[0].subs(env).const or 0
        return target.has(PDL) and not target.deterministic and in_one_launch(node, tokens)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the time of prefill attention with the same tiles."""
        return PREFILL_ATTENTION.cost_us(node, schedule, target, env)

    def code(self, u: Unit) -> Code:
        n, p, s = u.node, AttentionProblem.of(u.node), u.schedule
        tokens = n.operands[0].type.shape[0]
        count = n.operands[3].type.shape[0]
        return u.launch(
            Template("mixed_attention", "mixed_attention"),
            (p.kv_heads, tokens.ceildiv(s["rows"] // p.group) + count + 1),
            attention=paged_attention(u),
            out_ptr="y0",
            token_count=u.sizes(tokens),
            QUERY_ROWS=s["rows"],
            KEYS_PER_TILE=s["keys"],
            SINGLE_ROWS=max(16, next_power_of_2(p.group)),
            SINGLE_KEYS=s["single"],
        )


MIXED_ATTENTION = MixedAttention("triton/mixed_attention", ("paged_attention",), opt_in=True)
