"""The problem of a product with a quantised weight, and what its Triton kernels share: reasons, packing, arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from llmc.codegen.backends.triton.linear_problem import Product, reject_weight
from llmc.codegen.backends.triton.template import record
from llmc.codegen.backends.triton.triton_kernel import TritonKernel, Unit, unsupported
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.codegen.product import pack_product, product_layouts
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.types import Type
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

PACKED = "packed_nibbles_linear"
FEW_TOKENS = 32  # tokens of a tile up to which sums are scaled, if codes have 4 bits
HALVES = (64, 32, 16)  # columns between the two codes of a byte; tl.dot needs 16


class QuantizedProduct(Product):
    """The computation of quantized_linear or packed_nibbles_linear."""

    @cached_property
    def group(self) -> int:
        """Columns that share a scale."""
        return min(self.node.attrs["block"][1] or self.k, self.k)

    @cached_property
    def half(self) -> int:
        """Columns between the two codes of a byte; 0 if a byte is one code, or if the columns cannot be packed."""
        if self.node.op.name == PACKED:
            return int(self.node.attrs["half"])
        return halves(self.k, self.group) if self.node.attrs["bits"] <= 4 else 0

    @property
    def first_extra(self) -> int:
        """The index of the first operand of the epilogue."""
        return 3 + self.node.attrs["zeros"]

    @property
    def scale(self) -> Type:
        """The type of the scales."""
        return self.node.operands[2].type

    @property
    def weight_bytes(self) -> int:
        """The bytes of codes, as packed, scales and zero points."""
        codes = self.parts * self.n * self.k // (2 if self.half else 1)
        return codes + sum(int(v.type.nbytes) for v in self.node.operands[2 : self.first_extra])

    def bytes(self, env: Mapping[str, int]) -> int:
        """Return the bytes of operands and results, each counted once; codes as packed."""
        rest = [self.node.operands[0], *self.node.operands[self.first_extra :], *self.node.results]
        return self.weight_bytes + sum(int(v.type.nbytes.subs(env)) for v in rest)

    @property
    def dot(self) -> str:
        """The dtype of both factors in tl.dot: codes are converted to x's."""
        return self.x.dtype


def halves(k: int, group: int) -> int:
    """Return the largest distance of two codes in a byte that fits k columns in blocks of `group`; 0 if none does."""
    return next((h for h in HALVES if k % (2 * h) == 0 and group % h == 0), 0)


def scales_factors(half: int, tokens: int, scale: str, x: str) -> bool:
    """Whether a tile of `tokens` rounds codes times scales to the dtype `x`, instead of scaling sums in float32.

    half: of the product, 0 unless codes have 4 bits. scale: dtype of the scales.
    """
    return half > 0 and tokens > FEW_TOKENS and scale == x


class QuantizedKernel(TritonKernel):
    """Base class of the kernels of quantized_linear; codes of 4 bits are packed at compile time."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        if node.attrs.get("act"):
            return f"activations rounded to {node.attrs['act']}"
        if why := unsupported(node, (*FLOATS, "i8", "u8")) or _reject_sizes(node):
            return why
        p = QuantizedProduct(node)
        if any(t.dtype not in FLOATS for t in [p.x, p.scale, p.out, *p.extras]):
            return "the scales or an operand of the epilogue are not of a float dtype"
        return _reject_bytes(p) if p.w.dtype == "i8" else _reject_nibbles(p)

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        half = QuantizedProduct(node).half
        if not half or node.op.name == PACKED:
            return {}
        return product_layouts(node, f"pack_nibbles{{half={half}}}")

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        half = QuantizedProduct(node).half
        pack_product(g, node, ops["pack_nibbles"], {"half": half}, ops[PACKED], ops)


def _reject_sizes(node: Node) -> str | None:
    if node.attrs["block"][0] != 1:
        return f"blocks of {list(node.attrs['block'])}; a block has columns of one row"
    return reject_weight(node)


def _reject_bytes(p: QuantizedProduct) -> str | None:
    if p.node.attrs["zeros"] or p.node.attrs["zero_point"]:
        return "codes of dtype i8 with zero points"
    return None if p.group == p.k else f"{p.k // p.group} scales per row of codes of dtype i8; one is supported"


def _reject_nibbles(p: QuantizedProduct) -> str | None:
    a, operands = p.node.attrs, p.node.operands
    if p.node.op.name != PACKED and p.w.dtype == "u8" and a["bits"] > 4:
        return f"codes of {a['bits']} bits in dtype u8; 4 are supported"
    if p.w.dtype != "u8" or not 0 <= a["zero_point"] < 16:
        return f"codes of dtype {p.w.dtype} with the zero point {a['zero_point']}; codes of 4 bits are supported"
    if a["zeros"] and operands[3].type.dtype != "u8":
        return f"zero points of dtype {operands[3].type.dtype}; u8 is supported"
    if not p.half:
        return f"{p.k} columns in blocks of {p.group}; both must be multiples of 32"
    if p.node.op.name != PACKED and origin(operands[1]) is Origin.INPUTS:
        return "the codes are not known at compile time"
    return None


def weight_codes(u: Unit, p: QuantizedProduct) -> str:
    """Return the argument `codes` of the templates of quantised products."""
    return record(
        "WeightCodes", code_ptr="x1", scale_ptr="x2", zero_ptr="x3" if p.first_extra == 4 else None, K=p.k,
        PARTS=p.parts, HALF=p.half, GROUP=p.group, ZERO_POINT=u.node.attrs["zero_point"], ASSEMBLY=has_assembly(u, p.x),
    )  # fmt: skip


def element_bytes(p: QuantizedProduct) -> int:
    """Bytes of an element of x."""
    return DTYPES[p.x.dtype].bits // 8


def has_assembly(u: Unit, x: Type) -> bool:
    """Whether codes are converted to factors of x by PTX instructions on pairs of 16 bits."""
    return u.target.family == "cuda" and not u.interpret and x.dtype in ("bf16", "f16")
