"""Paged attention on the CPU: instantiates the C++ template in llmc_attention.h with a node's constants."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_kernel import CTYPES, FLOATS, CppKernel, pointers
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node
from llmc.ir.types import Type
from llmc.targets.target import Target

MAX_HEAD = 512


def heads(node: Node) -> tuple[int | None, ...]:
    """Return (query heads, key heads, tokens per page, head size); None for a size that is not constant."""
    q, kv = node.operands[0].type, node.operands[1].type
    return tuple(d.const for d in (q.shape[1], kv.shape[2], kv.shape[3], q.shape[2]))


class PagedAttention(CppKernel):
    """Flash attention for any mix of prompt chunks and decoding rows, processing the heads of a group together."""

    sums = "tiles of keys at multiples of kt"
    headers = ("llmc_attention.h",)

    def reject(self, node: Node, target: Target) -> str | None:
        floats = [node.operands[i].type for i in (0, 1, 6) if i < len(node.operands)]
        if bad := next((t for t in floats if t.dtype not in FLOATS), None):
            return f"{bad} is not one of {', '.join(FLOATS)}"
        if node.attrs["least"] > 1:
            return "it does not support skipping rows (least > 1)"
        sizes = heads(node)
        if None in sizes:
            return "heads, page and head size must be constant"
        h, g, _, d = (n or 0 for n in sizes)
        if h % g:
            return f"{h} query heads are not a multiple of {g} key heads"
        return f"head size {d} is above {MAX_HEAD}" if d > MAX_HEAD else None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """Return the tile sizes to use, derived from the target's registers and caches."""
        lanes = target.vector // 4
        mr = {16: 12, 8: 6}.get(lanes, 4)
        size = heads(node)[3] or 0  # tiles of queries, keys and values fit L2
        br, kt = (192, 256) if size <= 128 else (192, 128) if size <= 256 else (96, 64)
        return [{"nv": 2, "mr": mr, "br": br, "kt": kt}]

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        s, d = schedule, heads(node)[3] or 1
        q, kv = node.operands[0].type, node.operands[1].type
        dp = q.dtype == kv.dtype == "bf16" and target.vector == 64 and target.has("avx512_bf16")
        item, r = (2 if dp else 4), s["nv"] * target.vector // 4
        dk, dr = (d + dp) // (1 + dp) * (1 + dp), -(-d // r) * r
        parts = (
            s["br"] * dk * item, dr * s["br"] * 4, s["kt"] * s["mr"] * 4, s["kt"] * s["mr"] * item, s["kt"] * dk * item,
            s["kt"] * dr * item, s["kt"] * 8, s["br"] * 4, s["br"] * 4, s["br"] * 4, d * DTYPES[kv.dtype].bits // 8,
        )  # fmt: skip
        return D(sum(-(-n // 64) * 64 for n in parts))

    def helpers(self, node: Node, schedule: Schedule, target: Target) -> str:
        h, g, page, d = heads(node)
        s, a = schedule, node.attrs
        align = s["kt"] if target.deterministic else 1
        q, kv, sinks = (_ctype(node, i) for i in (0, 1, 6))
        return (
            f"struct Shape {{\n  typedef {q or 'float'} Q;\n  typedef {kv or 'float'} KV;\n"
            f"  typedef {sinks or 'float'} S;\n"
            f"  static constexpr int64_t H = {h}, G = {g}, D = {d}, PAGE = {page}, WINDOW = {a['window']};\n"
            f"  static constexpr int NV = {s['nv']}, MR = {s['mr']};\n"
            f"  static constexpr int64_t BR = {s['br']}, KT = {s['kt']}, ALIGN = {align};\n"
            f"  static constexpr float SCALE = {a['scale']!r}f, SOFTCAP = {a['softcap']!r}f;\n"
            f"  static constexpr bool SINKS = {'true' if sinks else 'false'};\n}};\n"
            f'static_assert(attend<Shape>::SCRATCH <= {self.scratch(node, schedule, target)}, "scratch");\n'
        )

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        types: list[Type] = [v.type for v in node.operands]
        sinks = "x6" if len(types) > 6 else "nullptr"
        tokens, count, table = sizes(types[0].shape[0]), sizes(types[3].shape[0]), sizes(types[2].shape[1])
        return (
            f"{pointers(node)}\n"
            f"const attention_args a = {{x0, x1, x2, x3, x4, x5, {sinks}, y0, {tokens}, {count}, {table}}};\n"
            "attention<Shape>(ctx, a);"
        )


def _ctype(node: Node, i: int) -> str:
    return CTYPES[node.operands[i].type.dtype] if i < len(node.operands) else ""


ATTENTION = PagedAttention("cpu/attention", ("paged_attention",))
