"""What a row of the aten table works with: the call's operands, its expected results, a few helpers; no row is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Value
from llmc.ir.types import Type

# 64-bit integers are token ids, positions and expert numbers: all fit 32 bits, which is what the runtime stores.
IR_DTYPE = MappingProxyType(
    {
        torch.float64: "f64",
        torch.float32: "f32",
        torch.bfloat16: "bf16",
        torch.float16: "f16",
        torch.int64: "i32",
        torch.int32: "i32",
        torch.int16: "i16",
        torch.int8: "i8",
        torch.uint8: "u8",
        torch.bool: "bool",
    }
)
# A complex tensor is one of floats with a last axis of real and imaginary parts.
PARTS = MappingProxyType({torch.complex64: torch.float32, torch.complex128: torch.float64})


class Unsupported(Exception):
    """A row met arguments that it does not cover; the message says which."""


class Sizes:
    """torch's symbolic sizes as Dims; equal expressions are translated once."""

    def __init__(self, names: Mapping[Any, str]):
        self.names = names
        self.seen: dict[Any, Dim] = {}

    def dim(self, size: Any) -> Dim:
        if isinstance(size, int):
            return Dim.of(size)
        expr = size.node.expr
        if expr not in self.seen:
            self.seen[expr] = self._walk(expr)
        return self.seen[expr]

    def shape(self, sizes: Sequence[Any]) -> tuple[Dim, ...]:
        return tuple(self.dim(s) for s in sizes)

    def type(self, fake: torch.Tensor) -> Type:
        if (floats := PARTS.get(fake.dtype)) is not None:
            return Type(IR_DTYPE[floats], (*self.shape(fake.shape), Dim.of(2)))
        return Type(IR_DTYPE[fake.dtype], self.shape(fake.shape))

    def _walk(self, e: Any) -> Dim:
        if e.is_Integer:
            return Dim.of(int(e))
        if e in self.names:
            return Dim.of(self.names[e])
        args = [self._walk(a) for a in e.args]
        kind = type(e).__name__
        if kind == "Add":
            return sum(args[1:], args[0])
        if kind in ("Mul", "Pow"):
            if kind == "Pow":
                args = args[:1] * int(e.args[1])
            total = Dim.of(1)
            for a in args:
                total = total * a
            return total
        if kind in ("FloorDiv", "CleanDiv") and (den := args[1].const):
            exact = args[0].divide(den)
            return exact if exact is not None else (args[0] - (den - 1)).ceildiv(den)
        raise Unsupported(f"the size {e} is not a polynomial of T and R")


@dataclass(frozen=True)
class Call:
    """One aten call being lowered. `types`: what torch says of its results (64-bit integers as i32)."""

    b: Builder
    types: tuple[Type, ...]
    positions: Value

    @property
    def type(self) -> Type:
        return self.types[0]

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.types[0].shape

    def value(self, x: Any, like: Value | Type) -> Value:
        """A Value as it is; a number as a constant of `like`'s dtype, or of f32 where that dtype cannot hold it."""
        if isinstance(x, Value):
            return x
        if isinstance(x, Dim):
            if x.const is None:
                raise Unsupported(f"arithmetic on the symbolic size {x}")
            x = x.const
        dtype = (like.type if isinstance(like, Value) else like).dtype
        kind = DTYPES[dtype].kind
        if kind == "f":
            return self.b.constant(float(x), dtype if _holds(dtype, float(x)) else "f32")
        if isinstance(x, float) and not x.is_integer():
            return self.b.constant(x, "f32")
        return self.b.constant(x, dtype if kind == "i" else "i32")

    def cast(self, x: Value, dtype: str) -> Value:
        return x if x.type.dtype == dtype else self.b.cast(x, dtype=dtype)

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """x with another shape; reshapes of reshapes read their source."""
        shape = tuple(shape)
        while x.type.shape != shape and x.node is not None and x.node.op.name == "reshape":
            x = x.node.operands[0]
        return x if x.type.shape == shape else self.b.reshape(x, shape=shape)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """x with its axes permuted; transposing back gives the source."""
        perm = tuple(perm)
        if perm == tuple(range(len(perm))):
            return x
        if x.node is not None and x.node.op.name == "transpose":
            inner = x.node.attrs["perm"]
            if tuple(inner[p] for p in perm) == tuple(range(len(perm))):
                return x.node.operands[0]
        return self.b.transpose(x, perm=perm)

    def broadcast(self, x: Value, shape: Sequence[Dim]) -> Value:
        return x if x.type.shape == tuple(shape) else self.b.broadcast(x, shape=tuple(shape))

    def part(self, x: Value, axis: int, start: Dim | int, stop: Dim | int) -> Value:
        whole = x.type.shape[axis]
        if Dim.of(start).const == 0 and Dim.of(stop) == whole:
            return x
        return self.b.slice(x, axis=axis, start=Dim.of(start), stop=Dim.of(stop), step=1)


def axis_of(x: Value | Type, dim: int) -> int:
    """A non-negative axis."""
    rank = (x.type if isinstance(x, Value) else x).rank
    return dim + rank if dim < 0 else dim


def _holds(dtype: str, x: float) -> bool:
    """Whether rounding x to the dtype keeps what torch would compute with (torch keeps scalars at 32 bits or more)."""
    if dtype in ("f32", "f64") or np.isinf(x):
        return True
    return float(np.asarray(x, dtype=DTYPES[dtype].np)) == x
