"""Collectives by NCCL, which GPUs without access to each other's memory can use. The device makes the calls.

A source is a JSON object: the function of NCCL, and the dtype of the elements that it counts. A launch passes the
operand, the result, and the number of elements of the operand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from llmc_runtime.format.names import NCCL
from llmc_runtime.format.nccl_call import ALL_GATHER as GATHER
from llmc_runtime.format.nccl_call import ALL_REDUCE as REDUCE
from llmc_runtime.format.nccl_call import DTYPES as SUPPORTED

from llmc.codegen.emit import unsupported_dtype
from llmc.codegen.kernel import EXACT, Kernel, Schedule, Source
from llmc.ir.dim import product
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

_MOVED = MappingProxyType(
    {8: "u8", 16: "f16", 32: "i32", 64: "i64"}
)  # bits of an element -> dtype as which it is copied
# Times measured with two and four H200s, NCCL 2.28, 2026-11-22:
_CALL_US = 3.3  # a call
_RANK_US = 1.5  # each rank


class Collective(Kernel):
    """A collective of NCCL."""

    function = ""
    passes_over_link = 1  # over the ring of ranks, in each of which a rank sends all parts but one
    waits_first = True

    def reject(self, node: Node, target: Target) -> str | None:
        return "the group has one rank" if node.attrs["ranks"] < 2 else None

    def dtype(self, node: Node) -> str:
        """Return the dtype of the elements of the call."""
        raise NotImplementedError

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        x = node.operands[0].type
        text = json.dumps({"function": self.function, "dtype": self.dtype(node)}) + "\n"
        return Source(self.function, NCCL, text, (x.numel,))

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the time between GPUs that are linked, in microseconds."""
        ranks = node.attrs["ranks"]
        nbytes = int(node.result.type.nbytes.subs(env)) * (ranks - 1) / ranks
        return _CALL_US + _RANK_US * ranks + self.passes_over_link * nbytes / target.link * 1e6


class AllReduce(Collective):
    """The sum over the ranks, in an order that depends on its size."""

    function = REDUCE
    passes_over_link = 2

    def reject(self, node: Node, target: Target) -> str | None:
        return super().reject(node, target) or unsupported_dtype(node, FLOATS)

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)

    def dtype(self, node: Node) -> str:
        dtype = node.operands[0].type.dtype
        assert dtype in SUPPORTED
        return dtype


class AllGather(Collective):
    """The operands of all ranks, one after the other: the concatenation along the first axis of more than one element.

    The pass `gather-first` rewrites all others to this form.
    """

    function = GATHER
    constant_reduction_order = EXACT

    def reject(self, node: Node, target: Target) -> str | None:
        x, axis = node.operands[0].type, node.attrs["axis"]
        if DTYPES[x.dtype].bits not in _MOVED:
            return f"elements of {DTYPES[x.dtype].bits} bits"
        if product(x.shape[: axis % x.rank]).const != 1:
            return f"the parts of {x} along axis {axis} are not contiguous in the result"
        return super().reject(node, target)

    def dtype(self, node: Node) -> str:
        return _MOVED[DTYPES[node.operands[0].type.dtype].bits]


ALL_REDUCE = AllReduce("nccl/all_reduce", ("all_reduce",), NCCL)
ALL_GATHER = AllGather("nccl/all_gather", ("all_gather",), NCCL)
