"""The grouped products of experts over quantised weights in Triton. The kernel is in `kernels/quantized_moe.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from llmc.codegen.backends.triton.moe import NARROW, ROWS, Experts, ExpertTile, Grouped, pointer
from llmc.codegen.backends.triton.quantized_problem import halves, has_assembly, scales_factors
from llmc.codegen.backends.triton.template import Template, record
from llmc.codegen.backends.triton.triton_kernel import CODES, FLOAT8, Code, Unit, element, unsupported
from llmc.codegen.expert_stack import Stack, chosen_experts, overlapped, pack_stack, row_blocks
from llmc.codegen.kernel import Schedule
from llmc.ir.dtype import DTYPES, FLOATS, INTS
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.targets.target import Target

STEP = 32  # columns of a step of codes of 8 bits, of which groups are multiples
CONVERSION = 2.5  # operations per code to make it a factor
# Of codes of 4 bits, fitted to 220 measurements on an H200 (bench.gpu.experts):
_STEP_US = 2.0
_BLOCK = 128 * 128  # elements of a block that reaches _BLOCK_SHARE of the peak
_BLOCK_SHARE = 0.33
_EXPONENT = 0.39  # share of the peak ~ (elements per block) ** _EXPONENT
_BANDWIDTH_SHARE = 0.41
_BUSY = 0.31  # exponent of the share of multiprocessors with a program


class QuantizedExperts(Experts):
    """One grouped product over codes."""

    @cached_property
    def half(self) -> int:
        """Columns between the two codes of a byte, packed or to be packed; 0 if a byte is one code."""
        return int(self.node.attrs["half"]) or (halves(self.k, self.group) if self.narrow else 0)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return min(self.node.attrs["block"][1] or self.k, self.k)

    @property
    def block_rows(self) -> int:
        """Rows that share a scale."""
        return min(self.node.attrs["block"][0] or self.rows, self.rows)

    @property
    def dot(self) -> str:
        """The dtype of both factors in tl.dot: codes are converted to that of the left operand."""
        return self.left.dtype

    @property
    def late(self) -> bool:
        """Whether the sums are multiplied by the scales when they are complete."""
        return not self.half and self.group == self.k

    @property
    def expert_bytes(self) -> float:
        """The bytes of an expert's codes, as packed, and scales."""
        scale = self.node.operands[4].type
        codes = self.rows * self.k / (2 if self.half else 1)
        return codes + int(scale.nbytes) / self.experts

    @property
    def conversion(self) -> float:
        """Operations per code to make it a factor."""
        return CONVERSION


class QuantizedGrouped(Grouped):
    """quantized_moe_up and quantized_moe_down; codes of 4 bits are packed at compile time."""

    def experts(self, node: Node) -> QuantizedExperts:
        return QuantizedExperts(node)

    def reject(self, node: Node, target: Target) -> str | None:
        if node.attrs["act"]:
            return f"activations rounded to {node.attrs['act']}"
        if why := unsupported(node, (*FLOATS, *INTS, *FLOAT8), target):
            return why
        p = self.experts(node)
        return self.reject_sizes(node) or _reject_codes(p) or _reject_others(p)

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        p = self.experts(node)
        return p.layouts(p.half) if p.half and not node.attrs["half"] else {}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        pack_stack(g, node, self.experts(node).half, list(self.layouts(node, schedule, target)), ops)

    def tiles(self, p: Experts) -> Iterator[ExpertTile]:
        assert isinstance(p, QuantizedExperts)
        rows, tiles = (ROWS[:2], NARROW[-1:]) if p.dot == "f32" else (ROWS, NARROW)
        for bm in rows:
            for bn, _, warps, stages in tiles:
                yield ExpertTile(bm, bn, p.half or STEP, warps, stages)

    def fits(self, p: Experts, t: ExpertTile, target: Target) -> bool:
        assert isinstance(p, QuantizedExperts)
        bm, bn, bk, warps, stages = t
        if target.family == "hip" and stages > 2:  # Triton fails to compile deeper pipelines of converted codes
            return False
        buffers = stages if target.family == "cuda" else stages - 1
        columns = 2 * bk if p.half else bk
        shared = buffers * (bn * p.parts * bk + bm * columns * DTYPES[p.dot].bits // 8)
        return shared <= target.limits.shared and bm * bn * p.parts <= 128 * 32 * warps

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds. Of codes of 4 bits: a program's latency, or reading and arithmetic, which overlap."""
        p, s = self.experts(node), schedule
        if not p.half or p.dot == "f32":
            return super().cost_us(node, schedule, target, env)
        pairs = int(p.pairs.subs(env))
        area = s["bm"] * s["bn"] * p.parts
        chosen, blocks = chosen_experts(pairs, p.experts), row_blocks(pairs, p.experts, s["bm"])
        programs = blocks * -(-p.n // s["bn"])
        again = min(2.0, blocks / chosen - 1)  # times that a weight is read again, partly from the L2 cache
        busy = min(1.0, programs / target.limits.units) ** _BUSY
        read = chosen * p.expert_bytes * (1 + 0.25 * again) / target.bandwidth / busy / _BANDWIDTH_SHARE
        share = _BLOCK_SHARE * (area / _BLOCK) ** _EXPONENT
        products = 2.0 * programs * area * p.k / target.peaks[p.dot] / share
        latency = -(-p.k // (2 * p.half)) * _STEP_US
        return max(overlapped(read * 1e6, products * 1e6), latency) + target.launch_us

    def code(self, u: Unit) -> Code:
        p, a = self.experts(u.node), u.node.attrs
        scale_rows, groups = -(-p.rows // p.block_rows), -(-p.k // p.group)  # shape of an expert's scales
        scale = p.type("scale")
        assert scale is not None
        codes = record(
            "ExpertCodes", code_ptr="x3", scale_ptr=pointer(p, "scale"), zero_ptr=pointer(p, "zero"),
            HALF=p.half, BLOCK_ROWS=p.block_rows, GROUP=p.group, ENTRIES=scale_rows * groups,
            ROW_STRIDE=1 if p.half else groups, GROUP_STRIDE=scale_rows if p.half else 1,
            ZERO_POINT=a["zero_point"], E2M1=a["values"] == "e2m1", E4M3=p.code.dtype in FLOAT8,
            SCALED=scales_factors(p.half, u.schedule["bm"], scale.dtype, p.left.dtype),
            FACTOR="tl.float32" if u.interpret else element(p.left),
            ASSEMBLY=has_assembly(u, p.left),
        )  # fmt: skip
        return self.grouped(u, Template("quantized_moe", "quantized_moe"), codes=codes)


def _reject_codes(p: QuantizedExperts) -> str | None:
    """Return why the codes or their blocks are not supported, or None."""
    a = p.node.attrs
    if p.code.dtype == "u8":
        if a["bits"] > 4 or not 0 <= a["zero_point"] < 16:
            return f"codes of {a['bits']} bits in dtype u8 with the zero point {a['zero_point']}; 4 bits are supported"
        if p.block_rows != 1:
            return f"blocks of {list(a['block'])} of codes of 4 bits; a block has columns of one row"
        if not p.half:
            return f"{p.k} columns in blocks of {p.group}; both must be multiples of 32, and codes known when compiled"
        return None
    if p.code.dtype not in CODES:
        return f"codes of dtype {p.code.dtype}"
    if a["zeros"] or a["zero_point"]:
        return f"codes of dtype {p.code.dtype} with zero points"
    if p.late or p.group % STEP == 0:
        return None
    return f"blocks of {p.group} columns; multiples of {STEP} are supported"


def _reject_others(stack: Stack) -> str | None:
    """Return why another operand is not supported, or None."""
    zero = stack.type("zero")
    if zero is not None and zero.dtype != "u8":
        return f"zero points of dtype {zero.dtype}; u8 is supported"
    for name in ("scale", "weights", "bias"):
        t = stack.type(name)
        if t is not None and t.dtype not in FLOATS:
            return f"{name} of dtype {t.dtype}"
    x = stack.node.operands[0].type
    return None if x.dtype in FLOATS else f"rows of dtype {x.dtype}"


QUANTIZED_MOE_UP = QuantizedGrouped("triton/quantized_moe_up", ("quantized_moe_up",))
QUANTIZED_MOE_DOWN = QuantizedGrouped("triton/quantized_moe_down", ("quantized_moe_down",))
