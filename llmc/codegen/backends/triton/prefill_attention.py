"""Attention of many tokens in Triton: chunks of prompts and single tokens mixed over KV pages, and packed prompts.

PREFILL_ATTENTION and PACKED_ATTENTION also serve the op whose logits have a bias by distance (ALiBi). ATTENTION_PARTS
and JOIN_PARTS decode for deterministic targets, with the order of sums of PREFILL_ATTENTION. The kernels are in
`kernels/prefill_attention.py`, `packed_attention.py`, `mixed_attention.py` and `attention_parts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from llmc.codegen.backends.triton.decode_attention import (
    CONTEXT,
    AttentionCombine,
    AttentionProblem,
    paged_attention,
    reject_attention,
    reject_unskipped,
)
from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.tiling import dot_order, next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, element
from llmc.codegen.kernel import BY_SCHEDULE, EXACT, Schedule
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.passes.split.split_kv import fixed_part
from llmc.passes.split.split_single import in_one_launch
from llmc.targets.target import PDL, Target

FAR = 1 << 30
WARP_ROWS = 16  # rows of a tile that a warp of a warpgroup multiplies
LARGE_ROWS, SINGLE_KEYS = 64, 64  # rows of a large tile of MIXED_ATTENTION; keys of a tile of a single token
JOIN_US = 0.05  # time of combining one part with the others
# (rows, keys, warps, stages), used if they fit; the last one always fits.
TILES = (
    (128, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 8, 3), (64, 32, 4, 3), (32, 32, 4, 2),
    (16, 16, 4, 1),
)  # fmt: skip


def biased(node: Node) -> bool:
    """Return whether logits have a bias by distance."""
    return node.operand("slopes") is not None


def without_spills(schedules: list[Schedule], node: Node, target: Target) -> list[Schedule]:
    """Return the schedules that do not spill registers: on AMD GPUs, with biases, tiles of 8 warps do."""
    return [s for s in schedules if not biased(node) or target.family != "hip" or s["warps"] < 8]


def shared(rows: int, keys: int, stages: int, width: int, item: int, target: Target) -> int:
    """Return the bytes of shared memory: queries, and keys and values in flight (for wgmma, one more stage)."""
    tiles = stages if target.has(PDL) else stages - 1
    return (rows + 2 * keys * max(1, tiles)) * width * item + 2048


def tiles(width: int, item: int, wide: bool, min_rows: int, target: Target) -> Iterator[Schedule]:
    """Yield the schedules that fit: `rows` queries per tile (at least `min_rows`) and `keys` per step.

    width: padded elements of a head. item: bytes of an element. wide: products are float32, for which only the smallest
    tile fits.
    """
    # Registers per thread; wgmma reads its second operand from shared memory.
    available = 128 if target.has(PDL) else 80
    for rows, keys, warps, stages in TILES:
        registers = rows * (width + keys) // (warps * target.limits.warp)  # per thread, for logits and sums
        fits = shared(rows, keys, stages, width, item, target) <= target.limits.shared and registers <= available
        if rows == 16 or (fits and not wide):
            yield {"rows": max(rows, min_rows), "keys": keys, "warps": warps, "stages": stages}


def blocks_us(node: Node, schedule: Schedule, target: Target, blocks: int, seen: int) -> float:
    """Predict the microseconds of waves of blocks that attend to `seen` keys.

    A step of a block costs its products at half of the peak plus a latency.
    """
    p, rows, keys = AttentionProblem.of(node), schedule["rows"], schedule["keys"]
    block_bytes = shared(rows, keys, schedule["stages"], p.padded_dim, max(2, p.item), target)
    resident = max(1, min(target.limits.shared // block_bytes, 16 // schedule["warps"]))
    peak = target.peaks.get(node.operands[0].type.dtype, target.peaks["f32"]) / target.limits.units / 2e6
    share = min(resident, blocks / target.limits.units + 1)  # blocks that share a multiprocessor
    wait = 0.3 if schedule["stages"] > 2 else 1.0
    block_us = math.ceil(seen / keys) * (wait + 4 * rows * keys * p.padded_dim / peak * share)
    return math.ceil(blocks / (target.limits.units * resident)) * (2 + block_us)


class PrefillAttention(TritonKernel):
    """Paged attention of any mixture of rows and tokens; a tile belongs to one row.

    For deterministic targets, it adds the parts of a fixed number of keys in which ATTENTION_PARTS splits decoding.
    """

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        return reject_attention(node, target)

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        """Tiles of keys begin at multiples of their size; a row is summed by one warp if warps divide only the rows."""
        rows, keys, warps = schedule["rows"], schedule["keys"], schedule["warps"]
        product = dot_order(target, AttentionProblem.of(node).dot_dtype, rows, keys, warps)
        if product.startswith("wgmma") and rows == WARP_ROWS * warps:
            return f"{self.name} {keys} keys, {product}, one warp for a row"
        return super().reduction_order(node, schedule, target)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = AttentionProblem.of(node)
        wide, min_rows = p.dot_dtype == "tl.float32", next_power_of_2(p.group)
        schedules = tiles(p.padded_dim, max(2, p.item), wide, min_rows, target)
        return without_spills([{**s, "keys": max(s["keys"], p.min_keys)} for s in schedules], node, target)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, rows = AttentionProblem.of(node), schedule["rows"]
        tokens, count = (node.operands[i].type.shape[0].subs(env).const or 1 for i in (0, 3))
        blocks = (tokens // (rows // p.group) + count) * p.kv_heads
        seen = min(max(CONTEXT, tokens // count // 2), p.window or FAR)
        return blocks_us(node, schedule, target, blocks, seen) + target.launch_us

    def code(self, u: Unit) -> Code:
        n, p, s = u.node, AttentionProblem.of(u.node), u.schedule
        tokens = n.operands[0].type.shape[0]
        count = n.operands[3].type.shape[0]
        grid = (tokens.ceildiv(s["rows"] // p.group) + count + 1, p.kv_heads)
        # Where another kernel computes rows of one token, their tiles are empty. Those of the other rows start first,
        # for all heads: programs start in the order of the first axis.
        skips_single_tokens = n.attrs.get("least", 1) > 1
        return u.launch(
            Template("prefill_attention", "paged_prefill"),
            grid[::-1] if skips_single_tokens else grid,
            attention=paged_attention(u),
            slopes_ptr=u.pointer("slopes"),
            out_ptr="y0",
            token_count=u.sizes(tokens),
            MIN_TOKENS=n.attrs.get("least", 1),
            PART=fixed_part(n.operands[1], n.operands[2]) if u.target.deterministic else 0,
            QUERY_ROWS=s["rows"],
            KEYS_PER_TILE=s["keys"],
            TILE_AXIS=int(skips_single_tokens),
        )


class PackedAttention(TritonKernel):
    """Packed prompts without pages. The kernel finds the boundaries of the sequences from the positions."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        return reject_attention(node, target)

    def widths(self, node: Node) -> tuple[int, int]:
        """Return the padded columns of keys and of values."""
        d, e = (max(16, next_power_of_2(int(v.type.shape[2]))) for v in node.operands[1:3])
        return d, e

    def dot(self, node: Node) -> str:
        """Return the Triton dtype of the factors of tl.dot: their own if equal, else float32."""
        q, k, v = (v.type for v in node.operands[:3])
        return element(k) if q.dtype == k.dtype == v.dtype else "tl.float32"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        item = DTYPES[node.operands[1].type.dtype].bits // 8
        return without_spills(
            list(tiles(max(self.widths(node)), item, self.dot(node) == "tl.float32", 16, target)), node, target
        )

    def code(self, u: Unit) -> Code:
        n, s, (key_width, value_width) = u.node, u.schedule, self.widths(u.node)
        q, k, v = (x.type.shape for x in n.operands[:3])
        return u.launch(
            Template("packed_attention", "packed_attention"),
            (q[0].ceildiv(s["rows"]), q[1]),
            **u.pointers("query_ptr key_ptr value_ptr positions_ptr", "out_ptr"),
            sinks_ptr=u.pointer("sinks"),
            slopes_ptr=u.pointer("slopes"),
            token_count=u.sizes(q[0]),
            HEADS=int(q[1]),
            KV_HEADS=int(k[1]),
            HEAD_DIM=int(q[2]),
            HEAD_DIM_PADDED=key_width,
            VALUE_DIM=int(v[2]),
            VALUE_DIM_PADDED=value_width,
            SCALE=n.attrs["scale"],
            CAUSAL=n.attrs.get("causal", True),
            WINDOW=n.attrs.get("window", 0),
            SOFTCAP=n.attrs.get("softcap", 0.0),
            QUERY_ROWS=s["rows"],
            KEYS_PER_TILE=s["keys"],
            DOT_DTYPE=self.dot(n),
            INTERPRET=u.interpret,
        )


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


class AttentionParts(PrefillAttention):
    """Decoding in parts of a fixed number of keys: one of a token and key head per program.

    It has the tiles of PREFILL_ATTENTION, and its order of sums.
    """

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
        return super().cost_us(node, schedule, target, env) + JOIN_US * int(node.operands[0].type.shape[2])

    def part_arguments(self, u: Unit, parts: int) -> dict[str, Argument]:
        return {"PARTS": parts}


PREFILL_ATTENTION = PrefillAttention("triton/prefill_attention", ("paged_attention", "paged_alibi_attention"))
PACKED_ATTENTION = PackedAttention("triton/packed_attention", ("attention", "alibi_attention"))
MIXED_ATTENTION = MixedAttention("triton/mixed_attention", ("paged_attention",), opt_in=True)
ATTENTION_PARTS = AttentionParts("triton/attention_parts", ("paged_attention_parts",))
JOIN_PARTS = JoinParts("triton/join_parts", ("attention_combine",))
