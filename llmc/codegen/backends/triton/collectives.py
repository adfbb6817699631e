"""Collectives between GPUs that write to each other's memory; the protocol is in kernels/peer_exchange.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmc_runtime.format.group_memory import CHUNK, MAX_PEERS, PROGRAMS
from llmc_runtime.format.names import NCCL

from llmc.codegen.backends.triton.template import Template, record
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, element
from llmc.codegen.kernel import BY_SCHEDULE, EXACT, Schedule
from llmc.ir.dim import Dim, product
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

LANE_BYTES = 16  # bytes
MAX_LANES = CHUNK // LANE_BYTES
WARPS = (16, 8)  # a thread has one lane
WARPS_OF_PARTS = 8  # warps for sums in parts: at least as fast as 16 for every size (four H200s, 2026-11-27)
NORM_WARPS = (16, 8, 4, 2, 1)  # a thread has one lane or more
# Time of an exchange in addition to the launch and the transfer, measured with two H100s, 2026-11-25:
_FIRST_US = 0.6  # once
_PEER_US = 0.35  # each other rank
_NEXT = 1.3  # each additional chunk of a program takes this many times as long as the first one
# Time of a norm after the sum, measured with two H200s, 2026-11-26:
_NORM_US = 0.5  # once
_LANE_US = 0.4  # each lane of a thread after its first one


class Collective(TritonKernel):
    """A collective of two or more ranks. Schedule: warps; a program's chunk has a lane for each of their threads."""

    def reject(self, node: Node, target: Target) -> str | None:
        if target.family == "hip":
            return "ranks on AMD GPUs are not supported"
        if NCCL in target.languages:
            return "the ranks use NCCL"
        ranks = node.attrs["ranks"]
        if not 2 <= ranks <= MAX_PEERS:
            return f"a group on GPUs has 2 to {MAX_PEERS} ranks, not {ranks}"
        return super().reject(node, target)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"warps": warps} for warps in WARPS]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the time of the exchanges, each with a transfer over the link, in microseconds."""
        exchanges, nbytes = self.traffic(node, schedule, env)
        others = node.attrs["ranks"] - 1
        chunks = self.chunks(node, schedule, env, nbytes)
        waves = -(-chunks // PROGRAMS)  # chunks that a program exchanges one after the other
        latency = exchanges * (_FIRST_US + _PEER_US * others) * (1 + _NEXT * (waves - 1))
        return target.launch_us + latency + exchanges * others * nbytes / target.link * 1e6

    def traffic(self, node: Node, schedule: Schedule, env: Mapping[str, int]) -> tuple[int, int]:
        """Return the number of exchanges, one after the other, and the bytes that a rank sends to each in one."""
        return 1, int(node.operands[0].type.nbytes.subs(env))

    def chunks(self, node: Node, schedule: Schedule, env: Mapping[str, int], nbytes: int) -> int:
        """Return the number of chunks of an exchange of `nbytes` bytes; programs take them in turn."""
        return -(-nbytes // (32 * schedule["warps"] * LANE_BYTES))

    def row(self, node: Node) -> Dim:
        """Return the number of elements that are contiguous in both the operand and the result."""
        raise NotImplementedError

    def launch_chunks(self, u: Unit, function: str, parts: int, operands: str, **elements: Dim) -> Code:
        """Return the call of a template whose chunks have `parts` parts of a lane per thread.

        operands: the names of its pointers. elements: numbers of elements, which the template takes in lanes.
        """
        x = u.node.operands[0].type
        size = DTYPES[x.dtype].bits // 8
        wide = x.dtype in FLOATS and self.row(u.node).divide(LANE_BYTES // size) is not None
        per_lane = LANE_BYTES // size if wide else 1
        lanes, total = 32 * u.schedule["warps"], x.numel.ceildiv(per_lane)
        assert lanes <= MAX_LANES
        chunks = total.ceildiv(lanes * parts)
        code = u.launch(
            Template("collectives", function),
            (chunks,),  # the runtime launches at most PROGRAMS
            **u.pointers(operands, "y_ptr"),
            group=group(u, wide),
            NUM_LANES=u.sizes(total),
            CHUNKS=u.sizes(chunks),
            LANES=lanes,
            **{name: u.sizes(count.ceildiv(per_lane)) for name, count in elements.items()},
        )
        return replace(code, group=True)


def group(u: Unit, wide: bool) -> str:
    """Return the argument `group` of a template, whose lanes have several elements if `wide`."""
    x = u.node.operands[0].type
    return record(
        "Group", memory_ptr="group", RANKS=u.node.attrs["ranks"], DTYPE=element(x), BITS=DTYPES[x.dtype].bits,
        WIDE=wide, ASSEMBLY=not u.interpret,
    )  # fmt: skip


class AllReduce(Collective):
    """The sum over the ranks, in their order and in float32, to which a second operand is added.

    Schedule: parts, 1 if every rank sends its operand to all others, else the number of ranks: each sums one part, and
    sends the sum to the others.
    """

    constant_reduction_order = "by rank"
    dtypes = FLOATS

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return tuple((i, 0) for i in range(len(node.operands)))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        ranks = node.attrs["ranks"]
        whole = [{"warps": warps, "parts": 1} for warps in WARPS]
        return whole if ranks == 2 else [*whole, {"warps": WARPS_OF_PARTS, "parts": ranks}]

    def traffic(self, node: Node, schedule: Schedule, env: Mapping[str, int]) -> tuple[int, int]:
        exchanges, nbytes = super().traffic(node, schedule, env)
        parts = schedule["parts"]
        return exchanges + (parts > 1), -(-nbytes // parts)

    def row(self, node: Node) -> Dim:
        return node.result.type.numel

    def code(self, u: Unit) -> Code:
        parts = u.schedule["parts"]
        return self.launch_chunks(u, "all_reduce" if parts == 1 else "all_reduce_in_parts", parts, "x_ptr r_ptr")


class AllReduceNorm(Collective):
    """The sum over the ranks, in their order and in float32, plus a residual, and its RMS norm. Schedule: warps.

    A program computes whole rows.
    """

    constant_reduction_order = BY_SCHEDULE
    dtypes = FLOATS

    def reject(self, node: Node, target: Target) -> str | None:
        x = node.operands[0].type
        if why := super().reject(node, target):
            return why
        if x.shape[-1].const is None:
            return f"the size of a row, {x.shape[-1]}, is not constant"
        limit = 2 * CHUNK // LANE_BYTES
        lanes, _ = row_lanes(node)
        return f"a row of {x.shape[-1]} elements has {lanes} lanes, more than {limit}" if lanes > limit else None

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return tuple((i, r) for i in (0, 2)[: len(node.operands) - 1] for r in (0, 1))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        lanes, _ = row_lanes(node)
        fitting = [warps for warps in NORM_WARPS if 32 * warps <= max(32, next_power_of_2(lanes))]
        return [{"warps": warps} for warps in fitting[:3]]

    def chunks(self, node: Node, schedule: Schedule, env: Mapping[str, int], nbytes: int) -> int:
        return int(product(node.operands[0].type.shape[:-1]).subs(env))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        lanes, _ = row_lanes(node)
        per_thread = -(-lanes // (32 * schedule["warps"]))  # lanes that a thread computes one after the other
        return super().cost_us(node, schedule, target, env) + _NORM_US + _LANE_US * (per_thread - 1)

    def code(self, u: Unit) -> Code:
        x = u.node.operands[0].type
        lanes, per_lane = row_lanes(u.node)
        rows = product(x.shape[:-1])
        code = u.launch(
            Template("collectives", "all_reduce_norm"),
            (rows,),  # the runtime launches at most PROGRAMS
            **u.pointers("x_ptr w_ptr r_ptr", "sum_ptr y_ptr"),
            group=group(u, per_lane > 1),
            ROWS=u.sizes(rows),
            WIDTH=lanes,
            EPS=u.node.attrs["eps"],
            ELEMENTS=int(x.shape[-1]),
            LANES=max(32 * u.schedule["warps"], next_power_of_2(lanes)),
            PER_LANE=per_lane,
        )
        return replace(code, group=True)


def row_lanes(node: Node) -> tuple[int, int]:
    """Return the number of lanes of a row of the first operand, and that of a lane's elements."""
    x = node.operands[0].type
    width = int(x.shape[-1])
    per_lane = LANE_BYTES * 8 // DTYPES[x.dtype].bits
    return (width // per_lane, per_lane) if width % per_lane == 0 else (width, 1)


class AllGather(Collective):
    """The operands of all ranks, concatenated along an axis."""

    constant_reduction_order = EXACT

    def row(self, node: Node) -> Dim:
        shape = node.operands[0].type.shape
        return product(shape[node.attrs["axis"] % len(shape) :])

    def code(self, u: Unit) -> Code:
        return self.launch_chunks(u, "all_gather", 1, "x_ptr", WIDTH=self.row(u.node))


ALL_REDUCE = AllReduce("triton/all_reduce", ("all_reduce", "all_reduce_add"))
ALL_REDUCE_NORM = AllReduceNorm("triton/all_reduce_norm", ("all_reduce_norm",))
ALL_GATHER = AllGather("triton/all_gather", ("all_gather",))
