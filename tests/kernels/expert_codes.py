"""Products of experts over codes, as tests draw them: of quantised weights, and of quantised activations by weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from draw import generator
from kernels.cases import CLAMPED, SQUARED
from kernels.harness import Case
from kernels.test_triton_moe import chosen

from llmc.codegen.backends.triton.quantized_moe import QUANTIZED_MOE_DOWN, QUANTIZED_MOE_UP
from llmc.codegen.backends.triton.quantized_problem import scales_factors
from llmc.codegen.backends.triton.scaled_moe import SCALED_MOE_DOWN, SCALED_MOE_UP
from llmc.codegen.backends.triton.triton_kernel import FLOAT8, TritonKernel
from llmc.codegen.kernel import Schedule
from llmc.ir.graph import Graph, Node, Value
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import SWIGLU, moe_route
from llmc.ir.types import tensor
from llmc.targets.gpu_targets import sm_90


@dataclass(frozen=True, kw_only=True)
class ExpertStack(ABC):
    """A stack of experts: the dtype of a bias, and whether a gate multiplies; subclasses have codes and their blocks.

    Blocks have rows and columns that share a scale, 0 for all.
    """

    bias: str = ""
    gate: bool = True
    kernels: ClassVar[tuple[TritonKernel, TritonKernel]]  # of moe_down and of moe_up

    @abstractmethod
    def graph(self, up: bool, t: Any, k: int, experts: int, rows: int, columns: int) -> Graph:
        """The graph of one product; rows: of an expert's weights."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, v: Value, shape: list[int], columns: int) -> np.ndarray:
        """Draw an operand, other than those of the routing, so that sums of `columns` products are near 1."""

    @abstractmethod
    def atol(self, schedule: Schedule) -> float:
        """The permitted error under a schedule."""

    @property
    @abstractmethod
    def more(self) -> int:
        """Columns to add for a product of several steps under every schedule."""

    def body(self) -> str:
        """What moe_up computes of its products."""
        return (CLAMPED if self.bias else SWIGLU) if self.gate else SQUARED

    def case(self, up: bool, t: Any, k: int, experts: int, rows: int, columns: int, schedule: Schedule | None) -> Case:
        """A product of `t` tokens, or of 40 if that is a symbol; schedule: the first one of an H200 if it is None."""
        size = t if isinstance(t, int) else 40
        kernel, g, rng = self.kernels[up], self.graph(up, t, k, experts, rows, columns), generator()
        order, starts = moe_route.ref(chosen(size, k, experts), experts=experts)
        drawn = {"order": order, "starts": starts}
        for v in g.inputs:
            if v.name not in drawn:
                drawn[v.name] = self.draw(rng, v, [int(d.subs({"T": size})) for d in v.type.shape], columns)
        arrays = [np.asarray(drawn[v.name], np.int32 if v.type.dtype[0] in "iu" else np.float32) for v in g.inputs]
        s = schedule or kernel.schedules(next(iter(g.nodes)), sm_90())[0]
        name = f"{kernel.name} {self} {t} {k} {experts} {s}"
        return Case(name, g, kernel, s, arrays, atol=self.atol(s), sizes={"T": size})

    def nodes(self, up: tuple[int, ...], down: tuple[int, ...]) -> list[tuple[TritonKernel, Node]]:
        """Both products of a model for any number of tokens; up, down: sizes from the experts of a token on."""
        return [(self.kernels[u], n) for u, s in ((True, up), (False, down)) for n in self.graph(u, "T", *s).nodes]


def blocks(block: tuple[int, int], rows: int, columns: int) -> list[int]:
    """The shape of an expert's scales."""
    return [-(-n // b) if b else 1 for n, b in zip((rows, columns), block, strict=True)]


@dataclass(frozen=True)
class QuantizedStack(ExpertStack):
    """Dtypes of x, codes and scales, blocks, zero points, and columns between packed codes.

    zero: "" for none, a number, or "u8" for an operand. half: 0 if codes are not packed.
    """

    kernels = QUANTIZED_MOE_DOWN, QUANTIZED_MOE_UP
    x: str
    code: str
    scale: str
    block: tuple[int, int]
    zero: str = ""
    values: str = ""
    half: int = 0
    wide: bool = False  # codes of dtype u8 have 8 bits

    @property
    def bits(self) -> int:
        return 4 if self.code == "u8" and not self.wide else 8

    def graph(self, up: bool, t: Any, k: int, experts: int, rows: int, columns: int, weight: bool = True) -> Graph:
        g, pairs = Graph("test"), tensor("i32", t, k).numel
        shape = blocks(self.block, rows, columns)
        table = (experts, *(reversed(shape) if self.half else shape))
        width = columns // 2 if self.half else columns
        operands = [
            g.input("x", tensor(self.x, t if up else pairs, columns)), g.input("order", tensor("i32", pairs)),
            g.input("starts", tensor("i32", experts + 1)),
            g.input("code", tensor(self.code, experts, rows, width), weight=weight),
            g.input("scale", tensor(self.scale, *table), weight=True),
        ]  # fmt: skip
        operands += [] if up else [g.input("weights", tensor(self.x, t, k))]
        operands += [g.input("zero", tensor("u8", *table), weight=True)] if self.zero == "u8" else []
        operands += [g.input("bias", tensor(self.bias, experts, rows), weight=True)] if self.bias else []
        attrs: dict[str, Any] = {"block": self.block, "values": self.values, "bits": self.bits, "half": self.half}
        attrs |= {"zeros": True} if self.zero == "u8" else {"zero_point": int(self.zero or 0)}
        attrs |= {"k": k, "body": self.body()} if up else {}
        g.outputs = [g.add(OPS["quantized_moe_up" if up else "quantized_moe_down"], operands, attrs).result]
        return g

    def draw(self, rng: np.random.Generator, v: Value, shape: list[int], columns: int) -> np.ndarray:
        if v.name == "code" and v.type.dtype not in FLOAT8:
            return rng.integers(*((-128, 128) if self.code == "i8" else (0, 256)), shape)
        if v.name == "zero":
            return rng.integers(0, 16, shape)
        if v.name == "scale":
            return rng.uniform(0.5, 2.0, shape) / {"i8": 75, "u8": 5}.get(self.code, 1) / np.sqrt(columns)
        return rng.standard_normal(shape)

    def atol(self, schedule: Schedule) -> float:
        """Large tiles round codes times scales to the dtype of x: an error of up to 2 ** -9 of each term."""
        return 6e-2 if scales_factors(self.half, schedule["bm"], self.scale, self.x) else 2e-2

    @property
    def more(self) -> int:
        return 0 if self.half else 128


@dataclass(frozen=True)
class ScaledStack(ExpertStack):
    """The dtype of all codes, and the blocks that share a scale."""

    kernels = SCALED_MOE_DOWN, SCALED_MOE_UP
    code: str
    block: tuple[int, int] = (1, 0)
    scale: str = "f32"
    x: str = ""  # dtype of the activations' codes, if that is another one
    more = 256

    def graph(self, up: bool, t: Any, k: int, experts: int, rows: int, columns: int) -> Graph:
        g, pairs = Graph("test"), tensor("i32", t, k).numel
        shape, m = blocks(self.block, rows, columns), t if up else pairs
        operands = [
            g.input("x", tensor(self.x or self.code, m, columns)), g.input("order", tensor("i32", pairs)),
            g.input("starts", tensor("i32", experts + 1)),
            g.input("code", tensor(self.code, experts, rows, columns), weight=True),
            g.input("scale", tensor(self.scale, experts, *shape), weight=True),
            g.input("x_scale", tensor("f32", m, shape[1])),
        ]  # fmt: skip
        operands += [] if up else [g.input("weights", tensor("f32", t, k))]
        operands += [g.input("bias", tensor(self.bias, experts, rows), weight=True)] if self.bias else []
        attrs: dict[str, Any] = {"block": self.block}
        attrs |= {"k": k, "body": self.body(), "dtype": "bf16"} if up else {}
        g.outputs = [g.add(OPS["scaled_moe_up" if up else "scaled_moe_down"], operands, attrs).result]
        return g

    def draw(self, rng: np.random.Generator, v: Value, shape: list[int], columns: int) -> np.ndarray:
        if v.name in ("x", "code"):
            return np.clip(np.rint(40 * rng.standard_normal(shape)), -127, 127)
        if v.name in ("x_scale", "scale"):
            return rng.uniform(0.2, 2.0, shape) / 40 / columns**0.25
        return rng.standard_normal(shape)

    def atol(self, schedule: Schedule) -> float:
        return 2e-3


# Stacks with the columns of their products.
QUANTIZED = {
    "rows8": (QuantizedStack("bf16", "i8", "f32", (1, 0)), 37),
    "groups8": (QuantizedStack("f16", "i8", "bf16", (1, 64)), 150),
    "floats": (QuantizedStack("bf16", "f8e4m3", "f32", (1, 0), bias="bf16"), 70),
    "tiles": (QuantizedStack("bf16", "f8e4m3", "f32", (8, 32)), 75),
    "group128": (QuantizedStack("bf16", "u8", "bf16", (1, 128), "8", half=64), 256),
    "group32": (QuantizedStack("f16", "u8", "f16", (1, 32), "7", half=32), 192),
    "zeros": (QuantizedStack("bf16", "u8", "f16", (1, 64), "u8", half=32, bias="f32"), 128),
    "whole": (QuantizedStack("f32", "u8", "f32", (1, 0), "8", half=16), 96),
    "mxfp4": (QuantizedStack("bf16", "u8", "bf16", (1, 32), values="e2m1", half=32, bias="bf16"), 192),
    "nvfp4": (QuantizedStack("bf16", "u8", "f32", (1, 16), values="e2m1", half=16), 96),
    "no gate": (QuantizedStack("bf16", "u8", "bf16", (1, 64), "8", half=32, bias="f32", gate=False), 128),
}
SCALED = {
    "scaled int8": (ScaledStack("i8"), 37),
    "scaled int8-groups": (ScaledStack("i8", (1, 64), bias="f32"), 192),
    "scaled fp8": (ScaledStack("f8e4m3", bias="bf16"), 70),
    "scaled fp8-tiles": (ScaledStack("f8e4m3", (8, 32)), 96),
    "scaled fp8-block": (ScaledStack("f8e4m3", (128, 128)), 256),
    "scaled fp8-columns": (ScaledStack("f8e4m3", (0, 64), scale="bf16"), 128),
    "scaled, no gate": (ScaledStack("f8e4m3", (8, 32), bias="f32", gate=False), 96),
}
