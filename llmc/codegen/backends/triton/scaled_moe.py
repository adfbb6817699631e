"""Grouped expert products of quantised activations and weights in Triton. The kernel is in `kernels/scaled_moe.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmc.codegen.backends.triton.moe import ROWS, Experts, ExpertTile, Grouped
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import CODES, Code, Unit, unsupported
from llmc.codegen.expert_stack import chosen_experts, row_blocks
from llmc.codegen.kernel import Schedule
from llmc.ir.dtype import DTYPES, FLOATS, INTS
from llmc.ir.graph import Node
from llmc.targets.gpu_targets import REGISTERS
from llmc.targets.target import Target

STEPS = (128, 256, 64, 32)  # columns of a step; tl.dot needs 32 columns of 8 bits
# bn, warps, stages.
TILES = ((32, 4, 4), (64, 4, 4), (64, 4, 3), (128, 8, 3), (16, 4, 3))
MAX_SUMS = 64  # maximum float32 sums per thread with separate sums per group; half of the usual maximum
OTHER_REGISTERS = 40  # registers of a thread besides its sums
# Fitted to measurements on an H200 (cost_us):
_BLOCK = 80 * 128  # elements of a block that reaches _BLOCK_SHARE of the peak
_BLOCK_SHARE = 0.47
_BUSY = 1 / 3  # exponent of the share of multiprocessors with a program
_AGAIN = 0.05  # share of a weight's bytes that a second block of its expert reads from memory
_RESCALE_OPERATIONS = 16  # operations per sum and group
_STEP_US = 0.45  # of one program, of any number of columns
_PROGRAM_US = 1.1
_OVERLAP = 1.5  # exponent: 1 adds the times, infinity takes the longest


class ScaledExperts(Experts):
    """A grouped product of quantised factors."""

    @property
    def group(self) -> int:
        """Columns of the weight that share a scale."""
        return int(self.node.attrs["block"][1]) or self.k

    @property
    def block_rows(self) -> int:
        """Rows of the weight that share a scale."""
        return int(self.node.attrs["block"][0]) or self.rows

    @property
    def scales_at_end(self) -> bool:
        """Whether the sums are multiplied by the scales when they are complete."""
        return self.group == self.k

    @property
    def expert_bytes(self) -> float:
        """The bytes of an expert's codes and scales."""
        return super().expert_bytes + int(self.node.operands[4].type.nbytes) / self.experts


class ScaledGrouped(Grouped):
    """scaled_moe_up and scaled_moe_down."""

    def experts(self, node: Node) -> ScaledExperts:
        return ScaledExperts(node)

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, (*FLOATS, *CODES, *INTS), target):
            return why
        if why := self.reject_sizes(node):
            return why
        p = self.experts(node)
        if p.left.dtype != p.code.dtype or p.code.dtype not in CODES:
            return (
                f"codes of {p.left.dtype} and {p.code.dtype}; two of i8 or of one dtype of 8-bit floats are supported"
            )
        for name in ("scale", "weights", "bias"):
            t = p.type(name)
            if t is not None and t.dtype not in FLOATS:
                return f"{name} of dtype {t.dtype}"
        if p.scales_at_end or p.group % STEPS[-1] == 0:
            return None
        return f"groups of {p.group} columns are not a multiple of {STEPS[-1]}"

    def tiles(self, p: Experts) -> Iterator[ExpertTile]:
        assert isinstance(p, ScaledExperts)
        widest = max(STEPS[-1], next_power_of_2(p.k))
        steps = [s for s in STEPS if s <= widest and (p.scales_at_end or p.group % s == 0)]
        for bm in ROWS:
            for bn, warps, stages in TILES:
                yield from (ExpertTile(bm, bn, bk, warps, stages) for bk in steps[:2])

    def fits(self, p: Experts, t: ExpertTile, target: Target) -> bool:
        assert isinstance(p, ScaledExperts)
        return super().fits(p, t, target) and (p.scales_at_end or t.bm * t.bn * p.parts <= MAX_SUMS * 32 * t.warps)

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds from three times that overlap in part.

        They are the time of moving all bytes, that of the arithmetic, and that of the steps of one program, as many
        times as each multiprocessor has programs one after another. The choices are on average 3 % slower than the
        best of 2,048 measurements on an H200: 1 to 4,096 tokens of Qwen3-30B-A3B, with scales of rows and of blocks.
        """
        p, s = self.experts(node), schedule
        pairs, steps = int(p.pairs.subs(env)), -(-p.k // s["bk"])
        chosen, blocks = chosen_experts(pairs, p.experts), row_blocks(pairs, p.experts, s["bm"])
        programs = blocks * -(-p.n // s["bn"])
        turns = max(1.0, programs / (target.limits.units * self.resident(p, s, target)))
        busy = min(1.0, programs / target.limits.units) ** _BUSY
        weights = chosen * p.expert_bytes * (1 + _AGAIN * min(2.0, blocks / chosen - 1))
        area = s["bm"] * s["bn"] * p.parts
        share = _BLOCK_SHARE * min(1.0, area / _BLOCK) ** 0.5
        scaled = 0.0 if p.scales_at_end else programs * area * (p.k / p.group) * _RESCALE_OPERATIONS
        times = (
            (weights + pairs * (p.k + 2 * p.n)) / target.bandwidth / busy * 1e6,
            (2.0 * programs * area * p.k / target.peaks[p.dot] / share + scaled / target.peaks["f32"]) * 1e6,
            turns * (steps * _STEP_US + _PROGRAM_US),
        )
        return float(sum(t**_OVERLAP for t in times) ** (1 / _OVERLAP)) + target.launch_us

    def resident(self, p: ScaledExperts, s: Schedule, target: Target) -> int:
        """Return the number of programs that a multiprocessor runs at a time."""
        sums = s["bm"] * s["bn"] * p.parts // (32 * s["warps"]) * (1 if p.scales_at_end else 2)
        registers = 32 * s["warps"] * min(255, OTHER_REGISTERS + sums)
        return max(1, min(target.limits.shared // self.shared_bytes(p, s, target), REGISTERS // registers))

    def code(self, u: Unit) -> Code:
        p = self.experts(u.node)
        integers = DTYPES[p.code.dtype].kind == "i" and not u.interpret
        return self.grouped(
            u, Template("scaled_moe", "scaled_moe"), code_ptr="x3", scale_ptr="x4", x_scale_ptr="x5",
            BLOCK_ROWS=p.block_rows, GROUP=p.group, SUM="tl.int32" if integers else "tl.float32",
            FLOAT32_FACTORS=u.interpret,
        )  # fmt: skip


SCALED_MOE_UP = ScaledGrouped("triton/scaled_moe_up", ("scaled_moe_up",))
SCALED_MOE_DOWN = ScaledGrouped("triton/scaled_moe_down", ("scaled_moe_down",))
