"""The binding of `kernels/grouped_wgmma.cu`: the products of experts in bf16 on Hopper, by wgmma and bulk copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.codegen.backends.cuda.cuda_epilogue import PAIR, operand_macros
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, FLOATS, Binding, OptionalCudaKernel
from llmc.codegen.backends.cuda.wgmma import ALIGN, RESERVED, SWIZZLE, WARPGROUP, lacks_wgmma, multiply
from llmc.codegen.expert_stack import CODE, STARTS, Stack, chosen_experts, overlapped, row_blocks
from llmc.codegen.kernel import READ_BEFORE_WAIT, Map, Schedule
from llmc.codegen.print_expr import inline
from llmc.ir.dim import D
from llmc.ir.graph import Node
from llmc.ir.ops.moe import gate
from llmc.targets.target import Target

TILE_K = 64
HEIGHTS = (64, 128)  # rows per tile
COLUMNS = (256, 192, 128, 96, 64)  # rows of w per tile, of all parts together
GROUP_SIZE_M = 16  # tiles of rows that are processed together, to share tiles of the weights in the L2 cache
MAX_STAGES = 8
MAX_EXPERTS = 512  # maximum experts, whose rows are counted in shared memory
_SHARE, _READS = 0.94, 0.96  # shares of the peak and of the bandwidth that are reached
# Minimum time of a tile per column of depth, by the rows of the tile.
_COLUMN_US: Mapping[int, float] = MappingProxyType({64: 0.0042, 128: 0.0068})
_TILE_US, _ELEMENT_US = 1.8, 0.6 / 8192  # time of the end of a tile: constant, and per sum
_START_US = 2.0  # time of a launch
_UP_US = 6.0  # further time of the first product, which overlaps less with its neighbours in a step
_L2_BYTES_US = 1e5  # bytes per microsecond that a multiprocessor reads from the L2 cache
_BUSY = 0.45  # exponent of the share of multiprocessors that have a tile


@dataclass(frozen=True)
class GroupedWgmma(OptionalCudaKernel):
    """moe_up and moe_down in bf16, with weights whose sizes are multiples of 8, on sm_90."""

    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        if why := lacks_wgmma(target):
            return why
        for i in (0, CODE):
            t = node.operands[i].type
            if t.format is not None or t.dtype != "bf16":
                return f"operand type {t} is not bf16"
        for v in [*node.operands[CODE + 1 :], node.result]:
            if v.type.format is not None or v.type.dtype not in FLOATS:
                return f"operand type {v.type} is not among {', '.join(FLOATS)}"
        for v in node.operands[1:3]:
            if v.type.dtype != "i32":
                return f"the pairs and their starts have the dtype {v.type.dtype}, not i32"
        return _reject_sizes(node)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"bm": bm, "bn": bn} for bm in HEIGHTS for bn in COLUMNS]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the time of reading the chosen experts and that of rounds of tiles, which overlap.

        Measured on an H200 (bench.gpu.experts).
        """
        p, s, units = Stack(node), schedule, target.limits.units
        pairs = int(node.operands[1].type.shape[0].subs(env))
        tiles = row_blocks(pairs, p.experts, s["bm"]) * -(-p.rows // s["bn"])
        column = 2.0 * s["bm"] * s["bn"] * units / target.peaks["bf16"] / _SHARE * 1e6
        copied = 2 * (s["bm"] + s["bn"]) / _L2_BYTES_US
        tile = p.k * max(column, copied, _COLUMN_US[s["bm"]]) + _TILE_US + _ELEMENT_US * s["bm"] * s["bn"]
        busy = min(1.0, tiles / units) ** _BUSY
        read = chosen_experts(pairs, p.experts) * p.rows * p.k * 2 / target.bandwidth / _READS / busy * 1e6
        start = _START_US + (_UP_US if p.up else 0.0) + target.launch_us
        return overlapped(read, max(1, math.ceil(tiles / units)) * tile) + start

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        return STARTS, CODE

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        p, s = Stack(node), schedule
        count = stages(s, p.experts, target)
        return Binding(
            grid=(target.limits.units,),
            threads=s["bm"] // 64 * WARPGROUP + WARPGROUP,
            constants={
                "EXPERTS": p.experts, "N": p.n, "K": p.k, "PARTS": p.parts, "TILE_M": s["bm"], "TILE_N": s["bn"],
                "STAGES": count, "GROUP_SIZE_M": GROUP_SIZE_M * 128 // s["bm"],
                "CHOICES": node.attrs["k"] if p.up else 0, "SCATTER": int(not p.up),
                "READ_BEFORE_WAIT": int(READ_BEFORE_WAIT in s),
                "OUT": CTYPES[node.result.type.dtype],
            },
            shared=count * stage_bytes(s) + ALIGN,
            maps=(Map(CODE, (D(p.experts * p.rows), D(p.k)), (s["bn"] // 2, TILE_K), SWIZZLE),),
            text="\n\n".join((multiply(s["bn"]), epilogue(p))),
        )  # fmt: skip


def _reject_sizes(node: Node) -> str | None:
    """Return why the sizes of the stack are not supported, or None."""
    experts, rows, k = (d.const for d in node.operands[CODE].type.shape)
    stack = Stack(node)
    parts = stack.parts
    if stack.up and parts == 1:
        return "experts without a gate"
    if not experts or not rows or not k or rows % (8 * parts) or k % 8:
        return f"the experts' sizes {rows} x {k} are not constant multiples of {8 * parts} and 8"
    if experts * rows >= 1 << 31:
        return f"{experts} experts of {rows} rows; the maximum is 2^31 rows"
    return f"{experts} experts; the maximum is {MAX_EXPERTS}" if experts > MAX_EXPERTS else None


def epilogue(p: Stack) -> str:
    """Generate OTHER_PARAMETERS, OTHER_ARGUMENTS, OTHERS and the functions of the epilogue (see the `.cu` file).

    `row_factor(pair OTHERS)` is the factor of a row, `add_bias(a, expert, column OTHERS)` adds the bias of two
    neighbouring columns to the sums a[parts][2], and `epilogue(y, a, factor)` computes y[2].
    """
    types = {name: t for name in ("weights", "bias") if (t := p.type(name)) is not None}
    macros, arguments = operand_macros(types)
    value = inline(gate(p.node.attrs["body"]), ["a[0][i]", "a[1][i]"], PAIR) if p.up else "a[0][i] * factor"
    bias = (
        "float b[2];\n"
        "#pragma unroll\n"
        f"  for (int p = 0; p < {p.parts}; p++) {{\n"
        f"    load_pair(b, bias + (long long)expert * {p.rows} + p * N + column);\n"
        "    a[p][0] += b[0], a[p][1] += b[1];\n"
        "  }"
    )
    return (
        f"{macros}"
        f"__device__ inline float row_factor(int pair{arguments}) {{\n"
        f"  return {'1' if p.up else 'to_float(weights[pair])'};\n}}\n"
        f"__device__ inline void add_bias(float (&a)[{p.parts}][2], int expert, int column{arguments}) {{\n"
        f"  {bias if 'bias' in types else ''}\n}}\n"
        f"__device__ inline void epilogue(float (&y)[2], const float (&a)[{p.parts}][2], float factor) {{\n"
        f"#pragma unroll\n"
        f"  for (int i = 0; i < 2; i++) y[i] = {value};\n}}"
    )


def stage_bytes(s: Schedule) -> int:
    """Return the bytes of a buffer of the ring."""
    return int(2 * TILE_K * (s["bm"] + s["bn"]))


def stages(s: Schedule, experts: int, target: Target) -> int:
    """Return the number of buffers that fit into shared memory."""
    available = target.limits.shared - ALIGN - RESERVED - 8 * experts
    return min(MAX_STAGES, available // stage_bytes(s))


GROUPED_WGMMA = GroupedWgmma(
    "cuda/grouped_wgmma",
    ("moe_up", "moe_down"),
    fills_multiprocessors=True,
    file="grouped_wgmma.cu",
    entry="llmc_experts",
    headers=("hopper.cuh", "ring.cuh", "scalar_math.cuh", "pairs.cuh"),
    before=("wgmma_ring.cuh", "expert_rows.cuh"),
)
