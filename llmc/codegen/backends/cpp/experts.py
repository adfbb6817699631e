"""The products of a mixture's experts over pairs sorted by expert, and the sort. The loops are in llmc_experts.h."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.codegen.backends.cpp.cpp_kernel import CTYPES, FLOATS, INTS, CppKernel, pointers, unsupported
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.codegen.print_expr import inline
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.moe import gate
from llmc.ir.types import Type
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

HALF = 32  # columns between the two codes of a byte
SPAN, RUN = 64, 32  # columns that the integer products read at once, and of which some share scales
ROWS = 8  # rows of x that share a pass over a weight row
ALL = 1 << 20  # in place of the columns of a block that has them all
# C++ element types and encodings of codes.
CODES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{dt: (CTYPES[dt], "FLOAT") for dt in FLOATS},
        "i8": ("int8_t", "INTEGER"), "u8": ("uint8_t", "INTEGER"),
        "f8e4m3": ("uint8_t", "E4M3"), "f8e5m2": ("uint8_t", "E5M2"),
    }
)  # fmt: skip


@dataclass(frozen=True)
class ExpertProduct:
    """The computation of moe_up, moe_down, or of one of them over codes."""

    node: Node

    @property
    def quantized(self) -> bool:
        """Whether the stack is quantised."""
        return self.node.op.name.startswith("quantized")

    @property
    def up(self) -> bool:
        """Whether it is the first product, which has a gate and reads rows of tokens."""
        return self.node.op.name.endswith("up")

    def operand(self, name: str) -> int | None:
        """The index of an operand: code, scale, zero, weights or bias; None if the node lacks it."""
        names = ["x", "order", "starts", "code", *["scale"] * self.quantized, *["weights"] * (not self.up)]
        names += ["zero"] * bool(self.quantized and self.node.attrs["zeros"])
        names += ["bias"] * (len(self.node.operands) > len(names))
        return names.index(name) if name in names else None

    def type(self, name: str) -> Type | None:
        """The type of an operand, None if the node lacks it."""
        i = self.operand(name)
        return None if i is None else self.node.operands[i].type

    @property
    def x(self) -> Type:
        """The type of the left operand."""
        return self.node.operands[0].type

    @property
    def code(self) -> Type:
        """The type of the codes, or of the weights if they are not quantised."""
        return self.node.operands[3].type

    @property
    def k(self) -> int:
        """The number of weight columns."""
        return int(self.x.shape[1])

    @property
    def rows(self) -> int:
        """The number of weight rows of an expert."""
        return int(self.code.shape[1])

    @property
    def half(self) -> int:
        """Columns between the two codes of a byte once they are packed; 0 if a byte is one code."""
        return int(self.node.attrs["half"]) or (HALF if self.packable else 0) if self.quantized else 0

    @property
    def packable(self) -> bool:
        """Whether codes have at most 4 bits, are not packed, and can be."""
        a = self.node.attrs
        known = origin(self.node.operands[3]) is not Origin.INPUTS
        return self.quantized and not a["half"] and a["bits"] <= 4 and self.k % (2 * HALF) == 0 and known

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        rows, columns = self.node.attrs["block"] if self.quantized else (1, 0)
        return rows or ALL, columns or ALL


class Route(CppKernel):
    """moe_route."""

    headers = ("llmc_abi.h", "llmc_experts.h")

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, ("i32", "i64"))

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        pairs = sizes(node.operands[0].type.numel)
        return f"{pointers(node)}\nroute(ctx, y0, y1, x0, {pairs}, {node.attrs['experts']});"


class Experts(CppKernel):
    """moe_up and moe_down over floats or codes, for any routing."""

    headers = ("llmc_abi.h", "llmc_experts.h", "llmc_math.h", "llmc_store.h")

    def reject(self, node: Node, target: Target) -> str | None:
        p = ExpertProduct(node)
        if why := unsupported(node, (*FLOATS, *INTS, *CODES)):
            return why
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
        p = ExpertProduct(node)
        if not p.packable:
            return {}
        turned = [i for i in (p.operand("scale"), p.operand("zero")) if i is not None]
        return {3: f"pack_nibbles{{half={HALF}}}", **dict.fromkeys(turned, "transpose{perm=[0, 2, 1]}")}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        pack_stack(g, node, HALF, [i for i in self.layouts(node, schedule, target) if i != 3], ops)

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        p = ExpertProduct(node)
        padded = -(-p.k // SPAN) * SPAN
        if p.quantized and node.attrs["act"]:
            return D(ROWS * (padded + padded // RUN * 8))
        return D((ROWS + 1) * padded * 4)

    def helpers(self, node: Node, schedule: Schedule, target: Target) -> str:
        p = ExpertProduct(node)
        a: Mapping[str, object] = node.attrs
        code, encoding = CODES[p.code.dtype]
        if a.get("values"):
            encoding = "E2M1"
        scale, zero = p.type("scale"), p.type("zero")
        rows, columns = p.block
        parts = 2 if p.up else 1
        size = self.scratch(node, schedule, target)
        return (
            f"struct Shape {{\n  typedef {CTYPES[p.x.dtype]} X;\n  typedef {code} W;\n"
            f"  typedef {CTYPES[scale.dtype] if scale else 'float'} S;\n"
            f"  typedef {CTYPES[zero.dtype] if zero else 'uint8_t'} Z;\n"
            f"  static constexpr int64_t K = {p.k}, PARTS = {parts}, N = {p.rows // parts}, EXPERTS = {p.code.shape[0]};\n"
            f"  static constexpr int64_t CHOICES = {a['k'] if p.up else 0}, HALF = {a.get('half', 0)};\n"
            f"  static constexpr int64_t BLOCK_ROWS = {rows}, GROUP = {columns};\n"
            f"  static constexpr int64_t ACT_BLOCK = {a.get('act_block') or ALL};\n"
            f"  static constexpr int ZERO = {a.get('zero_point', 0)};\n"
            f"  static constexpr bool ZEROS = {str(zero is not None).lower()}, ACT = {str(bool(a.get('act'))).lower()};\n"
            f"  static constexpr Encoding ENCODING = {encoding};\n}};\n"
            f'static_assert(experts<Shape>::SCRATCH <= {size}, "scratch");\n'
        )

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        p = ExpertProduct(node)
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


def _pointer(name: str, i: int, t: Type) -> str:
    """Declare a typed pointer to an operand."""
    c = CTYPES.get(t.dtype) or CODES[t.dtype][0]
    return f"const {c}* {name} = (const {c}*)args[{i}];"


def _reject_rounding(p: ExpertProduct) -> str | None:
    """Why a product of codes by rounded activations is not supported, or None."""
    a, zero = p.node.attrs, p.type("zero")
    rows, columns = p.block
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


def pack_stack(g: Graph, node: Node, half: int, entries: list[int], ops: Mapping[str, OpDef]) -> None:
    """Replace a product of experts by one over packed codes; `entries` are the operands that are transposed."""
    operands, place = list(node.operands), {"before": node, "loc": node.loc}
    operands[3] = g.add(ops["pack_nibbles"], [operands[3]], {"half": half}, **place).result
    for i in entries:
        operands[i] = g.add(ops["transpose"], [operands[i]], {"perm": (0, 2, 1)}, **place).result
    attrs = {**node.attrs, "half": half, "bits": 4}
    new = g.add(node.op, operands, attrs, **place, names=(node.result.name,))
    new.choice = dict(node.choice)
    g.replace(node.result, new.result)
    g.erase(node)


ROUTE = Route("cpu/moe_route", ("moe_route",))
EXPERTS = Experts("cpu/experts", ("moe_up", "moe_down", "quantized_moe_up", "quantized_moe_down"))
