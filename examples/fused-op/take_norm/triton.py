"""The binding of the GPU kernel in `row_kernel.py`: which nodes it runs, its schedules, and its arguments."""

from __future__ import annotations

from llmc.extend import Node, Schedule, Target
from llmc.extend.triton import FLOATS, Code, Template, TritonKernel, Unit

WIDEST = 16384  # maximum elements of a row that a program keeps in registers


class TakeNorm(TritonKernel):
    """take_norm for f32, bf16 and f16, with rows of up to 16384 elements."""

    def reject(self, node: Node, target: Target) -> str | None:
        x = node.operands[0].type
        if x.dtype not in FLOATS:
            return f"the dtype {x.dtype} is not one of {', '.join(FLOATS)}"
        width = x.shape[1].const
        return None if width and width <= WIDEST else f"a row has {x.shape[1]} elements, at most {WIDEST} fit"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"warps": 4}, {"warps": 8}, {"warps": 1}]

    def code(self, u: Unit) -> Code:
        x, rows, _ = (v.type for v in u.node.operands)
        width = int(x.shape[1])
        return u.launch(
            Template("take_norm.row_kernel", "take_norm_row"),
            (rows.numel,),  # the grid: one program for each selected row
            **u.pointers("x_ptr rows_ptr weight_ptr", "out_ptr"),
            WIDTH=width,
            WIDTH_PADDED=1 << (width - 1).bit_length(),
            EPS=u.node.attrs["eps"],
        )


KERNEL = TakeNorm("take-norm/triton", ("take_norm",))
