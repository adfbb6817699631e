"""The binding of `rms_norm.cu`: which nodes it runs, its constants, its launch."""

from __future__ import annotations

from llmc.extend import Node, Schedule, Target, product
from llmc.extend.cuda import CTYPES, FLOATS, Binding, CudaKernel


class RmsNorm(CudaKernel):
    """rms_norm over the last axis, f32, bf16 or f16; one block a row."""

    def reject(self, node: Node, target: Target) -> str | None:
        for v in node.operands:
            if v.type.format is not None or v.type.dtype not in FLOATS:
                return f"operand type {v.type} is not among {', '.join(FLOATS)}"
        return None if node.operands[0].type.shape[-1].const else "the row's width is not constant"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"threads": 256}, {"threads": 128}, {"threads": 1024}]

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        x, w = (v.type for v in node.operands)
        return Binding(
            grid=(product(x.shape[:-1]),),
            threads=schedule["threads"],
            constants={
                "X": CTYPES[x.dtype],
                "W": CTYPES[w.dtype],
                "WIDTH": int(x.shape[-1]),
                "THREADS": schedule["threads"],
            },
            values=(float(node.attrs["eps"]),),
        )


KERNEL = RmsNorm("rms-norm/cuda", ("rms_norm",), opt_in=True, file="rms_norm_cuda:rms_norm.cu", entry="rms_norm")
