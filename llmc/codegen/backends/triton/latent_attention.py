"""Latent attention over KV pages in Triton: decoding in splits, and any mixture of prompts and single tokens.

The kernels are in `kernels/latent_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from llmc.codegen.backends.triton.decode_attention import CONTEXT
from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, capability, element, unsupported
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import PDL, Target

MAX_LATENT, MAX_ROTARY = 512, 128


class Tile(NamedTuple):
    """The tile of a program; the fields are the entries of its schedule. rows: of queries. keys: of a step."""

    rows: int
    keys: int
    warps: int
    stages: int


# Tile -> time of a row and a key relative to the first, whose tiles are for wgmma. The times are those of 128 heads of
# DeepSeek-V3 on an H100, of 32 rows with 4,096 tokens. Tiles that fit are used.
TILES = MappingProxyType(
    {
        Tile(64, 64, 8, 2): 1.0, Tile(64, 32, 8, 3): 1.1, Tile(64, 64, 8, 1): 1.15, Tile(64, 32, 8, 2): 1.3,
        Tile(32, 32, 4, 3): 1.35, Tile(32, 64, 8, 2): 1.6, Tile(16, 32, 4, 3): 1.7, Tile(16, 32, 4, 2): 1.8,
        Tile(16, 64, 4, 3): 2.0, Tile(16, 32, 4, 4): 2.3, Tile(16, 16, 4, 2): 2.6, Tile(16, 16, 4, 1): 3.5,
    }
)  # fmt: skip
ROW_KEY_US = 1.3e-3  # a row and a key of the first of TILES on one multiprocessor of an H100
WGMMA_ROWS = 64
SMALLEST = Tile(16, 16, 4, 1)


@dataclass(frozen=True)
class LatentProblem:
    """The sizes and constants of latent attention. item_bytes: of an element of the pool."""

    heads: int
    latent: int
    rotary: int
    page: int
    item_bytes: int
    scale: float
    dot_dtype: str  # Triton dtype of the factors of tl.dot

    @staticmethod
    def of(node: Node) -> LatentProblem:
        """Read the problem from a node."""
        q, rotary, pool = (v.type for v in node.operands[:3])
        dot = element(pool) if q.dtype == pool.dtype else "tl.float32"
        sizes = int(q.shape[1]), int(q.shape[2]), int(rotary.shape[2]), int(pool.shape[1])
        return LatentProblem(*sizes, DTYPES[pool.dtype].bits // 8, node.attrs["scale"], dot)

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of the two parts, padded for tl.dot."""
        return max(16, next_power_of_2(self.latent)), max(16, next_power_of_2(self.rotary))

    def shared(self, schedule: Schedule, target: Target) -> int:
        """Return the bytes of shared memory: queries, and keys in flight (wgmma reads from there: one more stage)."""
        wgmma = target.has(PDL) and schedule["rows"] >= WGMMA_ROWS
        tiles = schedule["stages"] if wgmma else max(2, schedule["stages"] - 1)
        return (schedule["rows"] + schedule["keys"] * tiles) * sum(self.widths) * max(2, self.item_bytes) + 4096

    def constants(self) -> dict[str, Argument]:
        """Return the template parameters that describe the problem."""
        latent, rotary = self.widths
        return {
            "HEADS": self.heads, "LATENT": self.latent, "LATENT_PADDED": latent, "ROTARY": self.rotary,
            "ROTARY_PADDED": rotary, "PAGE": self.page, "SCALE": self.scale, "DOT_DTYPE": self.dot_dtype,
        }  # fmt: skip


def max_rows_of(target: Target) -> int:
    """Return the maximum rows of a tile for which the target has room.

    64 rows of sums spill on AMD GPUs, and the instructions of sm_100 for 64 rows take twice the shared memory.
    """
    return WGMMA_ROWS if target.family == "cuda" and capability(target) < 100 else WGMMA_ROWS // 2


class LatentAttention(TritonKernel):
    """The base class: dtypes and sizes, and the schedules that fit."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node):
            return why
        if bad := next((v.type for v in node.operands[:3] if v.type.dtype not in FLOATS), None):
            return f"{bad} is not one of {', '.join(FLOATS)}"
        if any(d.const is None for v in node.operands[:3] for d in v.type.shape[1:]):
            return "heads, page and sizes of keys must be constant"
        p = LatentProblem.of(node)
        if p.latent > MAX_LATENT or p.rotary > MAX_ROTARY:
            return f"a latent of {p.latent} and a rotary part of {p.rotary} are above {MAX_LATENT} and {MAX_ROTARY}"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = LatentProblem.of(node)
        if p.dot_dtype == "tl.float32":
            return [SMALLEST._asdict()]  # float32 products use many registers per thread
        max_rows = min(self.max_rows(p), max_rows_of(target))
        tiles = [t for t in TILES if t.rows <= max_rows]
        fitting = [t for t in tiles if t == SMALLEST or p.shared(t._asdict(), target) <= target.limits.shared]
        return [t._asdict() for t in fitting]

    def max_rows(self, p: LatentProblem) -> int:
        """Return the maximum rows of queries that a tile can use."""
        raise NotImplementedError

    def blocks_us(self, node: Node, schedule: Schedule, target: Target, blocks: int, seen: int) -> float:
        """Predict the microseconds of waves of blocks that attend to `seen` keys."""
        p = LatentProblem.of(node)
        resident = max(1, min(target.limits.shared // p.shared(schedule, target), 16 // schedule["warps"]))
        factor = TILES[Tile(*(schedule[field] for field in Tile._fields))] * (2 * p.widths[0] + p.widths[1]) / 1088
        block_us = 2 + schedule["rows"] * max(seen, schedule["keys"]) * ROW_KEY_US * factor
        share = min(resident, max(1.0, blocks / target.limits.units))  # blocks that share a multiprocessor
        return math.ceil(blocks / (target.limits.units * resident)) * block_us * share


class LatentDecode(LatentAttention):
    """Some heads of one token per program, over one part of the keys of its row."""

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        """Return the tables, so that the keys' pages are known before the previous kernel has written the queries."""
        return (3, 4, 5)

    def max_rows(self, p: LatentProblem) -> int:
        return max(16, next_power_of_2(p.heads))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p, splits = LatentProblem.of(node), node.attrs["splits"]
        tokens = node.operands[0].type.shape[0].subs(env).const or 1
        blocks = tokens * -(-p.heads // schedule["rows"]) * splits
        return self.blocks_us(node, schedule, target, blocks, CONTEXT // splits) + target.launch_us

    def code(self, u: Unit) -> Code:
        n, p, rows = u.node, LatentProblem.of(u.node), u.schedule["rows"]
        return u.launch(
            Template("latent_attention", "latent_decode"),
            (n.operands[0].type.shape[0], -(-p.heads // rows), n.attrs["splits"]),
            **u.pointers("query_ptr rotary_ptr pool_ptr page_table_ptr rows_ptr positions_ptr", "partial_ptr lse_ptr"),
            table_width=u.sizes(n.operands[3].type.shape[1]),
            **p.constants(),
            SPLITS=n.attrs["splits"],
            QUERY_ROWS=rows,
            KEYS_PER_TILE=u.schedule["keys"],
            TABLES_SETTLED=u.reads_before_wait,
            INTERPRET=u.interpret,
        )


class LatentPrefill(LatentAttention):
    """Some tokens and heads of one row per program, for any mixture of rows and tokens."""

    def max_rows(self, p: LatentProblem) -> int:
        return 64

    def tile(self, p: LatentProblem, schedule: Schedule) -> tuple[int, int]:
        """Return (tokens, heads) of a tile."""
        heads = min(p.heads, schedule["rows"])
        return schedule["rows"] // heads, heads

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        p = LatentProblem.of(node)
        tokens, count = (node.operands[i].type.shape[0].subs(env).const or 1 for i in (0, 4))
        tile, heads = self.tile(p, schedule)
        blocks = (tokens // tile + (count if tile > 1 else 0)) * -(-p.heads // heads)
        seen = max(CONTEXT, tokens // count // 2)
        return self.blocks_us(node, schedule, target, blocks, seen) + target.launch_us

    def code(self, u: Unit) -> Code:
        n, p = u.node, LatentProblem.of(u.node)
        tokens = n.operands[0].type.shape[0]
        count = n.operands[4].type.shape[0]
        tile, heads = self.tile(p, u.schedule)
        operands = "query_ptr rotary_ptr pool_ptr page_table_ptr rows_ptr starts_ptr positions_ptr"
        return u.launch(
            Template("latent_attention", "latent_prefill"),
            (tokens.ceildiv(tile) + count + 1, -(-p.heads // heads)),
            **u.pointers(operands, "out_ptr"),
            row_count=u.sizes(count),
            token_count=u.sizes(tokens),
            table_width=u.sizes(n.operands[3].type.shape[1]),
            **p.constants(),
            TILE_HEADS=heads,
            TILE_TOKENS=tile,
            QUERY_ROWS=u.schedule["rows"],
            KEYS_PER_TILE=u.schedule["keys"],
            INTERPRET=u.interpret,
        )


LATENT_DECODE = LatentDecode("triton/latent_decode", ("paged_latent_attention_split",))
LATENT_PREFILL = LatentPrefill("triton/latent_prefill", ("paged_latent_attention",))
