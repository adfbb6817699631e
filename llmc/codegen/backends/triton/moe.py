"""Mixtures of experts in Triton: routing, the grouped products of the experts, and the sum of a token's experts.

The kernels are in `kernels/moe.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from llmc.codegen.backends.triton.gemm_small import LINE_BYTES
from llmc.codegen.backends.triton.template import Argument, Template, function, record
from llmc.codegen.backends.triton.tiling import dot_order, next_power_of_2, previous_power_of_2
from llmc.codegen.backends.triton.triton_expr import helpers, inline
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, unsupported
from llmc.codegen.emit import unsupported_dtype
from llmc.codegen.expert_stack import STARTS, Stack, chosen_experts, overlapped, row_blocks
from llmc.codegen.kernel import BY_SCHEDULE, EXACT, Schedule
from llmc.ir.cost import node_cost
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import DTYPES, FLOATS, INTS
from llmc.ir.graph import Node
from llmc.ir.ops.moe import gate
from llmc.ir.scalar import walk
from llmc.ir.types import Type
from llmc.targets.target import Target

CHUNKS = ((1024, 4), (8192, 8))  # pairs that a routing program reads at once, and its warps
COMBINED = ((512, 4), (256, 2))  # columns of a program that adds up choices, and its warps
PREFETCHED = 18 << 20  # bytes of weights that programs prefetch together, a third of an H200's L2 cache
MAX_CHOICES = 64  # of a token, whose loads are unrolled
MAX_EXPERTS = 4096  # experts whose pairs a program can count at once
# bn, bk, warps, stages
NARROW = ((32, 128, 4, 4), (64, 128, 4, 4), (64, 64, 4, 3), (32, 64, 4, 2), (16, 32, 4, 2))
ROWS = (16, 32, 64, 128)
# Of bf16 products:
_BANDWIDTH_SHARE = 0.94
_BLOCK = 128 * 128  # elements of a block that reaches _BLOCK_SHARE of the peak
_BLOCK_SHARE = 0.57
_BUSY = 0.45  # exponent of the share of multiprocessors with a program
_PROGRAM_US = 3.0
_STEP_US = 0.8


class ExpertTile(NamedTuple):
    """The tile of a program of a grouped product; the fields are the entries of its schedule.

    bm: rows, of one expert. bn: weight rows of each part. bk: columns of a step. stages: steps in flight.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


FLOAT = (ExpertTile(16, 32, 32, 4, 2), ExpertTile(32, 32, 16, 4, 2))  # without tensor cores


class Route(TritonKernel):
    """moe_route, one program per expert: counts the pairs of earlier experts, then stores its own after them."""

    constant_reduction_order = EXACT
    dtypes = INTS

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        pairs = node.operands[0].type.numel.const
        if pairs is not None and pairs <= CHUNKS[0][0]:
            return [{"chunk": next_power_of_2(max(16, pairs)), "warps": CHUNKS[0][1]}]
        return [{"chunk": chunk, "warps": warps} for chunk, warps in CHUNKS]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        pairs, chunk = int(node.operands[0].type.numel.subs(env)), schedule["chunk"]
        return target.launch_us + 0.5 + 2 * -(-pairs // chunk) * (0.5 + 0.1 * chunk / 1024)

    def code(self, u: Unit) -> Code:
        experts, numel = u.node.attrs["experts"], u.node.operands[0].type.numel
        return u.launch(
            Template("moe", "moe_route"),
            (experts,),
            u.schedule["warps"],
            1,
            **u.pointers("experts_ptr", "order_ptr starts_ptr"),
            pairs=u.sizes(numel),
            EXPERTS=experts,
            CHUNK=u.schedule["chunk"],
            EAGER_LAUNCH=u.triggers_before_wait,
        )


class Experts(Stack):
    """One grouped product: rows of `left` times the weights of their expert."""

    @property
    def left(self) -> Type:
        """The type of the left operand."""
        return self.node.operands[0].type

    @property
    def pairs(self) -> Dim:
        """The number of (token, expert) pairs."""
        return self.node.operands[1].type.shape[0]

    @property
    def expert_bytes(self) -> float:
        """The bytes of an expert's weights."""
        return self.rows * self.k * DTYPES[self.code.dtype].bits / 8

    @property
    def conversion(self) -> float:
        """Operations per weight to make it a factor."""
        return 0.0

    @property
    def dot(self) -> str:
        """The dtype of both factors in tl.dot: their own if equal, else float32."""
        return self.left.dtype if self.left.dtype == self.code.dtype else "f32"

    def blocks(self, bm: int) -> Dim:
        """Return the number of row blocks for the worst routing: every expert may have a block that is not full."""
        limit = self.pairs.ceildiv(bm) + self.experts
        return limit if self.pairs.const is None else D(min(self.pairs.const, int(limit)))


class Grouped(TritonKernel):
    """The base class of moe_up and moe_down."""

    constant_reduction_order = BY_SCHEDULE

    def experts(self, node: Node) -> Experts:
        """Return the problem of a node."""
        raise NotImplementedError

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        return (STARTS,)

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported_dtype(node, FLOATS, besides=(1, 2)) or self.reject_sizes(node)

    @staticmethod
    def reject_sizes(node: Node) -> str | None:
        """Return why the sizes of the stack are not supported, or None."""
        w = node.operands[3].type
        if any(d.const is None for d in w.shape):
            return f"the experts' sizes {w} are not constant"
        count = int(w.shape[0])
        return f"{count} experts; the maximum is {MAX_EXPERTS}" if count > MAX_EXPERTS else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        p = self.experts(node)
        return [t._asdict() for t in self.tiles(p) if self.fits(p, t, target)]

    def tiles(self, p: Experts) -> Iterator[ExpertTile]:
        """Yield the tiles to try."""
        if p.dot == "f32":
            yield from FLOAT
        else:
            yield from (ExpertTile(bm, *t) for bm in ROWS for t in NARROW)

    def fits(self, p: Experts, t: ExpertTile, target: Target) -> bool:
        """Return whether a tile fits shared memory and registers."""
        shared = self.shared_bytes(p, t._asdict(), target)
        return shared <= target.limits.shared and t.bm * t.bn * p.parts <= 128 * 32 * t.warps

    @staticmethod
    def shared_bytes(p: Experts, s: Schedule, target: Target) -> int:
        """Return the bytes of the buffers of a program in shared memory."""
        buffers = s["stages"] if target.family == "cuda" else s["stages"] - 1
        return int(buffers * (s["bn"] * p.parts + s["bm"]) * s["bk"] * DTYPES[p.dot].bits // 8)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the larger of two times.

        Reading the chosen experts (assumed as many as there are pairs) once per block of rows plus half of the
        arithmetic; and the arithmetic at a share of the peak.
        """
        p, s = self.experts(node), schedule
        pairs = int(p.pairs.subs(env))
        chosen = min(pairs, p.experts)
        passes = -(-pairs // (chosen * s["bm"]))
        weights = chosen * p.expert_bytes
        columns = -(-p.n // s["bn"])
        busy = min(1.0, 1.6 * chosen * columns / target.limits.units)
        moved = weights * (1 + 0.3 * (passes - 1)) / target.bandwidth / (0.8 * busy)
        flops = 2.0 * chosen * passes * s["bm"] * columns * s["bn"] * p.parts * p.k
        best = flops / target.peaks[p.dot]
        converting = 2.0 * p.conversion * chosen * passes * columns * s["bn"] * p.parts * p.k / target.peaks["f32"]
        share = 0.3 if s["bn"] < 64 else 0.5
        steps = chosen * passes * columns / target.limits.units * -(-p.k // s["bk"]) * 0.02  # us of loop overhead
        return max(moved + 0.5 * best, best / share + converting) * 1e6 + steps + target.launch_us

    def grouped(self, u: Unit, template: Template, /, **arguments: Argument) -> Code:
        """Return the code of a call of a template, with its `ExpertProduct` and its epilogue added to the arguments."""
        p, s = self.experts(u.node), u.schedule
        product = record(
            "ExpertProduct",
            x_ptr="x0",
            order_ptr="x1",
            starts_ptr="x2",
            weights_ptr=pointer(p, "weights"),
            bias_ptr=pointer(p, "bias"),
            out_ptr="y0",
            CHOICES=u.node.attrs["k"] if p.up else 0,
            EXPERTS=p.experts,
            EXPERTS_PADDED=next_power_of_2(p.experts),
            N=p.n,
            K=p.k,
            PARTS=p.parts,
            BLOCK_M=s["bm"],
            BLOCK_N=s["bn"],
            BLOCK_K=s["bk"],
            STAGES=s["stages"],
        )
        arguments |= {"product": product, "EARLY_ROWS": u.reads_before_wait, "EPILOGUE": "epilogue"}
        grid = (D(-(-p.n // s["bn"])), p.blocks(s["bm"]))
        return u.launch(template, grid, 0, 0, epilogue(u.node), **arguments)


def pointer(stack: Stack, name: str) -> str | None:
    """Return the pointer of an operand of a stack, or None if its node lacks it."""
    i = stack.operand(name)
    return None if i is None else f"x{i}"


def epilogue(node: Node) -> tuple[str, ...]:
    """Generate the function of the sums of each part, and its helpers."""
    stack = Stack(node)
    if not stack.up:
        return (function("epilogue(sums)", "The sum of the only part.", ["return sums[0]"]),)
    body = gate(node.attrs["body"])
    lines, value = inline(body, ["gate", "up"])
    doc = f"{body}; a0 is gate, a1 is up."
    return helpers(e.fn for e in walk(body)).strip(), function(
        "epilogue(sums)", doc, ["gate, up = sums" if stack.parts == 2 else "gate = sums[0]", *lines, f"return {value}"]
    )


class FloatGrouped(Grouped):
    """moe_up and moe_down: products whose weights are factors as they are stored."""

    def experts(self, node: Node) -> Experts:
        return Experts(node)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: the time of reading the chosen experts and that of the arithmetic, which overlap.

        The share of the peak depends on a block's elements. Measured on an H200 (bench.gpu.experts).
        """
        p, s = self.experts(node), schedule
        if p.dot == "f32":
            return super().cost_us(node, schedule, target, env)
        pairs = int(p.pairs.subs(env))
        columns = -(-p.n // s["bn"])
        chosen, blocks = chosen_experts(pairs, p.experts), row_blocks(pairs, p.experts, s["bm"])
        again = min(2.0, blocks / chosen - 1)  # times that a weight is read again, partly from the L2 cache
        read = chosen * p.expert_bytes * (1 + 0.25 * again) / target.bandwidth
        programs = blocks * columns
        busy = min(1.0, programs / target.limits.units) ** _BUSY
        area = s["bm"] * s["bn"] * p.parts
        share = _BLOCK_SHARE * (area / _BLOCK) ** 0.35 * (1.0 if s["bn"] >= 64 else 0.7)
        if s["bm"] >= 64 and area < _BLOCK and 2 * self.shared_bytes(p, s, target) > target.limits.shared:
            share *= 0.8  # no second program hides the waits of a small one
        products = 2.0 * programs * area * p.k / target.peaks[p.dot] / share
        latency = _PROGRAM_US + -(-p.k // s["bk"]) * _STEP_US * (s["bk"] / 128) ** 0.5
        return max(overlapped(read / busy / _BANDWIDTH_SHARE * 1e6, products * 1e6), latency) + target.launch_us

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        return dot_order(target, self.experts(node).dot, schedule["bn"], schedule["bm"], schedule["warps"])

    def code(self, u: Unit) -> Code:
        p = self.experts(u.node)
        wide = u.interpret or p.left.dtype != p.code.dtype
        return self.grouped(
            u,
            Template("moe", "moe_product"),
            weight_ptr="x3",
            pairs=u.sizes(p.pairs),
            ahead=self.prefetch(u, p),
            FLOAT32_FACTORS=wide,
        )

    def prefetch(self, u: Unit, p: Experts) -> str:
        """Return the template's `Prefetch`. Only the first product prefetches weights.

        Before it, short launches choose the experts while the memory is idle; before the second product, the first one
        reads its weights.
        """
        if not (u.pdl and p.up):
            return record("Prefetch", PROGRAMS=0, LINE=1, LINES=0)
        line, s, limits = LINE_BYTES * 8 // DTYPES[p.code.dtype].bits, u.schedule, u.target.limits
        programs = limits.units * (limits.shared // self.shared_bytes(p, s, u.target))
        most = PREFETCHED // (programs * s["bn"] * p.parts * LINE_BYTES)
        lines = previous_power_of_2(max(1, min(most, p.k // line)))
        return record("Prefetch", PROGRAMS=programs, LINE=line, LINES=lines)


class Combine(TritonKernel):
    """moe_combine: a program adds up the choices of one token for some columns."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        _, choices, columns = node.operands[0].type.shape
        if choices.const is None or columns.const is None:
            return f"the sizes {choices} and {columns} are not constant"
        if choices.const > MAX_CHOICES:
            return f"{choices} choices; the maximum is {MAX_CHOICES}"
        return unsupported(node, FLOATS)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        columns = next_power_of_2(int(node.result.type.shape[-1]))
        offered = [{"cols": min(columns, cols), "warps": warps} for cols, warps in COMBINED]
        return [s for i, s in enumerate(offered) if s not in offered[:i]]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        tokens, columns = (int(d.subs(env)) for d in node.result.type.shape)
        programs = tokens * -(-columns // schedule["cols"])
        busy = min(1.0, programs * schedule["warps"] / (8 * target.limits.units))  # share of the bandwidth
        moved = int(node_cost(node)[1].subs(env)) / target.bandwidth / busy * 1e6
        return moved + 0.002 * programs / schedule["warps"] + target.launch_us

    def code(self, u: Unit) -> Code:
        tokens, columns = u.node.result.type.shape
        return u.launch(
            Template("moe", "moe_combine"),
            (tokens, columns.ceildiv(u.schedule["cols"])),
            0,
            1,
            **u.pointers("y_ptr residual_ptr", "out_ptr"),
            CHOICES=int(u.node.operands[0].type.shape[1]),
            N=int(columns),
            BLOCK_N=u.schedule["cols"],
        )


MOE_ROUTE = Route("triton/moe_route", ("moe_route",), can_trigger_before_wait=True)
MOE_UP = FloatGrouped("triton/moe_up", ("moe_up",), preloads=True)
MOE_DOWN = FloatGrouped("triton/moe_down", ("moe_down",))
MOE_COMBINE = Combine("triton/moe_combine", ("moe_combine",))
