"""Log-probabilities of the drawn id and of the likeliest ids; rows that did not request them return at once.

The kernel is in `kernels/logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.template import Template, record
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

RESULTS = "logprob_ptr rank_ptr ids_ptr logprobs_ptr"  # result parameters of row_logprobs


def results(u: Unit, names: str) -> str:
    """Return the argument for the results of the template; `names` are those of the node's results, see `pointers`."""
    k = int(u.node.attrs["k"])
    return record("LogprobResults", **u.pointers("", names), COUNT=k, COUNT_PADDED=next_power_of_2(k))


def too_few(node: Node) -> str | None:
    """Return why the row is too short for k likeliest ids, or None."""
    v, k = node.operands[0].type.shape[1], node.attrs["k"]
    return f"the {k} likeliest of {v} ids" if v.const is None or v.const < k else None


class Logprobs(TritonKernel):
    """row_logprobs, one program per entry; without the operand `rows`, all entries are computed."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        if len(node.operands) == 3:
            return "the operand iparams is missing"
        return too_few(node) or unsupported(node, (*FLOATS, "i32"))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"tile": 8192, "warps": 16}, {"tile": 4096, "warps": 8}]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the time of rows without log-probabilities; wider tiles, faster for the others, rank first."""
        return target.launch_us + 1.0 + 0.1 * 8192 / schedule["tile"]

    def code(self, u: Unit) -> Code:
        rows, columns = u.node.operands[0].type.shape
        v = int(columns)
        tile = min(int(u.schedule.get("tile", 8192)), next_power_of_2(v))
        return u.launch(
            Template("logprobs", "row_logprobs"),
            (rows,),
            u.schedule.get("warps", 16),
            **u.pointers("logits_ptr drawn_ptr rows_ptr ints_ptr", ""),
            results=results(u, RESULTS),
            VOCAB=v,
            TILE=tile,
            TILES_PADDED=next_power_of_2(-(-v // tile)),
        )


ROW_LOGPROBS = Logprobs("triton/row_logprobs", ("row_logprobs",), "triton")
