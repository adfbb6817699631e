"""The products of a mixture's experts over pairs sorted by expert, and the sort. The loops are in llmc_experts.h."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llmc.codegen.backends.cpp.cpp_kernel import CTYPES, Call, CppKernel, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.expert_stack import Stack, pack_stack
from llmc.codegen.kernel import EXACT, Schedule
from llmc.codegen.print_expr import inline
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import FLOATS, INTS
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.moe import gate
from llmc.ir.types import Type
from llmc.targets.target import Target

HALF_COLUMNS = 32  # columns between the two codes of a byte
SPAN = 64  # columns that the integer products read at once
RUN = 32  # the number of columns that share a scale is a multiple of it
ROWS_PER_PASS = 8  # rows of x that share a pass over a weight row
ALL_COLUMNS = 1 << 20  # the C++ template's value for a block with all columns
# C++ element types and encodings of codes.
CODES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{dt: (CTYPES[dt], "FLOAT") for dt in FLOATS},
        "i8": ("int8_t", "INTEGER"), "u8": ("uint8_t", "INTEGER"),
        "f8e4m3": ("uint8_t", "E4M3"), "f8e5m2": ("uint8_t", "E5M2"),
    }
)  # fmt: skip


class Route(Call):
    """moe_route."""

    constant_reduction_order = EXACT
    headers = ("llmc_abi.h", "llmc_experts.h")
    dtypes = ("i32", "i64")
    function = "route"
    numbers = "t*k experts"


class Experts(CppKernel):
    """moe_up and moe_down over floats or codes, for any routing."""

    constant_reduction_order = "lanes of a vector"
    headers = ("llmc_abi.h", "llmc_experts.h", "llmc_math.h", "llmc_store.h")

    def reject(self, node: Node, target: Target) -> str | None:
        p = Stack(node)
        if why := unsupported(node, (*FLOATS, *INTS, "f8e4m3", "f8e5m2")):
            return why
        if not p.up and node.result.type.dtype != "f32":
            return f"a result of {node.result.type.dtype}, not f32"
        for name, known in (("code", tuple(CODES)), ("scale", FLOATS), ("zero", (*FLOATS, "u8", "i8"))):
            t = p.type(name)
            if t is not None and t.dtype not in known:
                return f"{name}s of dtype {t.dtype}"
        if any(d.const is None for d in p.code.shape):
            return f"the experts' sizes {p.code} are not constant"
        if any(v.type.dtype != "i32" for v in node.operands[1:3]):
            return "the order of the pairs is not i32"
        return _reject_rounding(p) if p.quantized and node.attrs["act"] else None

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        p = Stack(node)
        return p.layouts(HALF_COLUMNS) if p.narrow and p.k % (2 * HALF_COLUMNS) == 0 else {}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        pack_stack(g, node, HALF_COLUMNS, list(self.layouts(node, schedule, target)), ops)

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        p = Stack(node)
        padded = -(-p.k // SPAN) * SPAN
        if p.quantized and node.attrs["act"]:
            return D(ROWS_PER_PASS * (padded + padded // RUN * 8))
        return D((ROWS_PER_PASS + 1) * padded * 4)

    def helpers(self, node: Node, schedule: Schedule, target: Target) -> str:
        p = Stack(node)
        a: Mapping[str, object] = node.attrs
        code, encoding = CODES[p.code.dtype]
        if a.get("values"):
            encoding = "E2M1"
        scale, zero = p.type("scale"), p.type("zero")
        rows, columns = _block(p)
        size = self.scratch(node, schedule, target)
        return (
            f"struct Shape {{\n  typedef {CTYPES[node.operands[0].type.dtype]} X;\n  typedef {code} W;\n"
            f"  typedef {CTYPES[scale.dtype] if scale else 'float'} S;\n"
            f"  typedef {CTYPES[zero.dtype] if zero else 'uint8_t'} Z;\n"
            f"  static constexpr int64_t K = {p.k}, PARTS = {p.parts}, N = {p.n};\n"
            f"  static constexpr int64_t EXPERTS = {p.experts};\n"
            f"  static constexpr int64_t CHOICES = {a['k'] if p.up else 0}, HALF = {a.get('half', 0)};\n"
            f"  static constexpr int64_t BLOCK_ROWS = {rows}, GROUP = {columns};\n"
            f"  static constexpr int64_t ACT_BLOCK = {a.get('act_block') or ALL_COLUMNS};\n"
            f"  static constexpr int ZERO = {a.get('zero_point', 0)};\n"
            f"  static constexpr bool ZEROS = {str(zero is not None).lower()};\n"
            f"  static constexpr bool ACT = {str(bool(a.get('act'))).lower()};\n"
            f"  static constexpr Encoding ENCODING = {encoding};\n}};\n"
            f'static_assert(experts<Shape>::SCRATCH <= {size}, "scratch");\n'
        )

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        p = Stack(node)
        lines = [_pointer(f"x{i}", i, v.type) for i, v in enumerate(node.operands)]
        lines.append(f"{CTYPES[node.result.type.dtype]}* y0 = ({CTYPES[node.result.type.dtype]}*)args[{len(lines)}];")
        at = {name: p.operand(name) for name in ("scale", "zero", "weights", "bias")}
        x = {name: "nullptr" if i is None else f"x{i}" for name, i in at.items()}
        bias = p.type("bias")
        b = CTYPES[bias.dtype] if bias else "float"
        if p.up:
            gated = inline(gate(node.attrs["body"]), ["a", "b"])
            lines.append(f"const auto body = [](vf a, vf b) {{ return {gated}; }};")
            out = CTYPES[node.result.type.dtype]
            lines.append(f"const up_epilogue<Shape, {out}, {b}, decltype(body)> e = {{y0, {x['bias']}, body}};")
        else:
            weights = p.type("weights")
            assert weights is not None
            kind = f"down_epilogue<Shape, {CTYPES[weights.dtype]}, {b}>"
            lines.append(f"const {kind} e = {{y0, x1, {x['weights']}, {x['bias']}}};")
        lines.append(f"expert_products<Shape>(ctx, x0, x1, x2, x3, {x['scale']}, {x['zero']}, e);")
        return "\n".join(lines)


def _block(p: Stack) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    rows, columns = p.node.attrs["block"] if p.quantized else (1, 0)
    return rows or ALL_COLUMNS, columns or ALL_COLUMNS


def _pointer(name: str, i: int, t: Type) -> str:
    """Declare a typed pointer to an operand."""
    c = CTYPES.get(t.dtype) or CODES[t.dtype][0]
    return f"const {c}* {name} = (const {c}*)args[{i}];"


def _reject_rounding(p: Stack) -> str | None:
    """Return why a product of codes by rounded activations is not supported, or None."""
    a, zero = p.node.attrs, p.type("zero")
    rows, columns = _block(p)
    if a["act"] != "i8" or p.code.dtype not in ("i8", "u8"):
        return f"codes of dtype {p.code.dtype} by activations of dtype {a['act']}"
    if rows != 1 or columns % RUN:
        return f"activations rounded to i8 with scales of blocks of {list(a['block'])}"
    if a["act_block"] % RUN:
        return f"activation scales of {a['act_block']} columns, which is not a multiple of {RUN}"
    if zero is not None and zero.dtype != "u8":
        return f"zero points of dtype {zero.dtype}"
    if p.code.dtype == "i8" and (a["zero_point"] or zero):
        return "codes of dtype i8 with zero points"
    if not a["values"] and p.code.dtype == "u8" and a["bits"] == 8 and (zero is not None or a["zero_point"] != 128):
        return "codes of dtype u8 with zero points other than 128"
    return None


MOE_ROUTE = Route("cpu/moe_route", ("moe_route",))
EXPERTS = Experts("cpu/experts", ("moe_up", "moe_down", "quantized_moe_up", "quantized_moe_down"))
