"""The reference of products that multiply codes times scales, rounded to bf16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from kernels.harness import Case

from llmc.ir.interp import round_to_type
from llmc.ir.ops.linear import linear_map
from llmc.ir.ops.packed_codes import unpack_fragments
from llmc.ir.ops.quantize import dequantize
from llmc.ir.types import tensor


def to_bf16(x: np.ndarray) -> np.ndarray:
    return round_to_type(x, tensor("bf16", *x.shape))


@dataclass
class RoundedWeights(Case):
    """packed_fragments_linear with weights, and scales, that are rounded to bf16, and sums in float64."""

    def expected(self, inputs: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        node, a = self.node, self.node.attrs
        x, packed, *rest = (inputs[self.graph.inputs.index(v)] for v in node.operands)
        (scale, *zeros), others = (rest[:2], rest[2:]) if a["zeros"] else (rest[:1], rest[1:])
        w = dequantize.ref(
            unpack_fragments(packed), to_bf16(scale.T), *(z.T for z in zeros), block=a["block"],
            zero_point=a["zero_point"], values="", dtype="f32",
        )  # fmt: skip
        y = linear_map.ref(x.astype(np.float64), to_bf16(w), *others, parts=a["parts"], body=a["body"])
        return [round_to_type(y, node.result.type)]
