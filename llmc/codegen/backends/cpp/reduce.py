"""Reductions, softmax, cumulative sums and top-k along any axis. Float reductions of the last axis are row programs."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import CppKernel, ctype, pointers, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim, product
from llmc.ir.dtype import FLOATS, INTS
from llmc.ir.graph import Node
from llmc.targets.target import Target


class Reduce(CppKernel):
    """One result element per thread at a time, with a loop over the axis."""

    constant_reduction_order = "one element after another"
    headers = ("llmc_abi.h", "llmc_reduce.h")

    def reject(self, node: Node, target: Target) -> str | None:
        floats_only = node.op.name in ("softmax", "topk", "mean")
        return unsupported(node, FLOATS if node.op.name == "softmax" else (*FLOATS, *INTS)) or (
            "its operand is not a float" if floats_only and node.operands[0].type.dtype not in FLOATS else None
        )

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        return D(node.attrs["k"] * 4) if node.op.name == "topk" else D(0)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        x = node.operands[0].type
        a = node.attrs.get("axis", -1) % x.rank
        outer = sizes(product(x.shape[:a]))
        n = sizes(x.shape[a])
        inner = sizes(product(x.shape[a + 1 :]))
        space = f"{outer}, {n}, {inner}"
        name = node.op.name
        if name == "topk":
            call = f"topk(ctx, y0, y1, x0, {outer}, {n}, {node.attrs['k']});"
        elif name in ("argmax", "cumsum", "softmax"):
            call = f"{name}(ctx, y0, x0, {space});"
        else:
            fold = {"sum": "Sum", "mean": "Sum", "amax": "Max", "amin": "Min"}[name]
            t = f"{fold}, {ctype(x)}, {ctype(node.result.type)}"
            call = f"reduce<{t}>(ctx, y0, x0, {space}, {'true' if name == 'mean' else 'false'});"
        return f"{pointers(node)}\n{call}"


REDUCE = Reduce("cpu/reduce", ("sum", "mean", "amax", "amin", "argmax", "cumsum", "softmax", "topk"))
