"""The products of a mixture's experts for few tokens, whose pairs need no sorting: streams of weight rows.

The kernels are in `kernels/gathered_moe.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmc.codegen.backends.triton.gemv import StreamTile, joint_sum
from llmc.codegen.backends.triton.moe import epilogue
from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, unsupported
from llmc.codegen.emit import unsupported_dtype
from llmc.codegen.expert_stack import Stack
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

# Columns of a program in all parts, depth of a step, warps, steps that are loaded ahead; fastest first, as measured for
# Qwen3-30B-A3B on an H100. Within the step of an H200, the first of DOWN is 7 % of the step faster than the last.
UP = tuple(
    StreamTile(*tile)
    for tile in ((2, 1024, 4, 2), (2, 2048, 4, 1), (2, 2048, 8, 1), (4, 512, 2, 4), (8, 2048, 8, 1), (4, 1024, 4, 2))
)
DOWN = tuple(
    StreamTile(*tile)
    for tile in ((8, 1024, 8, 2), (2, 1024, 4, 8), (4, 1024, 8, 8), (2, 1024, 8, 2), (4, 256, 4, 12), (8, 1024, 8, 4))
)
CHOSEN, WEIGHT = 1, 2  # the operands that are the experts of each token, and the stack
_READ = 0.92  # share of the bandwidth
_FURTHER = 0.01  # each schedule is assumed to be slower by this share than the one before it


@dataclass(frozen=True)
class Gathered(TritonKernel):
    """The base class: a program streams the weights of the experts of one pair, or of one token."""

    constant_reduction_order: ClassVar[str | None] = BY_SCHEDULE
    parts: int = 1
    tiles: tuple[StreamTile, ...] = DOWN

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported_dtype(node, FLOATS, besides=(CHOSEN,)):
            return why
        constant = [*node.operands[WEIGHT].type.shape, node.operands[CHOSEN].type.shape[1]]
        if any(d.const is None for d in constant):
            return f"the experts' sizes {node.operands[WEIGHT].type} and their number per token are not constant"
        return unsupported(node)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        fitting_tiles = [self.fit(node, tile, target) for tile in self.tiles]
        return [tile._asdict() for tile in dict.fromkeys(fitting_tiles)]

    def fit(self, node: Node, tile: StreamTile, target: Target) -> StreamTile:
        """Adapt a tile to the sizes: a thread reads 16 bytes of a row at once, and few columns are past the end."""
        w = node.operands[WEIGHT].type
        k = int(w.shape[2])
        n = int(w.shape[1]) // self.parts
        bn, bk, warps, stages = tile
        lanes = target.limits.warp * 128 // DTYPES[w.dtype].bits
        bk = min(bk, max(lanes, next_power_of_2(k)))
        bn = min(max(1, bn // self.parts), next_power_of_2(n))
        while warps > 1 and lanes * warps > bn * bk:
            warps //= 2
        return StreamTile(bn, bk, warps, min(stages, self.steps(node, bk)))

    def steps(self, node: Node, bk: int) -> int:
        """Steps of a program."""
        return -(-int(node.operands[WEIGHT].type.shape[2]) // bk)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        w = node.operands[WEIGHT].type
        pairs = int(node.operands[CHOSEN].type.numel.subs(env))
        moved = pairs * int(w.shape[1]) * int(w.shape[2]) * DTYPES[w.dtype].bits / 8
        slower = 1 + _FURTHER * self.schedules(node, target).index({k: schedule[k] for k in StreamTile._fields})
        return moved / target.bandwidth / _READ * 1e6 * slower + target.launch_us

    def common(self, u: Unit) -> dict[str, Argument]:
        """Return the arguments that both templates have."""
        w, s = u.node.operands[WEIGHT].type, u.schedule
        return {
            "CHOICES": int(u.node.operands[CHOSEN].type.shape[1]),
            "N": int(w.shape[1]) // self.parts,
            "K": int(w.shape[2]),
            "BLOCK_N": s["bn"],
            "BLOCK_K": s["bk"],
            "AHEAD": s["stages"],
        }

    def columns(self, node: Node, schedule: Schedule) -> Dim:
        """Programs along the columns of the result."""
        return D(-(-(int(node.operands[WEIGHT].type.shape[1]) // self.parts) // schedule["bn"]))


@dataclass(frozen=True)
class GatherUp(Gathered):
    """moe_gather_up and norm_moe_gather_up: a program computes some columns of one pair."""

    def reject(self, node: Node, target: Target) -> str | None:
        return super().reject(node, target) or ("experts without a gate" if Stack(node).parts == 1 else None)

    def code(self, u: Unit) -> Code:
        operands = "x_ptr idx_ptr weight_ptr bias_ptr"
        if u.node.op.name.startswith("norm"):
            operands = "x_ptr idx_ptr weight_ptr gain_ptr bias_ptr"
        joint = not u.interpret  # the interpreter would reduce the sums element by element
        return u.launch(
            Template("gathered_moe", "moe_gather_up"),
            (self.columns(u.node, u.schedule), u.node.operands[CHOSEN].type.numel),
            0,
            1,
            (joint_sum(2) if joint else "", *epilogue(u.node)),
            **{"gain_ptr": None, **u.pointers(operands, "out_ptr")},
            **self.common(u),
            EPS=u.node.attrs.get("eps"),
            JOINT_SUM="joint_sum" if joint else None,
            EPILOGUE="epilogue",
        )


@dataclass(frozen=True)
class GatherDown(Gathered):
    """moe_gather_down: a program computes some columns of one token."""

    def reads_before_wait(self, node: Node) -> tuple[int, ...]:
        return CHOSEN, WEIGHT

    def steps(self, node: Node, bk: int) -> int:
        return int(node.operands[CHOSEN].type.shape[1]) * super().steps(node, bk)

    def code(self, u: Unit) -> Code:
        return u.launch(
            Template("gathered_moe", "moe_gather_down"),
            (self.columns(u.node, u.schedule), u.node.operands[CHOSEN].type.shape[0]),
            0,
            1,
            **u.pointers("x_ptr idx_ptr weight_ptr scale_ptr residual_ptr bias_ptr", "out_ptr"),
            **self.common(u),
            EARLY_WEIGHTS=u.reads_before_wait,
        )


MOE_GATHER_UP = GatherUp("triton/moe_gather_up", ("moe_gather_up", "norm_moe_gather_up"), parts=2, tiles=UP)
MOE_GATHER_DOWN = GatherDown("triton/moe_gather_down", ("moe_gather_down",))
