"""The binding of `kernels/gemm_tiles.cu`: bf16 products of many tokens on Hopper, in large tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.codegen.backends.cuda.cuda_epilogue import offset_of, pair_epilogue
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, Binding, OptionalCudaKernel
from llmc.codegen.backends.cuda.gemm_wgmma import WgmmaProduct, reject_bf16
from llmc.codegen.backends.cuda.wgmma import ALIGN, RESERVED, SWIZZLE, WARPGROUP, multiply
from llmc.codegen.kernel import Map, Schedule
from llmc.codegen.product import ProductNode
from llmc.ir.cost import node_cost
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

TOKENS, STEP = 128, 64  # tokens per tile; columns per step
ROWS = (256, 224, 192, 160, 128)  # rows of w per tile, of all parts together
BOXES = 4  # boxes of w per step
CONSUMERS, MAX_STAGES, MIN_STEPS = 2, 6, 4
SQUARE_BYTES = 64 * 128  # bytes of shared memory for a box of y: 64 tokens
TWO_BYTES = ("bf16", "f16")
CLUSTERS = ((2, 1), (1, 2), (1, 1))  # blocks per cluster: along tokens (they share w), along columns (they share x)
GROUPED_TOKENS = 2048  # tokens of the tiles that are processed together, to share the weight in the L2 cache
_SHARE, _TILE_US, _START_US = 0.9, 0.8, 4.0  # share of the peak; microseconds of a tile and of a launch


@dataclass(frozen=True)
class GemmTiles(OptionalCudaKernel):
    """linear and linear_map of one or two parts in bf16, with a weight whose sizes are multiples of 8, on sm_90."""

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        if why := reject_bf16(node, target):
            return why
        if (out := node.results[0].type.dtype) not in TWO_BYTES:
            return f"a result of {out}"
        steps = WgmmaProduct(node).steps
        return f"{steps} steps of {STEP} columns; the minimum is {MIN_STEPS}" if steps < MIN_STEPS else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"rows": rows, "along_m": m, "along_n": n} for rows in ROWS for m, n in CLUSTERS]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: rounds of tiles on all multiprocessors, of which the last one may be in halves."""
        p, units = WgmmaProduct(node), target.limits.units
        rounds = -(-2 * -(-int(p.m.subs(env)) // TOKENS) * p.columns(schedule["rows"]) // units) / 2
        tile = 2.0 * TOKENS * schedule["rows"] * p.k * units / (target.peaks["bf16"] * _SHARE) * 1e6 + _TILE_US
        moved = int(node_cost(node)[1].subs(env)) / target.bandwidth * 1e6
        return max(rounds * tile, moved) + _START_US + target.launch_us

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, rows, m, n = WgmmaProduct(node), schedule["rows"], schedule["along_m"], schedule["along_n"]
        first, count = staged_operand(p), stages(rows, target)
        return Binding(
            grid=(target.limits.units // (m * n) * (m * n),),
            threads=(CONSUMERS + 1) * WARPGROUP,
            constants={
                "N": p.n, "K": p.k, "PARTS": p.parts, "ROWS": rows, "STAGES": count, "ALONG_M": m, "ALONG_N": n,
                "GROUP_SIZE_M": GROUPED_TOKENS // (TOKENS * m), "STAGED": int(first is not None),
                "READ_BEFORE_WAIT": int(origin(node.operands[1]) is not Origin.INPUTS),
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=count * stage_bytes(rows) + 2 * CONSUMERS * SQUARE_BYTES + ALIGN,
            sizes=(p.m,),
            maps=(
                Map(0, (p.m, D(p.k)), (TOKENS // CONSUMERS, STEP), SWIZZLE),
                Map(1, (D(p.parts * p.n), D(p.k)), (rows // BOXES, STEP), SWIZZLE),
            ),
            cluster=(m * n, 1, 1) if m * n > 1 else (),
            text="\n\n".join(
                (
                    *(multiply(columns) for columns in (rows // 4, rows // 2, rows)),
                    pair_epilogue(p, staged=first),
                    _set_first(p, first),
                )
            ),
        )  # fmt: skip


def stage_bytes(rows: int) -> int:
    """Return the bytes of a buffer of the ring."""
    return 2 * STEP * (TOKENS + rows)


def stages(rows: int, target: Target) -> int:
    """Return the number of buffers that fit into shared memory."""
    left = target.limits.shared - ALIGN - RESERVED - 2 * CONSUMERS * SQUARE_BYTES
    return min(MAX_STAGES, left // stage_bytes(rows))


def staged_operand(p: ProductNode) -> int | None:
    """Return the index of the first operand of the epilogue that is like the result, with numbers of two bytes."""
    for i, t in enumerate(p.extras):
        if t.dtype in TWO_BYTES and offset_of(t, p.out) == "(long long)token * N + column":
            return i
    return None


def _set_first(p: ProductNode, first: int | None) -> str:
    """Generate FIRST_POINTER and `set_first`, which sets the staged operand of a `Loaded` from two packed numbers."""
    values = ""
    if first is not None:
        numbers = (f"to_float({CTYPES[p.extras[first].dtype]}{{(unsigned short)(pair >> {16 * i})}})" for i in range(2))
        values = " " + ", ".join(f"x.e{first}[{i}] = {number}" for i, number in enumerate(numbers)) + "; "
    pointer = "nullptr" if first is None else f"e{first}"
    return f"#define FIRST_POINTER {pointer}\n__device__ inline void set_first(Loaded& x, unsigned pair) {{{values}}}"


GEMM_TILES = GemmTiles(
    "cuda/gemm_tiles",
    ("linear", "linear_map"),
    fills_multiprocessors=True,
    opt_in=True,
    file="gemm_tiles.cu",
    entry="llmc_tiles",
    headers=("hopper.cuh", "ring.cuh", "scalar_math.cuh", "pairs.cuh"),
)
