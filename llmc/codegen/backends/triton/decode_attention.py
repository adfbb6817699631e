"""Decode attention over KV pages in Triton: whole, in splits with their combination, or beside rows of prompts.

The kernels are in `kernels/decode_attention.py` and `kernels/single_token_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Self

from llmc.codegen.backends.triton.template import Argument, Template, record
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import FLOAT8, Code, TritonKernel, Unit, element, unsupported
from llmc.codegen.kernel import Schedule, roofline_us
from llmc.codegen.paged_problem import PagedProblem
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

MAX_HEAD = 512
CONTEXT = 1024  # tokens per row that the cost rule assumes
# Operands of the ops of paged attention -> fields of `PagedAttention` in `kernels/paged_kv.py`
OPERANDS = MappingProxyType(
    {
        "q": "query_ptr", "kv": "kv_ptr", "pages": "page_table_ptr", "rows": "rows_ptr", "starts": "starts_ptr",
        "positions": "positions_ptr", "scales": "scales_ptr", "sinks": "sinks_ptr",
    }
)  # fmt: skip
# keys, warps, stages
TILES = (
    (32, 2, 4), (64, 4, 3), (32, 4, 4), (64, 4, 4), (128, 4, 3), (16, 1, 3), (32, 2, 3), (32, 4, 3), (32, 1, 3),
    (16, 2, 3), (64, 4, 2), (128, 8, 2), (128, 8, 3),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionProblem(PagedProblem):
    """The sizes and constants of a node of paged attention."""

    scale: float
    window: int
    softcap: float
    dot_dtype: str  # Triton dtype of the factors of tl.dot

    @classmethod
    def of(cls, node: Node) -> Self:
        q, kv, a = node.operands[0].type, node.operands[1].type, node.attrs
        dot = element(kv) if q.dtype == kv.dtype else "tl.float32"
        if kv.dtype in FLOAT8 and q.dtype != "f32":
            dot = "tl.float16"  # an instruction converts two 8-bit floats to float16; bfloat16 would take five
        return cls(
            **asdict(PagedProblem.of(node)), scale=a["scale"], window=a.get("window", 0), softcap=a.get("softcap", 0.0),
            dot_dtype=dot,
        )  # fmt: skip

    @property
    def padded_dim(self) -> int:
        """Columns of a head, padded for tl.dot."""
        return max(16, next_power_of_2(self.size))

    @property
    def min_keys(self) -> int:
        """The smallest number of keys of a tile: tl.dot needs 16.

        On an H200, Triton 3.6 counts the 16 rows of a factor twice that was converted from 8-bit floats.
        """
        return 32 if self.item == 1 else 16

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, over all key heads."""
        return 2 * self.kv_heads * self.size * self.item

    def constants(self) -> dict[str, Argument]:
        """Return the fields of `PagedAttention` that describe the problem."""
        return {
            "HEADS": self.heads, "KV_HEADS": self.kv_heads, "HEAD_DIM": self.size,
            "HEAD_DIM_PADDED": self.padded_dim, "PAGE": self.page, "SCALE": self.scale, "WINDOW": self.window,
            "SOFTCAP": self.softcap, "DOT_DTYPE": self.dot_dtype,
        }  # fmt: skip


def paged_attention(u: Unit) -> str:
    """Return the argument `attention` of a kernel of paged attention: a `PagedAttention`."""
    starts, pages = u.node.operand("starts"), u.node.operand("pages")
    assert pages is not None
    return record(
        "PagedAttention",
        **{field: u.pointer(name) for name, field in OPERANDS.items()},
        row_count=u.sizes(starts.type.shape[0] - 1) if starts else None,
        table_width=u.sizes(pages.type.shape[1]),
        **AttentionProblem.of(u.node).constants(),
        INTERPRET=u.interpret,
    )


def reject_attention(node: Node, target: Target) -> str | None:
    """Return why no attention kernel supports the node, or None."""
    if why := unsupported(node, target=target):
        return why
    types = {name: v.type for name in ("q", "kv", "k", "v", "y", "sinks") if (v := node.operand(name))}
    for name, t in types.items():
        if t.dtype not in ((*FLOATS, *FLOAT8) if name == "kv" else FLOATS):
            return f"{t} is not one of {', '.join(FLOATS)}"
    q, k = types["q"], types.get("kv") or types["k"]  # k: the pool [P, 2, heads, page, size], or [T, heads, size]
    if None in [size.const for size in (*q.shape[1:3], *k.shape[1:])]:
        return "heads, page and head size must be constant"
    query_heads = int(q.shape[1])
    key_heads = int(k.shape[2] if k.rank == 5 else k.shape[1])
    if query_heads % key_heads:
        return f"{query_heads} query heads are not a multiple of {key_heads} key heads"
    widest = max(int(t.shape[-1]) for name, t in types.items() if name != "sinks")
    return f"head size {widest} is above {MAX_HEAD}" if widest > MAX_HEAD else None


def reject_unskipped(node: Node, target: Target) -> str | None:
    """Return why a kernel that computes the tokens of all rows does not support the node, or None."""
    if node.attrs.get("least", 1) > 1:
        return "it does not support skipping rows (least > 1)"
    return reject_attention(node, target)


class DecodeAttention(TritonKernel):
    """One token and key head per program, over all pages of its row or one split; valid for any mixture of rows."""

    def reject(self, node: Node, target: Target) -> str | None:
        return reject_unskipped(node, target)

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        """Return the tables, so that key addresses are known before the previous kernel has written the queries."""
        return (2, 3, 4) if node.op.name == "paged_attention_split" else (2, 3, 4, 5)

    def rows(self, p: AttentionProblem) -> int:
        """Rows of the products: query heads per key head, padded for tl.dot."""
        return max(16, next_power_of_2(p.group))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = AttentionProblem.of(node)
        smallest = {"keys": p.min_keys, "warps": 4, "stages": 1}
        if p.dot_dtype == "tl.float32":
            return [smallest]  # float32 products use many registers per thread
        # Triton 3.6 fails to compile deeper pipelines of converted 8-bit floats for AMD GPUs.
        max_stages = 3 if target.family == "hip" and p.item == 1 else max(stages for _, _, stages in TILES)
        schedules: list[Schedule] = []
        for keys, warps, stages in TILES:
            if keys < p.min_keys or stages > max_stages:
                continue
            shared = (2 * keys * (stages - 1) * p.item + self.rows(p) * 2) * p.padded_dim
            if shared <= target.limits.shared * 7 // 8 and keys * p.padded_dim <= 1 << 14:
                schedules.append({"keys": keys, "warps": warps, "stages": stages})
        return [*schedules, smallest]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: waves of blocks, whose tiles cost a latency and their bytes at one SM's bandwidth."""
        p, splits = AttentionProblem.of(node), node.attrs.get("splits", 1)
        tokens = node.operands[0].type.shape[0].subs(env).const or 1
        seen = min(CONTEXT, p.window or CONTEXT)
        tile = 2 * schedule["keys"] * p.padded_dim * p.item
        shared = max(1, schedule["stages"] - 1) * tile
        resident = max(1, min(target.limits.shared // shared, 32 // schedule["warps"]))
        rounds = math.ceil(tokens * p.kv_heads * splits / (target.limits.units * resident))
        tiles = math.ceil(seen / splits / schedule["keys"])
        hidden = max(1.0, min(schedule["stages"] - 1, tiles))
        block_us = 1.5 + tiles * (0.04 * schedule["warps"] + 0.6 / hidden + tile / 1e5)
        read = tokens * seen * p.token_bytes / target.bandwidth * 1e6
        return max(read, rounds * block_us) + target.launch_us

    def code(self, u: Unit) -> Code:
        n, p, splits = u.node, AttentionProblem.of(u.node), u.node.attrs.get("splits", 0)
        return u.launch(
            Template("decode_attention", "paged_decode"),
            (n.operands[0].type.shape[0], p.kv_heads, max(1, splits)),
            attention=paged_attention(u),
            out_ptr="y0",
            lse_ptr="y1" if splits else None,
            SPLITS=splits,
            QUERY_ROWS=self.rows(p),
            KEYS_PER_TILE=u.schedule["keys"],
            TABLES_SETTLED=u.reads_before_wait,
        )


class SingleTokenAttention(DecodeAttention):
    """Writes the outputs of rows of one token to y, which contains those that another kernel computed for longer rows.

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


class AttentionCombine(TritonKernel):
    """The weighted mean of the splits, one head of one token per program."""

    template = Template("decode_attention", "combine_splits")

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, FLOATS):
            return why
        if any(s.const is None for s in node.operands[0].type.shape[1:]):
            return "heads, parts and head size must be constant"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        best = max(1, min(4, self.padded_elements(node) // 1024))
        return [{"warps": best}, *({"warps": w} for w in (1, 2, 4) if w != best)]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: memory traffic, the serial loads of a thread, and the synchronization of the warps."""
        loads = self.padded_elements(node) / (128 * schedule["warps"])
        return roofline_us(node, target, env) + 0.02 * loads + 0.05 * schedule["warps"]

    @staticmethod
    def padded_elements(node: Node) -> int:
        """Return the elements of all parts of a head, each size padded to a power of two."""
        parts, size = node.operands[0].type.shape[2:]
        return next_power_of_2(int(parts)) * next_power_of_2(int(size))

    def code(self, u: Unit) -> Code:
        shape = u.node.operands[0].type.shape
        h, parts, d = (int(s) for s in shape[1:])
        return u.launch(
            self.template,
            (shape[0], h),
            **u.pointers("partial_ptr lse_ptr sinks_ptr", "out_ptr"),
            HEADS=h,
            HEAD_DIM=d,
            HEAD_DIM_PADDED=next_power_of_2(d),
            **self.part_arguments(u, parts),
        )

    def part_arguments(self, u: Unit, parts: int) -> dict[str, Argument]:
        """Return the template arguments that depend on the number of parts."""
        return {"SPLITS": parts, "SPLITS_PADDED": next_power_of_2(parts), "EAGER_LAUNCH": u.triggers_before_wait}


DECODE_ATTENTION = DecodeAttention("triton/decode_attention", ("paged_attention", "paged_attention_split"))
ATTENTION_COMBINE = AttentionCombine("triton/attention_combine", ("attention_combine",), can_trigger_before_wait=True)
SINGLE_TOKEN_ATTENTION = SingleTokenAttention("triton/single_token_attention", ("paged_attention_single",))
