"""Kernels without packed weights: matmul, products of heads, attention over a prompt, mixture of experts."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import Call, CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.codegen.print_expr import inline
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import FLOATS, INTS
from llmc.ir.graph import Node
from llmc.ir.ops.moe import gate, parts
from llmc.targets.target import Target


class Matmul(Call):
    """Batched products of activations."""

    constant_reduction_order = "one column after another"
    headers = ("llmc_abi.h", "llmc_reference.h")
    dtypes = FLOATS
    function = "matmul<false>"
    numbers = "b m k n"


class HeadMatmul(Matmul):
    """Products of the heads of tokens, each with its own weight."""

    function = "matmul<true>"
    numbers = "h t k n"


class Attention(CppKernel):
    """Attention over packed prompts, with or without a bias by distance, one token and head at a time."""

    constant_reduction_order = "one key after another"
    headers = ("llmc_abi.h", "llmc_reference.h")

    def reject(self, node: Node, target: Target) -> str | None:
        if node.operands[3].type.dtype not in INTS:
            return f"positions have dtype {node.operands[3].type.dtype}"
        return unsupported(node, (*FLOATS, *INTS))

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        return node.operands[0].type.shape[0] * 4

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        q, k, v = (o.type for o in node.operands[:3])
        at = node.attrs
        dims = ", ".join(sizes(d) for d in (*q.shape[:2], k.shape[1], q.shape[2], v.shape[2]))
        sinks, slopes = ("x4" if node.operand(name) else "(const float*)nullptr" for name in ("sinks", "slopes"))
        causal = "true" if at.get("causal", True) else "false"
        options = f"{at['scale']!r}f, {at.get('softcap', 0.0)!r}f, {at.get('window', 0)}, {causal}"
        call = f"attention(ctx, y0, x0, x1, x2, x3, {sinks}, {slopes}, Attention{{{dims}, {options}}});"
        return f"{pointers(node)}\n{call}"


class Moe(CppKernel):
    """Mixture of experts over unpacked weights."""

    constant_reduction_order = "lanes of a vector"
    headers = ("llmc_abi.h", "llmc_moe.h")

    def reject(self, node: Node, target: Target) -> str | None:
        types = [v.type.dtype for v in node.operands]
        if types[3] != types[4]:
            return "gate_up and down have different dtypes"
        if types[5:6] != types[6:7]:
            return "the biases have different dtypes"
        return unsupported(node, (*FLOATS, *INTS))

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        d = node.operands[0].type.shape[1]
        inner = node.operands[4].type.shape[2]
        return (d * 2 + inner + 48) * 32 + D(64)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        x, idx, _, _, down = (v.type for v in node.operands[:5])
        dims = (x.shape[0], idx.shape[1], x.shape[1], down.shape[2], down.shape[0])
        biases = "x5, x6" if len(node.operands) > 5 else "(const float*)nullptr, (const float*)nullptr"
        body = f"const auto body = [](vf a, vf b) {{ return {inline(gate(node.attrs['body']), ['a', 'b'])}; }};"
        function = f"moe<{parts(node.attrs['body'])}>"
        call = f"{function}(ctx, y0, x0, x1, x2, x3, x4, {biases}, {', '.join(sizes(d) for d in dims)}, body);"
        return f"{pointers(node)}\n{body}\n{call}"


MATMUL = Matmul("cpu/matmul", ("matmul",))
HEAD_MATMUL = HeadMatmul("cpu/head_matmul", ("head_matmul",))
PACKED_ATTENTION = Attention("cpu/packed_attention", ("attention",))
PACKED_ALIBI_ATTENTION = Attention("cpu/packed_alibi_attention", ("alibi_attention",))
MOE = Moe("cpu/moe", ("moe",))
