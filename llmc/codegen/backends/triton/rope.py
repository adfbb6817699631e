"""Rotary embeddings in Triton: tables, the rotation, appends to the KV pool, and all of it in one launch.

The kernels are in `kernels/rope.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import ELEMENTS, FLOAT8, Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import BY_SCHEDULE, EXACT, Schedule, roofline_us
from llmc.ir.dim import Dim
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.ir.types import Type
from llmc.targets.target import Target

TABLE_TILE = 256  # table elements per program
ELEMENTS_PER_WARP = 256  # elements of each block per warp: 16 bytes per thread of 16-bit floats


@dataclass(frozen=True)
class Head:
    """A head of `d` elements of which pairs of the first `2 * r` are rotated."""

    d: int
    r: int
    interleaved: bool = False

    def constants(self) -> dict[str, Argument]:
        """Return the template parameters that describe the head."""
        rest = self.d - 2 * self.r
        return {
            "HEAD_DIM": self.d, "PAIRS": self.r, "PAIRS_PADDED": next_power_of_2(self.r),
            "REST_PADDED": next_power_of_2(rest), "INTERLEAVED": self.interleaved,
        }  # fmt: skip


class HeadKernel(TritonKernel):
    """Base class of kernels whose programs compute `rows` heads each."""

    constant_reduction_order = BY_SCHEDULE

    def heads(self, node: Node) -> tuple[Dim, int]:
        """Return (tokens, heads per token)."""
        raise NotImplementedError

    def float_types(self, node: Node) -> list[Type]:
        """Return the types that must be floats of at least 16 bits: all floats except pools."""
        values = [*node.operands, *node.results]
        return [t for v in values if (t := v.type).dtype not in ("i32", "i64") and not (t.state and t.dtype in FLOAT8)]

    def reject(self, node: Node, target: Target) -> str | None:
        if why := unsupported(node, target=target):
            return why
        if len({v.type.dtype for v in (node.operand("qw"), node.operand("kw")) if v}) > 1:
            return "the gains of queries and keys have different dtypes"
        if bad := next((t for t in self.float_types(node) if t.dtype not in FLOATS), None):
            return f"{bad} is not one of {', '.join(FLOATS)}"
        return None

    def head(self, node: Node) -> Head:
        """Return how a head of the node is divided into blocks."""
        raise NotImplementedError

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        head = self.head(node)
        rows = max(1, ELEMENTS_PER_WARP // next_power_of_2(max(head.r, head.d - 2 * head.r)))
        return [{"rows": rows * warps, "warps": warps} for warps in (1, 4)]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict microseconds: traffic, block starts (about 2 ns each on the whole GPU), and the time of a block."""
        tokens, heads = self.heads(node)
        blocks = (tokens.subs(env).const or 1) * heads / schedule["rows"]
        return roofline_us(node, target, env) + blocks * 2e-3 + schedule["rows"] * 2e-3

    def grid(self, u: Unit) -> tuple[Dim, ...]:
        """Return the number of programs."""
        tokens, heads = self.heads(u.node)
        return ((tokens * heads).ceildiv(u.schedule["rows"]),)


class RopeAppend(HeadKernel):
    """Head norms, rotation and the append to the pool: each head is read once and written once."""

    def heads(self, node: Node) -> tuple[Dim, int]:
        return node.operands[0].type.shape[0], int(node.attrs["heads"]) + 2 * int(node.operands[1].type.shape[2])

    def head(self, node: Node) -> Head:
        cos = node.operand("cos")
        return Head(
            int(node.operands[1].type.shape[4]), int(cos.type.shape[1]) if cos else 0, node.attrs["interleaved"]
        )

    def code(self, u: Unit) -> Code:
        n, kv = u.node, u.node.operands[1].type
        gains = [v for v in (n.operand("qw"), n.operand("kw")) if v]
        return u.launch(
            Template("rope", "rope_append"),
            self.grid(u),
            **u.pointers(
                "qkv_ptr - slots_ptr scales_ptr cos_ptr sin_ptr query_gain_ptr key_gain_ptr", "query_out_ptr kv_ptr"
            ),
            token_count=u.sizes(n.operands[0].type.shape[0]),
            HEADS=n.attrs["heads"],
            KV_HEADS=int(kv.shape[2]),
            PAGE=int(kv.shape[3]),
            **self.head(n).constants(),
            EPS=n.attrs["eps"],
            ROUND_DTYPE=ELEMENTS[n.attrs["dtype"]][0],
            ROWS=u.schedule["rows"],
            GAINS_SETTLED=bool(gains) and all(v.weight for v in gains),
        )


class Rope(HeadKernel):
    """The rotation without norm and append."""

    def heads(self, node: Node) -> tuple[Dim, int]:
        return node.operands[0].type.shape[0], int(node.operands[0].type.shape[1])

    def head(self, node: Node) -> Head:
        return Head(int(node.result.type.shape[2]), int(node.operands[1].type.shape[1]), node.attrs["interleaved"])

    def code(self, u: Unit) -> Code:
        tokens, heads = self.heads(u.node)
        return u.launch(
            Template("rope", "rope"),
            self.grid(u),
            **u.pointers("x_ptr cos_ptr sin_ptr", "out_ptr"),
            token_count=u.sizes(tokens),
            HEADS=heads,
            **self.head(u.node).constants(),
            ROWS=u.schedule["rows"],
        )

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        """In place: a program reads its heads before it writes them."""
        return ((0, 0),)


class KvAppend(HeadKernel):
    """Stores keys and values in their slots of the pool."""

    def heads(self, node: Node) -> tuple[Dim, int]:
        return node.operands[1].type.shape[0], int(node.operands[1].type.shape[1])

    def head(self, node: Node) -> Head:
        return Head(int(node.operands[1].type.shape[2]), 0)

    def code(self, u: Unit) -> Code:
        tokens, heads = self.heads(u.node)
        page, d = (int(s) for s in u.node.operands[0].type.shape[3:])
        return u.launch(
            Template("rope", "kv_append"),
            self.grid(u),
            **u.pointers("- key_ptr value_ptr slots_ptr scales_ptr", "kv_ptr"),
            token_count=u.sizes(tokens),
            KV_HEADS=heads,
            PAGE=page,
            HEAD_DIM=d,
            HEAD_DIM_PADDED=next_power_of_2(d),
            ROWS=u.schedule["rows"],
        )


class RopeTables(TritonKernel):
    """cos and sin of positions times frequencies, with exact reduction of large angles."""

    constant_reduction_order = EXACT

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"warps": 4}]

    def code(self, u: Unit) -> Code:
        cos = u.node.results[0].type
        total = cos.shape[0] * cos.shape[1]
        return u.launch(
            Template("rope", "rope_tables"),
            (total.ceildiv(TABLE_TILE),),
            **u.pointers("frequencies_ptr positions_ptr", "cos_ptr sin_ptr"),
            pairs=u.sizes(cos.shape[1]),
            elements=u.sizes(total),
            SCALING=u.node.attrs["scaling"],
            TILE=TABLE_TILE,
        )


ROPE_APPEND = RopeAppend("triton/rope_append", ("rope_append",))
ROPE = Rope("triton/rope", ("rope",))
ROPE_TABLES = RopeTables("triton/rope_tables", ("rope_tables",))
KV_APPEND = KvAppend("triton/kv_append", ("kv_append",))
