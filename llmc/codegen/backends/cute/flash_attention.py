"""The binding of FlashAttention 4 on Hopper: paged attention of prompts, chunks and single tokens in any mixture.

The kernel is that of the package flash-attn-4, with the changes of `kernels/flash_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from types import MappingProxyType
from typing import Self

from llmc.codegen.backends.cute.cute_toolchain import missing, remedy
from llmc.codegen.emit import Sizes, describe
from llmc.codegen.kernel import Kernel, Map, Param, Schedule, Source
from llmc.codegen.paged_problem import HALVES, SINKS, PagedProblem
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.passes.split.split_single import in_one_launch
from llmc.targets.target import PDL, Target

FILE = "flash_attention.py"
DISTRIBUTION = "flash-attn-4"
HEADS: Mapping[int, int] = MappingProxyType({64: 128, 128: 128, 256: 64})  # head sizes, and the keys of a tile
PAGE = 16  # tokens of a page
HIGH, LOW = 128, 64  # rows of a tile of queries: of two warpgroups, or of one
STAGES = 2
SWIZZLE, SWIZZLED = 3, 64  # 128 bytes, which are 64 elements
ALIGN = 1024  # bytes before the buffers in shared memory, for barriers
L2 = 50 << 20  # bytes of keys and values that the scheduler of tiles assumes to fit into the L2 cache
LOG2_E = math.log2(math.e)
MIN_STEP_TOKENS = 512  # tokens of a step from which the kernel is taken without a measurement
_RATE, _READS = 0.78, 0.8  # shares of the peak rate of products and of the bandwidth, measured on an H200


@dataclass(frozen=True)
class Problem(PagedProblem):
    """The sizes of a node of paged attention. tokens, rows: of a step."""

    tokens: Dim
    rows: Dim

    @classmethod
    def of(cls, node: Node) -> Self:
        tokens, rows = (node.operands[i].type.shape[0] for i in (0, 3))
        return cls(**asdict(PagedProblem.of(node)), tokens=tokens, rows=rows)


class FlashAttention(Kernel):
    """Paged attention by FlashAttention 4; a tile belongs to one row and, if packed, to all query heads of a key head.

    The keys and values of the pool must be finite: those of a page after the end of its row are multiplied by 0.
    """

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        if target.arch != "sm_90" or target.has("interpret"):
            return f"{target.name} is not the architecture of the kernel, sm_90"
        q, kv, pages = (node.operands[i].type for i in range(3))
        if q.dtype not in HALVES or kv.dtype != q.dtype:
            return f"queries of {q.dtype} and a pool of {kv.dtype}; one of {', '.join(HALVES)} for both is supported"
        if any(d.const is None for d in (*q.shape[1:], *kv.shape[1:], *pages.shape)):
            return "heads, page, head size and page table must be constant"
        p = Problem.of(node)
        if p.page != PAGE or p.size not in HEADS:
            return f"pages of {p.page} tokens, heads of {p.size}; {PAGE} and {', '.join(map(str, HEADS))} are supported"
        if p.group == 1 or 64 % p.group:
            return f"{p.group} query heads of a key head; 2, 4, 8 and other divisors of 64 are supported"
        sinks = node.operand("sinks")
        return f"sinks of {sinks.type.dtype}" if sinks and sinks.type.dtype not in SINKS else None

    def missing(self) -> str:
        return f"{why}; {remedy()}" if (why := missing()) else ""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = Problem.of(node)
        if p.tokens == p.rows and p.size != 256:
            return [{"rows": LOW, "packed": 1}, {"rows": HIGH, "packed": 1}]
        # Low tiles were a third slower for prompts. Tiles of one head are a few percent faster for a single prompt, but
        # read the keys of a single token once for each head.
        return [{"rows": HIGH, "packed": 1}, {"rows": HIGH, "packed": 0}]

    def leads(self, node: Node, target: Target, env: Mapping[str, int]) -> bool:
        """Whether it is attention of prompts of MIN_STEP_TOKENS or more in bf16, without a window or a soft cap.

        `bench.gpu.attention` compares the kernel with llmc's: it was faster for these, but not for single tokens. Keys
        in f16 may overflow, and numbers that are not finite could reach the next request that uses the page.
        """
        p, a = Problem.of(node), node.attrs
        plain = not a["window"] and not a["softcap"] and node.operand("sinks") is None
        plain = plain and node.operands[0].type.dtype == "bf16"
        tokens = p.tokens.subs(env).const or 0
        plain = plain and p.tokens != p.rows and not in_one_launch(node, tokens)
        return plain and tokens >= MIN_STEP_TOKENS and not target.deterministic

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: waves of tiles at a share of the peak, or the bytes of the keys that are seen."""
        p, rows = Problem.of(node), schedule["rows"]
        keys = HEADS[p.size]
        tokens, count = (d.subs(env).const or 1 for d in (p.tokens, p.rows))
        per_row = -(-tokens // count) * (p.group if schedule["packed"] else 1)
        tiles = count * -(-per_row // rows) * (p.kv_heads if schedule["packed"] else p.heads)
        seen = min(max(1024, tokens // count // 2), node.attrs["window"] or 1 << 30)
        peak = target.peaks[node.operands[0].type.dtype] / target.limits.units / 1e6 * _RATE
        tile_us = 2 + -(-seen // keys) * 4 * max(64, rows) * keys * p.size / peak
        read = 4 * count * seen * p.kv_heads * p.size / target.bandwidth / _READS * 1e6
        return max(read, -(-tiles // target.limits.units) * tile_us) + target.launch_us

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        p, a = Problem.of(node), node.attrs
        keys = HEADS[p.size]
        sinks = node.operand("sinks")
        packed, tile = bool(schedule["packed"]), schedule["rows"]
        constants = {
            "DTYPE": node.operands[0].type.dtype, "HEADS": p.heads, "KV_HEADS": p.kv_heads, "HEAD_DIM": p.size,
            "PAGE": PAGE, "TABLE_ROWS": int(node.operands[2].type.shape[0]),
            "TABLE_WIDTH": int(node.operands[2].type.shape[1]), "SCALE": a["scale"], "WINDOW": a["window"],
            "SOFTCAP": a["softcap"], "SINKS": sinks.type.dtype if sinks else "", "MIN_TOKENS": a.get("least", 1),
            "TILE_M": tile, "TILE_N": keys, "STAGES": STAGES, "PACKED": packed, "DEPENDENT": target.has(PDL),
        }  # fmt: skip
        head = describe(self.name, node, schedule, Sizes("s{}", [p.tokens, p.rows]))
        lines = [f"# {head}", *(f"{name} = {value!r}" for name, value in constants.items())]
        text = resources.files("llmc.codegen.backends.cute.kernels").joinpath(FILE).read_text()
        queries = p.tokens * (p.group if packed else 1)
        tiles = (queries + p.rows * tile - (tile - 1)).ceildiv(tile)  # queries // tile + rows
        return Source(
            "llmc_paged_attention_0", self.language, "\n".join(lines) + "\n\n" + text, threads=2 * tile + 128,
            shared=ALIGN + 2 * p.size * (tile + 2 * STAGES * keys), license=DISTRIBUTION, pdl=target.has(PDL),
            grid=(tiles * (p.kv_heads if packed else p.heads), D(1), D(1)), maps=tuple(maps(node, tile, packed)),
            passes=tuple(parameters(node, keys, queries)),
        )  # fmt: skip


def maps(node: Node, tile: int, packed: bool) -> Iterator[Map]:
    """Yield the tensor maps of the queries, the keys and the values.

    packed: the rows of a tile of queries are all heads of a group for one token, then those for the next token.
    """
    p, kv = Problem.of(node), node.operands[1].type.shape
    if packed:
        shape = (p.tokens, D(p.heads), D(p.size))
        yield Map(0, shape, (tile // p.group, p.group, SWIZZLED), SWIZZLE)
    else:
        shape = (D(p.heads), p.tokens, D(p.size))
        yield Map(0, shape, (1, tile, SWIZZLED), SWIZZLE, (D(p.size), D(p.heads * p.size)))
    token = PAGE * p.size
    strides = tuple(D(s) for s in (2 * p.kv_heads * token, token, p.size))
    for i in (0, 1):
        offset = D(2 * i * p.kv_heads * token)
        yield Map(1, (kv[0], kv[2], kv[3], kv[4]), (1, 1, PAGE, SWIZZLED), SWIZZLE, strides, offset)


def parameters(node: Node, keys: int, queries: Dim) -> Iterator[Param]:
    """Yield the parameters of the kernel, in its order. keys: of a tile. queries: tokens, times heads if packed."""
    p, a, last = Problem.of(node), node.attrs, len(node.operands)
    pages = node.operands[1].type.shape[0]
    starts = Param("tensor", 4, p.rows + 1)
    yield from (Param("size", size=d, type="i32") for d in (p.tokens, pages, pages))
    yield from (Param("tensor", last, p.tokens), starts, Param("tensor", 3, p.rows), Param("tensor", 5, p.tokens))
    yield Param("arg", 2)
    yield from (Param("map", i) for i in range(3))
    # A function of the logits receives the scale in base e; then the exponentials' scale is only the change of base.
    if a["softcap"]:
        yield from (Param("value", value=x, type="f32") for x in (LOG2_E, a["scale"]))
    else:
        yield Param("value", value=a["scale"] * LOG2_E, type="f32")
    if a["window"]:
        yield from (Param("value", value=x, type="i32") for x in (a["window"] - 1, 0))
    if sinks := node.operand("sinks"):
        yield Param("arg", node.operands.index(sinks))
    yield from (Param("value", value=0, type="u8") for _ in range(2))  # descriptions of copies, without content
    yield from (Param("size", size=d, type="i32") for d in (queries, p.rows))
    yield Param("value", value=L2 // (4 * p.size * keys), type="i32")
    yield starts


FLASH_ATTENTION = FlashAttention("cute/flash_attention", ("paged_attention",), language="cute", opt_in=True)
