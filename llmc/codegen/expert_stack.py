"""The stack of weights that a product of experts reads, and its packing; shared by the kernels of all languages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmc.ir.graph import Graph, Node
from llmc.ir.opdef import OpDef
from llmc.ir.ops.moe import parts
from llmc.ir.types import Type
from llmc.passes.analysis import Origin, origin

STARTS = 2  # the operand that has the first row of each expert
CODE = 3  # the operand that is the stack, or the codes of a quantised one


@dataclass(frozen=True)
class Stack:
    """The stack of moe_up or moe_down, or of their forms over codes: quantized_moe_up, fragments_moe_up and so on."""

    node: Node

    @property
    def quantized(self) -> bool:
        """Whether the stack is quantised."""
        return self.scaled or self.node.op.name.startswith(("quantized", "fragments"))

    @property
    def scaled(self) -> bool:
        """Whether the rows of activations are codes with scales, too."""
        return self.node.op.name.startswith("scaled")

    @property
    def up(self) -> bool:
        """Whether it belongs to the first product, whose rows are tokens."""
        return self.node.op.name.endswith("up")

    @property
    def parts(self) -> int:
        """Row blocks of an expert: gate and up, or one."""
        return parts(self.node.attrs["body"]) if self.up else 1

    def operand(self, name: str) -> int | None:
        """Return the index of an operand: code, scale, x_scale, zero, weights or bias; None if the node lacks it."""
        names = ["x", "order", "starts", "code"]
        if self.quantized:
            names.append("scale")
        if self.scaled:
            names.append("x_scale")
        if not self.up:
            names.append("weights")
        if self.node.attrs.get("zeros"):
            names.append("zero")
        if len(self.node.operands) > len(names):
            names.append("bias")
        return names.index(name) if name in names else None

    def type(self, name: str) -> Type | None:
        """Return the type of an operand, None if the node lacks it."""
        i = self.operand(name)
        return None if i is None else self.node.operands[i].type

    @property
    def code(self) -> Type:
        """The type of the codes, or of the weights if they are not quantised."""
        return self.node.operands[CODE].type

    @property
    def experts(self) -> int:
        """The number of experts."""
        return int(self.code.shape[0])

    @property
    def rows(self) -> int:
        """The number of weight rows of an expert."""
        return int(self.code.shape[1])

    @property
    def n(self) -> int:
        """The number of weight rows of each part."""
        return self.rows // self.parts

    @property
    def k(self) -> int:
        """The number of weight columns."""
        return int(self.node.operands[0].type.shape[1])

    @property
    def narrow(self) -> bool:
        """Whether codes have at most 4 bits, are not packed, and are known at compile time."""
        a = self.node.attrs
        known = origin(self.node.operands[CODE]) is not Origin.INPUTS
        return bool(self.quantized and not a["half"] and a["bits"] <= 4 and known)

    def layouts(self, half: int) -> dict[int, str]:
        """Return operand -> layout of a stack that is packed with this `half` (see `Kernel.layouts`)."""
        transposed = [i for i in (self.operand("scale"), self.operand("zero")) if i is not None]
        return {CODE: f"pack_nibbles{{half={half}}}", **dict.fromkeys(transposed, "transpose{perm=[0, 2, 1]}")}


def chosen_experts(pairs: int, experts: int) -> float:
    """Return the mean number of experts that have rows, if every pair chooses one of them evenly."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def row_blocks(pairs: int, experts: int, height: int) -> float:
    """Return the mean number of blocks of at most `height` rows of one expert, if pairs choose experts evenly.

    The rows of an expert are Poisson distributed; more than a block of them, nearly normally.
    """
    mean = pairs / experts
    blocks, rows = chosen_experts(pairs, experts), height
    while rows < mean + 6 * math.sqrt(mean):
        blocks += experts * 0.5 * math.erfc((rows + 0.5 - mean) / math.sqrt(2 * mean))
        rows += height
    return blocks


def overlapped(read: float, products: float) -> float:
    """Return the time of a kernel that needs `read` to read its weights and `products` to multiply."""
    return float((read**3 + products**3) ** (1 / 3))


def pack_stack(g: Graph, node: Node, half: int, operands: Sequence[int], ops: Mapping[str, OpDef]) -> None:
    """Replace a product by one over packed codes; of `operands`, those after the codes are transposed."""
    new = list(node.operands)
    for i in operands:
        op, attrs = ("pack_nibbles", {"half": half}) if i == CODE else ("transpose", {"perm": (0, 2, 1)})
        new[i] = g.add(ops[op], [new[i]], attrs, before=node, loc=node.loc).result
    attrs = {**node.attrs, "half": half, "bits": 4}
    g.replace_op(node, node.op, new, attrs)
