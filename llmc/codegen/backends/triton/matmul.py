"""Batched products on tensor cores, of activations and of heads. Every size may be known only at run time."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import dot_order
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import Schedule
from llmc.ir.cost import node_cost
from llmc.ir.dim import Dim, product
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

TILES = ((64, 64, 64, 4, 3), (128, 128, 32, 8, 3), (16, 64, 64, 4, 3), (32, 32, 32, 4, 2))
# float32 factors are multiplied without tensor cores.
FLOAT_TILES = ((32, 32, 16, 4, 2), (64, 64, 16, 4, 2))
HEADS = "head_matmul"
_PEAK_SHARE = 0.6  # share of the peak that a tile of 128 x 128 reaches


class Matmul(TritonKernel):
    """matmul: [*b, m, k] x [*b, k, n]; head_matmul: [m, b, k] x [b, k, n]."""

    def reject(self, node: Node, target: Target) -> str | None:
        if node.op.name == HEADS and node.operands[0].type.shape[1].const is None:
            return "the number of heads must be constant"
        return unsupported(node, FLOATS)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        keys = ("bm", "bn", "bk", "warps", "stages")
        tiles = FLOAT_TILES if factor(node) == "f32" else TILES
        return [dict(zip(keys, t, strict=True)) for t in tiles]

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        return dot_order(target, factor(node), schedule["bm"], schedule["bn"], schedule["warps"])

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the larger of arithmetic time, in whole waves of tiles, and memory time, in microseconds."""
        b, m, k, n = (int(d.subs(env)) for d in sizes_of(node))
        bm, bn = schedule["bm"], schedule["bn"]
        rows, columns = -(-m // bm), -(-n // bn)
        flops = 2.0 * b * rows * bm * columns * bn * k
        blocks, units = max(1, b * rows * columns), target.limits.units
        share = _PEAK_SHARE * (bm * bn / 16384) ** 0.25 * blocks / (-(-blocks // units) * units)
        moved = int(node_cost(node)[1].subs(env)) / target.bandwidth
        return max(flops / target.peaks[factor(node)] / share, moved) * 1e6 + target.launch_us

    def code(self, u: Unit) -> Code:
        s = u.schedule
        b, m, k, n = sizes_of(u.node)
        rows, columns = m.ceildiv(s["bm"]), n.ceildiv(s["bn"])
        left, right = (v.type.dtype for v in u.node.operands)
        return u.launch(
            Template("matmul", "matmul"),
            (columns * rows * b,),
            **u.pointers("left_ptr right_ptr", "out_ptr"),
            M=u.sizes(m),
            K=u.sizes(k),
            N=u.sizes(n),
            ROW_TILES=u.sizes(rows),
            COLUMN_TILES=u.sizes(columns),
            HEADS=int(b) if u.node.op.name == HEADS else 0,
            BLOCK_M=s["bm"],
            BLOCK_N=s["bn"],
            BLOCK_K=s["bk"],
            STAGES=s["stages"],
            WHOLE_COLUMNS=n.divide(s["bn"]) is not None,
            WHOLE_DEPTH=k.divide(s["bk"]) is not None,
            FLOAT32_FACTORS=u.interpret or left != right,
        )


def sizes_of(node: Node) -> tuple[Dim, Dim, Dim, Dim]:
    """Return (batches, rows, depth, columns)."""
    a, c = (v.type.shape for v in node.operands)
    if node.op.name == HEADS:
        return a[1], a[0], a[2], c[2]
    return product(a[:-2]), a[-2], a[-1], c[-1]


def factor(node: Node) -> str:
    """Return the dtype of the factors of tl.dot: the operands' own if equal, else float32."""
    a, c = (v.type.dtype for v in node.operands)
    return a if a == c else "f32"


MATMUL = Matmul("triton/matmul", ("matmul",))
HEAD_MATMUL = Matmul("triton/head_matmul", (HEADS,))
