"""The sizes of a node of attention over pages, from which the bindings of kernels derive theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node


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
