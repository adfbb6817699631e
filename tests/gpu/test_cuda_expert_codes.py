"""The CUDA C++ products of experts over codes of 4 bits on a GPU against the references of their ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from draw import generator
from gpu.launcher import Card
from gpu.rounded_weights import to_bf16
from gpu.test_cuda_kernels import check, routing
from kernels.cases import CLAMPED
from kernels.harness import Case

from llmc.codegen.backends.cuda.grouped_codes import GROUPED_CODES
from llmc.codegen.expert_stack import CODE, Stack
from llmc.codegen.kernel import READ_BEFORE_WAIT
from llmc.ir.graph import Graph
from llmc.ir.interp import round_to_type
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU, moe_down, moe_up
from llmc.ir.ops.packed_codes import unpack_fragments
from llmc.ir.ops.quantize import dequantize
from llmc.ir.ops.quantized_moe import separate
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_90

pytestmark = pytest.mark.gpu
# Tokens, experts of each, experts, columns, depth, columns that share a scale, zero points ("", "u8" for each group,
# "e2m1" for floats), the dtypes of scales and of the bias, and the choice. Depths are odd and even numbers of 64
# columns; columns do not fill the last tile of weight rows.
CODED = (
    (1, 8, 128, 96, 192, 64, "", "bf16", "", "even"),
    (5, 2, 6, 128, 256, 128, "u8", "f16", "bf16", "even"),
    (33, 2, 300, 64, 128, 32, "e2m1", "bf16", "bf16", "even"),
    (40, 4, 9, 256, 320, 32, "e2m1", "bf16", "f32", "even"),
    (300, 8, 32, 192, 512, 128, "", "bf16", "", "even"),
    (300, 2, 5, 64, 1024, 512, "u8", "bf16", "", "even"),
    (700, 2, 4, 320, 384, 128, "u8", "bf16", "bf16", "even"),
    (333, 2, 16, 128, 640, 16, "", "f16", "", "the same"),
    (260, 1, 260, 64, 256, 0, "", "bf16", "", "one each"),
)
MOST_TILES = 7  # schedules of a product that are drawn


MOST_SCALED_SUMS = 32  # rows of x of a product whose sums can be scaled
TOLERANCE = 2e-3


@dataclass
class Coded(Case):
    """A product whose expected results are rounded where the kernel rounds.

    A tile multiplies either codes, which bf16 holds exactly, and scales the sums, or codes times scales, rounded to
    bf16.
    """

    def expected(self, inputs: Sequence[np.ndarray], sizes: Mapping[str, int]) -> list[np.ndarray]:
        (exact,) = super().expected(inputs, sizes)
        order, starts, stack = inputs[1], inputs[2], Stack(self.node)
        constants = self.kernel.bind(self.node, self.schedule, sm_90()).constants  # type: ignore[attr-defined]
        at = np.concatenate([scales_factors(constants, int(n)) for n in np.diff(starts)])
        rows = np.flatnonzero(at) if stack.up else order[at]
        found, rounded = (x.reshape(len(order), -1) for x in (exact.copy(), self._rounded(inputs)))
        found[rows] = rounded[rows]
        return [found.reshape(exact.shape)]

    def _rounded(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """The results with weights and scales that are rounded to bf16."""
        node, stack = self.node, Stack(self.node)
        at = {name: stack.operand(name) for name in ("scale", "zero", "bias")}
        tables = [separate(np.swapaxes(inputs[i], 1, 2), stack.parts) for i in (at["scale"], at["zero"]) if i]
        code = separate(unpack_fragments(inputs[CODE]), stack.parts)
        options = {name: node.attrs[name] for name in ("block", "zero_point", "values")}
        w = to_bf16(dequantize.ref(code, to_bf16(tables[0]), *tables[1:], dtype="f32", **options))
        bias = None if at["bias"] is None else inputs[at["bias"]]
        if stack.up:
            y = moe_up.ref(*inputs[:CODE], w, bias, k=node.attrs["k"], body=node.attrs["body"])
        else:
            y = moe_down.ref(*inputs[:CODE], w, inputs[stack.operand("weights") or 0], bias)
        return round_to_type(y, node.result.type)


def scales_factors(constants: Mapping[str, Any], rows: int) -> np.ndarray:
    """Whether the kernel multiplies codes times scales, for each row of an expert; `find_tile` has the tiles."""
    if rows == 0:
        return np.zeros(0, bool)
    tiles = -(-rows // constants["TILE_M"])
    each = -(-rows // tiles // 8) * 8
    first = np.arange(rows) // each * each
    narrowest = constants["NARROWEST"]
    width = -(-np.minimum(each, rows - first) // narrowest) * narrowest
    return (width > MOST_SCALED_SUMS) | (constants["STEP"] > constants["GROUP"])


def coded(
    t: int, k: int, experts: int, n: int, d: int, group: int, zero: str, scale: str, bias: str, choice: str
) -> list[Case]:
    """The products of a mixture of experts over codes of 4 bits, by some schedules: the second if n is its depth."""
    rng = generator()
    routed = routing(t, k, experts, choice)
    found = []
    for is_up in (True,) if n % 64 else (True, False):
        rows, columns = (2 * n, d) if is_up else (d, n)
        block = group if group and columns % group == 0 else 64 if group > 64 else group
        groups = columns // block if block else 1
        g, pairs = Graph("test"), tensor("i32", "T", k).numel
        operands = [
            g.input("x", tensor("bf16", "T" if is_up else pairs, columns)), g.input("order", tensor("i32", pairs)),
            g.input("starts", tensor("i32", experts + 1)),
            g.input("code", tensor("u8", experts, rows, columns // 2), weight=True),
            g.input("scale", tensor(scale, experts, groups, rows), weight=True),
        ]  # fmt: skip
        operands += [] if is_up else [g.input("weights", tensor("bf16", "T", k))]
        operands += [g.input("zero", tensor("u8", experts, groups, rows), weight=True)] if zero == "u8" else []
        operands += [g.input("bias", tensor(bias, experts, rows), weight=True)] if bias else []
        attrs: dict[str, Any] = {"block": (1, block), "zeros": zero == "u8", "zero_point": 0 if zero else 8}
        attrs |= {"values": zero} if zero == "e2m1" else {}
        attrs |= {"k": k, "body": CLAMPED if bias else SWIGLU} if is_up else {"dtype": ("f32", "bf16")[t % 2]}
        node = g.add(OPS["fragments_moe_up" if is_up else "fragments_moe_down"], operands, attrs)
        g.outputs = [node.result]
        drawn: dict[str, Any] = {"order": routed[0], "starts": routed[1]}
        for v in g.inputs:
            shape = [int(size.subs({"T": t})) for size in v.type.shape]
            if v.name == "scale":
                drawn[v.name] = rng.uniform(0.5, 2.0, shape) / 5 / np.sqrt(columns)
            elif v.type.dtype == "u8":
                drawn[v.name] = rng.integers(0, 256 if v.name == "code" else 16, shape)
            else:
                drawn.setdefault(v.name, rng.standard_normal(shape))
        inputs = [np.asarray(drawn[v.name], np.int32 if v.type.dtype[0] in "iu" else np.float32) for v in g.inputs]
        assert GROUPED_CODES.reject(node, sm_90()) is None
        name = f"{node.op.name} {t} {k} {experts} {n} {d} {block} {zero} {scale} {bias} {choice}"
        schedules = GROUPED_CODES.schedules(node, sm_90())
        for i, at in enumerate(rng.permutation(len(schedules))[:MOST_TILES]):
            s = {**schedules[at], **({READ_BEFORE_WAIT: 1} if i % 2 else {})}
            found.append(Coded(f"{name} {s}", g, GROUPED_CODES, s, inputs, atol=TOLERANCE, sizes={"T": t}))
    return found


@pytest.mark.parametrize("problem", CODED, ids=str)
def test_experts_of_4_bit_codes(problem: tuple[Any, ...], card: Card) -> None:
    check(coded(*problem), card)
