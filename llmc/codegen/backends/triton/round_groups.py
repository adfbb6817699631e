"""Rounds rows to codes with a scale for each group of columns; the rows are computed as those of row_kernels are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.codegen.backends.triton.row_kernels import Writer, programs, row_schedules
from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import cost_us
from llmc.codegen.backends.triton.triton_expr import fold, helpers, stored
from llmc.codegen.backends.triton.triton_kernel import CODES, Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.codegen.row_program import RowProgram
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.ir.ops.quantized_linear import ACTIVATIONS
from llmc.ir.scalar import parse_expr
from llmc.targets.target import Target

WIDEST_GROUP = 1024  # every tile of columns is a whole number of groups


def program(node: Node) -> RowProgram:
    """Return the row program of the numbers to round; the results have the rows of its only root."""
    return RowProgram(node, [fold(parse_expr(node.attrs["body"]))])


class RoundGroups(TritonKernel):
    """round_groups. Schedule: as that of triton/rows."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, (*FLOATS, *CODES), target):
            return why
        group = node.attrs["group"]
        if any(v.type.dtype not in FLOATS for v in node.operands):
            return "an operand is not of a float dtype"
        if group & (group - 1) or group > WIDEST_GROUP:
            return f"groups of {group} columns; powers of two to {WIDEST_GROUP} are supported"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        group = node.attrs["group"]
        return [s for s in row_schedules(program(node), target) if s["cols"] % group == 0]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        rows, cols = programs(program(node), schedule)
        return cost_us(node, target, env, rows * cols, schedule["warps"])

    def code(self, u: Unit) -> Code:
        w = GroupWriter(u, program(u.node))
        body = w.looped() if w.loops else w.unrolled()
        rows, cols = programs(w.p, u.schedule)
        called = helpers([fn for fn, _ in w.p.dag.nodes], u.interpret)
        text = Template("round_groups", "round_groups").text()
        return Code(body, (rows * cols,), "\n\n\n".join(filter(None, (called, text))), u.schedule["warps"])


@dataclass
class GroupWriter(Writer):
    """Prints a row program whose result is stored as codes and scales."""

    @property
    def group(self) -> int:
        """The columns that share a scale."""
        return int(self.u.node.attrs["group"])

    def _columns(self, start: str) -> list[str]:
        lines = super()._columns(start)
        first = f"tl.arange(0, {self.cols // self.group}){'[None, :]' if self.tall else ''} * {self.group}"
        return [*lines, f"first = {start}{first}"]

    def store(self, k: int) -> str:
        root, dtype = self.p.roots[k], self.u.node.attrs["dtype"]
        offset, mask = self.place(self.p.count + k)
        groups = offset.removeprefix(" + ").replace("col", "first")
        inside = mask.replace("inside", f"(first < {self.width()})")
        limit, whole = ACTIVATIONS[dtype], DTYPES[dtype].kind == "i"
        return "\n".join(
            (
                f"codes, scales = round_groups({self.names[root]}, {self.group}, {limit}, {whole})",
                f"tl.store(y0{offset}, {stored('codes', 'f32', dtype)}{mask})",
                f"tl.store(y1 + ({groups}) // {self.group}, scales{inside})",
            )
        )


ROUND_GROUPS = RoundGroups("triton/round_groups", ("round_groups",))
