"""Matrix products over quantised weights, with generated epilogues. The loops are in llmc_quantized.h."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from llmc.codegen.backends.cpp.cpp_kernel import CTYPES, unsupported
from llmc.codegen.backends.cpp.linear import COPY_BYTES, PANEL_BYTES, PackedProduct, Problem
from llmc.codegen.emit import Sizes
from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Graph, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.ops.packed_quantized import QUAD, RUN
from llmc.ir.types import Type
from llmc.targets.target import Target

SCALES = FLOATS
ZEROS = (*FLOATS, "u8")
MAX_DEPTH = 1 << 16  # columns whose products have a sum below 2^31


class QuantizedProblem(Problem):
    """The computation of a quantised product, whether or not its weight is packed yet."""

    @property
    def bits(self) -> int:
        """The bits of a stored code: 4 or 8."""
        return 8 if self.node.attrs["bits"] > 4 else 4

    @property
    def group(self) -> int:
        """Columns that share a scale of the weight, 0 for all."""
        block = self.node.attrs["block"]
        return int(block if isinstance(block, int) else block[1])

    @property
    def zero(self) -> int:
        """The zero point of all codes as packed: `pack_codes` moves those of 8 bits from u8 to i8."""
        return int(self.node.attrs["zero_point"]) - (128 if self.w.dtype == "u8" and self.bits == 8 else 0)

    @property
    def zeros(self) -> bool:
        """Whether there is a zero point for each scale."""
        return bool(self.node.attrs["zeros"])

    @property
    def act(self) -> str:
        """The dtype to which x is rounded; empty if it is not."""
        return str(self.node.attrs["act"])

    @property
    def act_block(self) -> int:
        """Columns that share a scale of x, 0 for all."""
        return int(self.node.attrs["act_block"])

    @property
    def scale(self) -> Type:
        """The type of the scales, packed or not."""
        return self.node.operands[2].type

    @property
    def zero_points(self) -> Type | None:
        """The type of the zero points, packed or not; None if all codes have the same."""
        return self.node.operands[3].type if self.zeros else None

    @property
    def first_extra(self) -> int:
        """The index of the first operand of the epilogue."""
        return 3 + self.zeros

    @property
    def width(self) -> int:
        """Columns of a row, padded to whole runs."""
        return -(-(self.k.const or 1) // RUN) * RUN

    @property
    def unit(self) -> int:
        """Columns that share their scales in the weight and in x."""
        group = min(self.group or self.width, self.width)
        block = min(self.act_block or self.width, self.width) if self.act else self.width
        if group == self.width:
            return block
        return group if block == self.width else gcd(group, block)

    def code_size(self, target: Target) -> int:
        """Return the bytes of an element of x as the tile reads it."""
        if not self.act:
            return 4
        vnni = target.has("avx512_vnni") if target.vector == 64 else target.has("avx_vnni")
        return 2 if self.bits == 8 and target.vector >= 32 and not vnni else 1


class QuantizedLinear(PackedProduct):
    """quantized_linear and packed_quantized_linear for any number of rows, with codes of 8 bits, or of 4 or fewer."""

    constant_reduction_order = "one block of columns after another"
    headers = ("llmc_quantized.h", "llmc_math.h", "llmc_store.h")

    def problem(self, node: Node) -> QuantizedProblem:
        return QuantizedProblem(node)

    def reject(self, node: Node, target: Target) -> str | None:
        p = QuantizedProblem(node)
        if why := unsupported(node, (*FLOATS, "i8", "u8")) or self._reject_codes(p) or self._reject_blocks(p):
            return why
        if why := self.reject_sizes(p):
            return why
        if (p.k.const or 0) > MAX_DEPTH:
            return f"{p.k} columns; the maximum is {MAX_DEPTH}"
        if any(e.dtype not in FLOATS for e in [p.x, p.out, *p.extras]):
            return "an operand of the epilogue is not of a float dtype"
        return self.reject_weight(p, target, QUAD)

    @staticmethod
    def _reject_codes(p: QuantizedProblem) -> str | None:
        """Return why the codes, scales or zero points are not supported."""
        if p.w.dtype not in ("i8", "u8"):
            return f"codes of dtype {p.w.dtype}"
        if p.bits == 8 and (p.zero or p.zeros):
            return "codes of 8 bits with zero points other than 0 (i8) or 128 (u8)"
        if not 0 <= p.zero < 16:
            return f"zero point {p.zero}; codes of 4 bits have 0 to 15"
        if p.scale.dtype not in SCALES:
            return f"scales of dtype {p.scale.dtype}"
        if p.zero_points is not None and p.zero_points.dtype not in ZEROS:
            return f"zero points of dtype {p.zero_points.dtype}"
        return None

    @staticmethod
    def _reject_blocks(p: QuantizedProblem) -> str | None:
        """Return why the blocks that share a scale are not supported."""
        block = p.node.attrs["block"]
        if isinstance(block, tuple) and block[0] != 1:
            return f"scales of blocks of {list(block)}; rows share no scale here"
        if p.group % RUN:
            return f"scales of {p.group} columns, which is not a multiple of {RUN}"
        if p.act not in ("", "i8"):
            return f"activations of dtype {p.act}"
        if p.act_block % RUN:
            return f"activation scales of {p.act_block} columns, which is not a multiple of {RUN}"
        return None

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        """Return the tile sizes to use, derived from the target's registers and caches."""
        p, lanes = QuantizedProblem(node), target.vector // 4
        rows = self.panel_rows(p, target)
        # Accumulators of a tile, and tiles of a block. With AVX-512, integer products keep a float sum per accumulator
        # in registers. Otherwise, accumulators take half of the registers, and codes, products and scales the others.
        if target.vector < 64:
            registers, tiles = 8, 16
        else:
            registers, tiles = (12, 32) if p.act else (24, 16)
        mr = max(1, registers // (rows // lanes))
        kc = max(512, PANEL_BYTES * 8 // (rows * p.bits))
        mb = max(4, min(tiles, COPY_BYTES // (p.width * p.code_size(target) * mr)))
        return [{"rows": rows, "mr": mr, "mb": mb, "kc": kc}]

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        """Return the packed layouts of codes, scales and zero points, unless they are packed already."""
        if node.op.name == "packed_quantized_linear":
            return {}
        p = QuantizedProblem(node)
        panel = f"rows={schedule['rows']}, parts={p.parts}"
        entries = dict.fromkeys(range(2, p.first_extra), f"pack_panel{{{panel}, pair=1}}")
        return {1: f"pack_codes{{bits={p.bits}}} pack_panel{{{panel}, pair={QUAD}}}", **entries}

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        p = QuantizedProblem(node)

        def panel(v: Value, pair: int) -> Value:
            layout = {"rows": schedule["rows"], "pair": pair, "parts": p.parts}
            return g.add(ops["pack_panel"], [v], layout, before=node, loc=node.loc).result

        codes = g.add(ops["pack_codes"], [node.operands[1]], {"bits": p.bits}, before=node, loc=node.loc).result
        packed = [panel(codes, QUAD), *(panel(v, 1) for v in node.operands[2 : p.first_extra])]
        attrs = {
            "n": p.n, "bits": p.bits, "block": p.group, "zero_point": p.zero, "zeros": p.zeros, "act": p.act,
            "act_block": p.act_block, "parts": p.parts, "body": p.body, "dtype": node.attrs["dtype"],
        }  # fmt: skip
        operands = [node.operands[0], *packed, *node.operands[p.first_extra :]]
        g.replace_op(node, ops["packed_quantized_linear"], operands, attrs)

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        p, s = QuantizedProblem(node), schedule
        rows = s["mb"] * s["mr"]
        sums = (rows if (p.k.const or 1) > s["kc"] else s["mr"]) * s["rows"] * 4
        units = -(-p.width // p.unit) * 8 if p.act else 0
        return D(sums + rows * (p.width * p.code_size(target) + units))

    def helpers(self, node: Node, schedule: Schedule, target: Target) -> str:
        p, s = QuantizedProblem(node), schedule
        zero = CTYPES[p.zero_points.dtype] if p.zero_points else "uint8_t"
        config = (
            f"struct Shape {{\n  typedef {CTYPES[p.x.dtype]} X;\n  typedef {CTYPES[p.scale.dtype]} S;\n"
            f"  typedef {zero} Z;\n"
            f"  static constexpr int64_t K = {p.k}, N = {p.n}, MB = {s['mb']}, KC = {s['kc']};\n"
            f"  static constexpr int NV = {s['rows']} / VN, PARTS = {p.parts}, MR = {s['mr']};\n"
            f"  static constexpr int BITS = {p.bits}, GROUP = {p.group}, ZERO = {p.zero}, ACT_BLOCK = {p.act_block};\n"
            f"  static constexpr bool ZEROS = {str(p.zeros).lower()}, ACT = {str(bool(p.act)).lower()};\n"
            f'  static_assert({s["rows"]} % (VN * PARTS) == 0, "panels fit the vectors");\n}};\n'
        )
        return config + self.checked_epilogue(node, s, target, "quantized_product")

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        zeros = "x3" if self.problem(node).zeros else "nullptr"
        return self.call(node, sizes, "quantized_linear", f"x1, x2, {zeros}")


QUANTIZED_LINEAR = QuantizedLinear("cpu/quantized_linear", ("quantized_linear", "packed_quantized_linear"))
