"""The binding of `kernels/decode_attention.cu`: attention of single tokens over KV pages on Hopper, by bulk copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding, OptionalCudaKernel
from llmc.codegen.backends.cuda.wgmma import ALIGN, lacks_wgmma
from llmc.codegen.kernel import READ_BEFORE_WAIT, Map, Schedule
from llmc.codegen.paged_problem import F8, PagedProblem, reject_types
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.targets.gpu_targets import REGISTERS
from llmc.targets.target import PDL, Target

WHOLE, SPLIT, SINGLE = "paged_attention", "paged_attention_split", "paged_attention_single"
TILE, ROW_BYTES = 16, 128  # tokens per tile; bytes per row of a stripe
STEP = 64  # heads are multiples of this number of elements
SWIZZLES: Mapping[int, int] = MappingProxyType({128: 3, 64: 2})  # bytes per row -> CUtensorMapSwizzle
MAX_HEAD, MAX_GROUP = 256, 16  # maximum elements per head, and query heads per key head
SCHEDULES = ((4, 2), (4, 1), (2, 2), (4, 3), (2, 3), (2, 4), (8, 1), (4, 4))  # (warps, stages)
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block
MAX_REGISTERS, OTHER_REGISTERS = 255, 72  # maximum registers per thread; those of a thread besides sums and queries
CONTEXT = 1024  # tokens per row that the cost rule assumes
WARPS, LARGE_TILE = 4, 16 << 10  # warps per block with which an H200 was fastest; bytes of a large tile
_READS, _START_US = 0.97, 4.0  # share of the bandwidth that is reached; time of a launch


class Problem(PagedProblem):
    """The sizes of a node of paged attention, its tiles and its tensor map."""

    @property
    def tile_bytes(self) -> int:
        """The bytes of the keys and values of a tile."""
        return 2 * TILE * self.size * self.item

    @property
    def stripe(self) -> int:
        """The number of elements per stripe of a head."""
        return min(ROW_BYTES // self.item, self.size)

    def map(self, pages: Dim) -> Map:
        """Return the tensor map of a pool: pages, tiles of the heads of keys and values, stripes, tokens, elements."""
        tiles = 2 * self.kv_heads * self.page // TILE
        stripes = self.size // self.stripe
        return Map(
            1,
            (pages, D(tiles), D(stripes), D(TILE), D(self.stripe)),
            (1, 1, stripes, TILE, self.stripe),
            SWIZZLES[self.stripe * self.item],
            (D(tiles * TILE * self.size), D(TILE * self.size), D(self.stripe), D(self.size)),
        )

    @property
    def registers(self) -> int:
        """The registers per thread: four for sums and two for queries per step and 8 query heads, and others."""
        return 6 * (self.size // 16) * -(-self.group // 8) + OTHER_REGISTERS

    def shared(self, s: Schedule) -> int:
        """Return the bytes of shared memory: tiles, or the sums of the warps in their place, and barriers."""
        tiles, sums = s["stages"] * self.tile_bytes, self.group * (4 * (self.size + 4) + 8)
        return ALIGN + s["warps"] * (max(tiles, sums) + 8 * s["stages"])

    def resident(self, s: Schedule, target: Target) -> int:
        """Return the number of resident blocks per multiprocessor."""
        threads = REGISTERS // (self.registers * 32 * s["warps"])
        return max(1, min(target.limits.shared // (self.shared(s) + RESERVED), threads))


@dataclass(frozen=True)
class DecodeAttention(OptionalCudaKernel):
    """Paged attention of one token per row, whole, in parts or beside longer rows; pools of 16 bits or 8-bit floats."""

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        return lacks_wgmma(target) or reject_types(node) or _reject_sizes(node, target)

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        """Return the tables; of single tokens beside longer rows, all inputs but the results of those and the sinks."""
        scales = node.operand("scales")
        single = (0, 1, 2, 3, 4, 5, *(i for i, v in enumerate(node.operands) if v is scales))
        return {WHOLE: (2, 3, 4, 5), SPLIT: (2, 3, 4), SINGLE: single}[node.op.name]

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((6, 0),) if node.op.name == SINGLE else ()

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return list(_schedules(Problem.of(node), target))

    def leads(self, node: Node, target: Target, env: Mapping[str, int]) -> bool:
        """Whether the target has dependent launch, as Hopper has.

        On an H200, it took 40 to 100 % of the time of Triton's kernels, with few and many rows, whole and in parts
        (`bench.gpu.attention`).
        """
        return target.has(PDL)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: reading the keys and values, and a start that takes longer for unusual blocks."""
        p, parts = Problem.of(node), node.attrs.get("splits", 1)
        rows = node.operands[3].type.shape[0].subs(env).const or 1
        seen = min(CONTEXT, node.attrs["window"] or CONTEXT)
        busy = min(1.0, rows * p.kv_heads * parts / target.limits.units)  # fewer blocks do not reach the bandwidth
        read = 2 * rows * seen * p.kv_heads * p.size * p.item / target.bandwidth / busy * 1e6
        unusual = abs(schedule["stages"] - _stages(node)) + abs(math.log2(schedule["warps"] / WARPS))
        return read / _READS + _START_US + unusual

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, a = Problem.of(node), node.attrs
        (q, kv, pages, rows), single = (node.operands[i].type for i in range(4)), node.op.name == SINGLE
        splits, factor = a.get("splits", 0), "f16" if kv.dtype == F8 else q.dtype
        return Binding(
            grid=((rows if single else q).shape[0] * p.kv_heads, 1, max(1, splits)),
            threads=32 * schedule["warps"],
            constants={
                "GROUP": p.group, "KV_HEADS": p.kv_heads, "HEAD_DIM": p.size, "PAGE": p.page,
                "SCALE": float(a["scale"]), "SOFTCAP": float(a["softcap"]), "WINDOW": a["window"], "SPLITS": splits,
                "SINGLE": int(single), "WARPS": schedule["warps"], "STAGES": schedule["stages"],
                "RESIDENT": p.resident(schedule, target), "READ_BEFORE_WAIT": int(READ_BEFORE_WAIT in schedule),
                "ITEM": p.item, "QUERY_IS_FACTOR": int(q.dtype == factor), "QUERY": CTYPES[q.dtype],
                "FACTOR": CTYPES[factor], "OUT": CTYPES[node.results[0].type.dtype],
            },
            shared=p.shared(schedule),
            sizes=(pages.shape[1], rows.shape[0], q.shape[0]),
            maps=(p.map(kv.shape[0]),),
            text=_operands(node),
        )  # fmt: skip


def _stages(node: Node) -> int:
    """Return the number of tiles in flight with which an H200 was fastest.

    It is one in three cases: if tiles are large; beside longer rows, whose blocks need shared memory at the same time;
    and for a single token, because the blocks of the next product, which load weights meanwhile, then need the
    registers of a second tile.
    """
    one_token = node.operands[0].type.shape[0].const == 1
    return 1 if one_token or node.op.name == SINGLE or Problem.of(node).tile_bytes >= LARGE_TILE else 2


def _operands(node: Node) -> str:
    """Return the definitions of the parameters after the rows, and of the names of those that a node may lack."""
    names = {"starts": "starts", "positions": "positions", "y": "longer", "scales": "scales", "sinks": "sinks"}
    types = {name: v.type for name in names if (v := node.operand(name))}
    parameters = [f"const {CTYPES[t.dtype]}* {names[name]}, " for name, t in types.items()]
    lse = node.op.name == SPLIT
    defined = {
        "OTHER_PARAMETERS": "".join(parameters) + "OUT* y," + " float* lse," * lse,
        "STARTS": "starts" if "starts" in types else "((const int*)nullptr)",
        "LONGER": "longer" if "y" in types else "y",
        "SCALES": "scales" if "scales" in types else "((const float*)nullptr)",
        "SINKS": "(sinks + head * GROUP)" if "sinks" in types else "((const float*)nullptr)",
        "LSE": "lse" if lse else "((float*)nullptr)",
    }
    return "\n".join(f"#define {name} {text}" for name, text in defined.items())


def _reject_sizes(node: Node, target: Target) -> str | None:
    q, kv, rows = (node.operands[i].type for i in (0, 1, 3))
    if node.attrs.get("least", 1) > 1 or (node.op.name != SINGLE and q.shape[0] != rows.shape[0]):
        return "rows of several tokens; one token per row is supported"
    if any(d.const is None for d in (*q.shape[1:], *kv.shape[2:])):
        return "heads, page and head size must be constant"
    p = Problem.of(node)
    if p.page % TILE or p.size % STEP or p.size % p.stripe or p.size > MAX_HEAD:
        sizes = f"pages of multiples of {TILE}, heads of multiples of {max(STEP, p.stripe)} up to {MAX_HEAD}"
        return f"pages of {p.page} tokens, heads of {p.size}; {sizes} are supported"
    if p.heads % p.kv_heads or p.group > MAX_GROUP or p.registers > MAX_REGISTERS:
        return f"{p.heads} query heads of {p.size} for {p.kv_heads} key heads"
    return None if next(_schedules(p, target), None) else f"heads of {p.size} do not fit into shared memory"


def _schedules(p: Problem, target: Target) -> Iterator[Schedule]:
    """Yield the numbers of warps and of tiles in flight for which shared memory suffices."""
    for warps, stages in SCHEDULES:
        s = {"warps": warps, "stages": stages}
        if p.shared(s) + RESERVED <= target.limits.shared:
            yield s


DECODE_ATTENTION = DecodeAttention(
    "cuda/decode_attention",
    (WHOLE, SPLIT, SINGLE),
    opt_in=True,
    file="decode_attention.cu",
    entry="llmc_decode_attention",
    headers=("hopper.cuh", "streaming.cuh"),
    before=("kv_tiles.cuh",),
)
