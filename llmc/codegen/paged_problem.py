"""The sizes of a node of attention over pages, from which the bindings of kernels derive theirs, and its types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node

HALVES, F8 = ("bf16", "f16"), "f8e4m3"  # dtypes of queries and of pools; of pools only
SINKS = ("f32", *HALVES)


@dataclass(frozen=True)
class PagedProblem:
    """The sizes of a node of paged attention.

    heads, kv_heads: of queries and of keys. size: elements of a head. page: tokens of a page. item: bytes of an element
    of the pool.
    """

    heads: int
    kv_heads: int
    size: int
    page: int
    item: int

    @classmethod
    def of(cls, node: Node) -> Self:
        """Read the problem from a node with constant sizes."""
        kv = node.operands[1].type
        kv_heads, page, size = (int(d) for d in kv.shape[2:])
        return cls(int(node.operands[0].type.shape[1]), kv_heads, size, page, DTYPES[kv.dtype].bits // 8)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads


def reject_types(node: Node) -> str | None:
    """Return why a kernel for queries of 16 bits and pools of them or of 8-bit floats does not support a node."""
    q, kv, sinks = node.operands[0].type, node.operands[1].type, node.operand("sinks")
    if q.dtype not in HALVES or kv.dtype not in (q.dtype, F8):
        return f"queries of {q.dtype} and a pool of {kv.dtype}; {' or '.join(HALVES)} for both, or {F8} for the pool"
    return f"sinks of {sinks.type.dtype}" if sinks and sinks.type.dtype not in SINKS else None
