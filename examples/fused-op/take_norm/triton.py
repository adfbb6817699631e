"""The GPU kernel in Triton, with one program per selected row."""

from __future__ import annotations

from llmc.codegen.backends.triton.triton_kernel import FLOATS, Code, TritonKernel, Unit, element
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Node
from llmc.targets.target import Target

WIDEST = 16384  # maximum elements of a row that a program keeps in registers


class TakeNorm(TritonKernel):
    """take_norm for f32, bf16 and f16, with rows of up to 16384 elements."""

    def reject(self, node: Node, target: Target) -> str | None:
        x = node.operands[0].type
        if x.dtype not in FLOATS:
            return f"it norms {', '.join(FLOATS)}, not {x.dtype}"
        width = x.shape[1].const
        return None if width and width <= WIDEST else f"a row has {x.shape[1]} elements, at most {WIDEST} fit"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"warps": 4}, {"warps": 8}, {"warps": 1}]

    def code(self, u: Unit) -> Code:
        x, rows, _ = (v.type for v in u.node.operands)
        d = x.shape[1].const or 0
        block = 1 << (d - 1).bit_length()
        body = f"""{u.wait}
row = tl.program_id(0).to(tl.int64)
source = tl.load(x1 + row).to(tl.int64)
col = tl.arange(0, {block})
x = tl.load(x0 + source * {d} + col, mask=(col < {d}) & (source >= 0), other=0).to(tl.float32)
scale = 1 / tl.sqrt(tl.sum(x * x) / {d} + {u.node.attrs["eps"]!r})
w = tl.load(x2 + col, mask=col < {d}, other=0).to(tl.float32)
tl.store(y0 + row * {d} + col, (x * scale * w).to({element(u.node.result.type)}), mask=col < {d})"""
        return Code(body, (rows.numel,), warps=u.schedule["warps"])


KERNEL = TakeNorm("take-norm/triton", ("take_norm",))
