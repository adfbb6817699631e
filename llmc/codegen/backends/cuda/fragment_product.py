"""Base of the CUDA C++ kernels that multiply bf16 activations by weights in 4-bit codes: sizes, checks and packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from llmc.codegen.backends.cuda.cuda_epilogue import epilogue, reject_operands
from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, FLOATS, OptionalCudaKernel
from llmc.codegen.backends.cuda.wgmma import lacks_wgmma
from llmc.codegen.kernel import Schedule
from llmc.codegen.product import ConstantProduct, pack_product, product_layouts, tables
from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.packed_codes import BLOCK
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

# Ops over 4-bit codes, and the same ops over packed codes. The second op of each kind norms the tokens first.
PLAIN, NORMED = "quantized_linear", "norm_quantized_linear"
PACKED, NORMED_PACKED = "packed_fragments_linear", "norm_fragments_linear"
_PACKED_OF = MappingProxyType({PLAIN: PACKED, NORMED: NORMED_PACKED})
MAX_PARTS = 2
SCALES = ("bf16", "f16")


class FragmentProduct(ConstantProduct):
    """A product over 4-bit codes, packed or not."""

    @property
    def first_extra(self) -> int:
        """The index of the first operand of the epilogue."""
        return 3 + self.normed + int(self.node.attrs["zeros"])

    @property
    def normed(self) -> bool:
        """Whether the tokens are normed first, by a gain that follows the scales."""
        return self.node.op.name in (NORMED, NORMED_PACKED)

    @cached_property
    def group(self) -> int:
        """Columns that share a scale."""
        return int(self.node.attrs["block"][1]) or self.k

    @property
    def scale(self) -> str:
        """The type of a scale in CUDA C++."""
        return CTYPES[self.node.operands[2].type.dtype]

    @property
    def zero_point(self) -> int:
        """The zero point of all groups, or -1 if each has one."""
        return -1 if self.node.attrs["zeros"] else int(self.node.attrs["zero_point"])

    def epilogue(self, generate: Callable[..., str] = epilogue) -> str:
        """Return the kernel's generated text: the macros GAIN and ZEROS, and the text that `generate` returns."""
        parameters: dict[str, str] = {}
        if self.normed:
            parameters["gain"] = "const bf16* gain"
        if self.node.attrs["zeros"]:
            parameters["zeros"] = "const unsigned char* zeros"
        defines = [f"#define {name.upper()} {name if name in parameters else 'nullptr'}" for name in ("gain", "zeros")]
        return "\n".join([*defines, generate(self, tuple(parameters.values()))])

    @property
    def weight_bytes(self) -> int:
        """The bytes of codes, scales and zero points."""
        entries = sum(int(self.node.operands[i].type.nbytes) for i in tables(self.node))
        return self.parts * self.n * self.k // 2 + entries


@dataclass(frozen=True)
class FragmentKernel(OptionalCudaKernel):
    """A kernel of quantized_linear over codes of 4 bits, which it packs into fragments at compile time, on sm_90.

    Triton implements quantized_linear, too, but not the product of normed tokens, which is not fused without NVRTC.
    """

    def reject(self, node: Node, target: Target) -> str | None:
        return lacks_wgmma(target) or _reject_types(node) or _reject_sizes(node) or _reject_weights(node)

    def layouts(self, node: Node, schedule: Schedule, target: Target) -> dict[int, str]:
        if node.op.name not in _PACKED_OF:
            return {}
        return product_layouts(node, "pack_fragments")

    def pack(self, g: Graph, node: Node, schedule: Schedule, target: Target, ops: Mapping[str, OpDef]) -> None:
        pack_product(g, node, ops["pack_fragments"], {}, ops[_PACKED_OF[node.op.name]], ops)


def _reject_types(node: Node) -> str | None:
    a, operands = node.attrs, node.operands
    x, code, scale = (v.type for v in operands[:3])
    if a.get("act"):
        return f"activations rounded to {a['act']}"
    if x.dtype != "bf16" or scale.dtype not in SCALES:
        return f"activations of {x.dtype} and scales of {scale.dtype}; bf16, and {' or '.join(SCALES)}, are supported"
    if code.dtype != "u8" or a.get("bits", 4) != 4:
        return f"codes of {code.dtype}; codes of 4 bits are supported"
    if a["zeros"] and (zeros := operands[tables(node)[1]].type.dtype) != "u8":
        return f"zero points of {zeros}; u8 is supported"
    if (gain := node.operand("gain")) and gain.type.dtype != "bf16":
        return f"a gain of {gain.type.dtype}; bf16 is supported"
    if not a["zeros"] and not 0 <= a["zero_point"] < 16:
        return f"the zero point {a['zero_point']}; 0 to 15 are supported"
    return None if node.result.type.dtype in FLOATS else f"a result of {node.result.type.dtype}"


def _reject_sizes(node: Node) -> str | None:
    x, code, parts = node.operands[0].type, node.operands[1].type, node.attrs["parts"]
    rows, k = code.shape[0].const, x.shape[-1].const
    if not rows or not k or rows % (parts * BLOCK) or k % BLOCK:
        return f"{parts} parts of {code.shape[0]} x {x.shape[-1]}; sizes must be constant multiples of {BLOCK}"
    if not 1 <= parts <= MAX_PARTS:
        return f"{parts} parts; the maximum is {MAX_PARTS}"
    p = FragmentProduct(node)
    if node.attrs["block"][0] != 1 or p.k % p.group or p.group % 16:
        return f"blocks of {list(node.attrs['block'])}; multiples of 16 columns of a row are supported"
    return reject_operands(p.extras, node.result.type)


def _reject_weights(node: Node) -> str | None:
    inputs = [v for v in node.operands[1 : FragmentProduct(node).first_extra] if origin(v) is Origin.INPUTS]
    return "the codes, scales, zero points or the gain are not known at compile time" if inputs else None
